"""Figures of a table in the memory of the device: gather, draws, updates, adds, captured steps,
sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support.report import Row
from gpu_clock import Clock, Run, ask, median_us, row_of, rows_against
from torch import Tensor

from deepspeed_gear import DeviceReplay
from deepspeed_gear.ops import load_backend

ALPHA = 0.6
BETA = 0.4
# words of a resolution, ops/csrc/common/slot.h
FIRST_ROW = 3
ANCHOR = 5
# of the windows, in steps; of a step
LENGTH = 20
ROW_BYTES = 64
# gathers of a graph, and how many batches they rotate over
ROUNDS = 16
OUTS = 4
CALLS = 20  # draws or updates of a graph
COPY = "device copy of the same bytes"
TRANSITION = {
    "observation": (11,),
    "next_observation": (11,),
    "action": (3,),
    "reward": (),
    "done": (),
}
SIMULATED = {"observation": (11,), "action": (3,), "reward": ()}  # and `terminated`, of a simulator
STEP: dict[str, dict[str, Any]] = {
    name: {"dtype": "float32", "shape": list(shape), "role": name}
    for name, shape in SIMULATED.items()
}
STEP["observation"]["rows"] = "T+1"
STEP["terminated"] = {"dtype": "bool", "role": "terminated"}


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Args:
        trajectories: Of the gather's table.
        steps: Of each.
        batches: B of the gathers; the last one is of at least 128 MB.
        masses: Items that are drawn from.
        items: Of the captured step.
        copied: Bytes of the copy that gives the card's bandwidth.
        replays: Of the captured step in a block.
        envs: Transitions of an add, one of each environment.
        rewarded: Trajectories whose returns are summed.
        simulated: Environments of a simulator on the device, and the bounds in us: of the add of a
            step of each, and of one with a sample and an update.
        episode: Steps of an episode of the simulator.
        rollout: Environments of a PPO, and their steps in a roll-out.
    """

    trajectories: int = 33_554
    steps: int = 1000
    batches: tuple[int, ...] = (4096, 131_072)
    masses: int = 1 << 24
    items: int = 1_000_000
    copied: int = 1 << 30
    replays: int = 1000
    envs: tuple[int, ...] = (16, 256, 1024)
    rewarded: int = 64
    simulated: Mapping[int, tuple[float, float]] = field(
        default_factory=lambda: {64: (23.0, 36.0), 4096: (44.0, 57.0)}
    )
    episode: int = 100
    rollout: tuple[int, int] = (4096, 24)


SMOKE = Sizes(40, 50, (64, 96), 4096, 2000, 1 << 16, 3, (4, 16), 2, {4: (23.0, 36.0)}, 20, (16, 24))


def columns_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        name: {"dtype": "bool" if name == "done" else "float32", "shape": list(shape)}
        for name, shape in shapes.items()
    }


def replay_of(
    shapes: Mapping[str, tuple[int, ...]],
    trajectories: int,
    steps: int,
    device: torch.device,
    **options: Any,
) -> DeviceReplay:
    """Return a replay whose table is full of random content."""
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": columns_of(shapes)}}
    table |= {"capacity_steps": trajectories * steps, "max_length": steps}
    table["capacity_trajectories"] = trajectories
    replay = DeviceReplay({"seed": 0, "tables": {"main": table}, **options}, device)
    at_once = min(max(1, (1 << 16) // steps), max(1, trajectories // 2))
    for first in range(0, trajectories, at_once):
        count = min(at_once, trajectories - first)
        replay.add_(dict(_content(shapes, count, steps, device)))
    return replay


def _content(
    shapes: Mapping[str, tuple[int, ...]], count: int, steps: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        values = torch.randn(count, steps, *shape, device=device)
        yield name, values > 2 if name == "done" else values


def gathers(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Windows of 20 steps of 64 bytes: one column, and three."""
    card = _card_gb_per_s(clock, sizes)
    for shapes in ({"row": (16,)}, {"observation": (12,), "action": (3,), "reward": ()}):
        fields = {name: {"offset": 0, "length": LENGTH} for name in shapes}
        sampler = {"kind": "uniform", "unit": "step", "anchors": "fits"}
        options: dict[str, Any] = {
            "sampler": sampler,
            "fields": fields,
            "batch_size": max(sizes.batches),
        }
        table = sizes.trajectories, sizes.steps
        with replay_of(shapes, *table, clock.device, **options) as replay:
            yield from _gathers_of(clock, sizes, replay, card)


def _card_gb_per_s(clock: Clock, sizes: Sizes) -> float:
    """Return the card's copy bandwidth, read and written."""
    source, target = (
        torch.zeros(sizes.copied, dtype=torch.uint8, device=clock.device) for _ in range(2)
    )
    seconds = clock.compare({"copy": clock.graph(lambda: target.copy_(source))})["copy"]
    return 2 * sizes.copied / median_us(seconds) / 1e3


def _gathers_of(clock: Clock, sizes: Sizes, replay: DeviceReplay, card: float) -> Iterator[Row]:
    gatherer = replay._mixture.tables[0].gatherer
    outs = [replay.new_batch() for _ in range(OUTS)]
    records = []
    for _ in range(ROUNDS):
        replay.sample_(outs[0])
        records.append(outs[0].resolutions.clone())
    names = list(replay.table.columns)
    columns = [replay.table.columns[name] for name in names]
    packed = torch.cat([column.reshape(len(column), -1) for column in columns], 1)
    targets = [
        torch.zeros(max(sizes.batches), LENGTH, 16, device=clock.device) for _ in range(OUTS)
    ]
    firsts = [part[:, FIRST_ROW] + part[:, ANCHOR] for part in records]
    steps = torch.arange(LENGTH, device=clock.device)
    for size in sizes.batches:
        num_rows = size * LENGTH
        rows = [(first[:size, None] + steps).reshape(-1) for first in firsts]
        stride = max(1, (len(packed) - num_rows) // ROUNDS)

        def gear(size: int = size) -> None:
            for turn, part in enumerate(records):
                gatherer.fill(outs[turn % OUTS].buffers.part(0, size), part[:size])

        def copy(size: int = size, num_rows: int = num_rows, stride: int = stride) -> None:
            for turn in range(ROUNDS):
                source = packed[turn * stride : turn * stride + num_rows]
                targets[turn % OUTS][:size].view(num_rows, 16).copy_(source)

        def select(size: int = size, rows: list[Tensor] = rows) -> None:
            for turn, part in enumerate(rows):
                for name, column in zip(names, columns, strict=True):
                    out = outs[turn % OUTS][name][:size].flatten(0, 1)
                    torch.index_select(column, 0, part, out=out)

        runs = {"gear": gear, COPY: copy, "torch.index_select": select}
        times = clock.compare({name: clock.graph(run) for name, run in runs.items()})
        num_bytes = num_rows * ROW_BYTES
        case = f"{len(names)} column(s), B={size}"
        found = rows_against("gather", case, times, COPY, ROUNDS, num_bytes)
        for row in found.values():
            of_card = 2 * num_bytes / row["us"] / 1e3 / card
            row |= {"of_card": of_card, "card_gb_per_s": card, "batch_mb": num_bytes / 1e6}
        gear_row = found["gear"]
        is_small = size == sizes.batches[0]
        ask(gear_row, *(("fraction", 0.7) if is_small else ("of_card", 0.85)))
        gear_row["rows_right"] = _is_right(gatherer, outs, records, packed)
        yield from found.values()


def _is_right(gatherer: Any, outs: list[Any], records: list[Tensor], packed: Tensor) -> bool:
    """Tell whether the gather of a whole batch gives the rows of the table."""
    batch = outs[0]
    gatherer.fill(batch.buffers, records[0])
    first = records[0][:, FIRST_ROW] + records[0][:, ANCHOR]
    rows = first[:, None] + torch.arange(LENGTH, device=packed.device)
    got = torch.cat([batch[name].reshape(*rows.shape, -1) for name in batch], 2)
    return bool(torch.equal(got, packed[rows]))


def selection(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Draws from many masses, and updates of priorities."""
    count = min(1024, sizes.masses // 4)
    sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    options: dict[str, Any] = {"sampler": sampler, "fields": {"value": {}}, "batch_size": count}
    with replay_of({"value": ()}, sizes.masses, 1, clock.device, **options) as replay:
        batches = [replay.new_batch() for _ in range(CALLS)]
        values = [torch.rand(count, device=clock.device) * 3 for _ in range(CALLS)]
        copies = torch.zeros_like(batches[0].resolutions)

        def draw() -> None:
            for batch in batches:
                assert batch.importance is not None
                replay._mixture.select_(batch.resolutions, batch.importance, batch.epoch[:0])

        def update() -> None:
            for batch, priorities in zip(batches, values, strict=True):
                replay.update_priorities_(batch, priorities)

        def copy() -> None:
            for batch in batches:
                copies.copy_(batch.resolutions)

        draw()
        update()
        ceiling = "device copy of the records"
        runs = {"draw": draw, "update": update, ceiling: copy}
        times = clock.compare({name: clock.graph(run) for name, run in runs.items()})
        case = f"{count} of {sizes.masses} masses, {CALLS} in a graph"
        for name, bound in (("draw", 15.0), ("update", 12.0)):
            row = rows_against(name, case, times, ceiling, CALLS)[name]
            yield ask({**row, "what": "gear"}, "us", at_most=bound)


def steps(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Sample and update at B=256, as one captured graph."""
    count = 256
    items = sizes.items
    sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    fields: dict[str, Any] = {name: {} for name in TRANSITION}
    options: dict[str, Any] = {"sampler": sampler, "fields": fields, "batch_size": count}
    with replay_of(TRANSITION, items, 1, clock.device, **options) as replay:
        batch = replay.new_batch()
        td = torch.rand(count, device=clock.device)
        columns = {name: column[:items] for name, column in replay.table.columns.items()}
        source = torch.zeros(count, sum(c[0].numel() * c.element_size() for c in columns.values()))
        source = source.to(torch.uint8).to(clock.device)
        target = torch.zeros_like(source)

        def gear() -> None:
            replay.sample_(batch)
            replay.update_priorities_(batch, td)

        graphs = {"gear": gear, COPY: lambda: target.copy_(source)}
        runs = {name: clock.graph(run) for name, run in graphs.items()}
        times = clock.compare(runs, sizes.replays)
        case = f"B={count}, {items} items, mean of {sizes.replays}"
        found = rows_against("sample and update", case, times, COPY, 1, source.numel())
        ask(found["gear"], "us", at_most=12.0)
        yield from found.values()


def kernels(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """What each op of a captured step adds to a graph that has it 20 times, and an empty node."""
    count = 256
    items = sizes.items
    sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    options: dict[str, Any] = {
        "sampler": sampler,
        "fields": {n: {} for n in TRANSITION},
        "batch_size": count,
    }
    with replay_of(TRANSITION, items, 1, clock.device, **options) as replay:
        batch = replay.new_batch()
        td = torch.rand(count, device=clock.device)
        gatherer = replay._mixture.tables[0].gatherer
        nothing = torch.zeros(32, device=clock.device)
        assert batch.importance is not None
        runs: dict[str, Run] = {
            "a node": lambda: nothing.add_(1),
            f"draw {count}": partial(
                replay._mixture.select_, batch.resolutions, batch.importance, batch.epoch[:0]
            ),
            f"gather {count}": lambda: gatherer.fill(batch.buffers, batch.resolutions),
            f"update {count}": lambda: replay.update_priorities_(batch, td),
        }
        for envs in sizes.envs:
            given = dict(_content(TRANSITION, envs, 1, clock.device))
            lengths = torch.ones(envs, dtype=torch.int64, device=clock.device)
            runs[f"add {envs}"] = partial(replay.add_, given, lengths)
        graphs = {name: clock.graph(partial(_repeat, run)) for name, run in runs.items()}
        for name, seconds in clock.compare(graphs).items():
            yield row_of(
                "kernels",
                f"{name}, {items} items, {CALLS} in a graph",
                "gear",
                median_us(seconds, CALLS),
            )
    yield from _epochs(clock, sizes)


def _epochs(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """What a minibatch of an epoch over a roll-out takes: its draw alone, and with its rows."""
    envs, steps = sizes.rollout
    count = envs * steps // 4
    options: dict[str, Any] = {
        "sampler": {"kind": "epoch", "unit": "step"},
        "fields": {n: {} for n in TRANSITION},
        "batch_size": count,
    }
    with replay_of(TRANSITION, envs, steps, clock.device, **options) as replay:
        batch = replay.new_batch()
        weights = torch.empty(0, device=clock.device)
        runs: dict[str, Run] = {
            "draw": partial(replay._mixture.select_, batch.resolutions, weights, batch.epoch),
            "sample": partial(replay.sample_, batch),
        }
        graphs = {name: clock.graph(partial(_repeat, run)) for name, run in runs.items()}
        for name, seconds in clock.compare(graphs).items():
            case = f"{name} {count} of an epoch of {envs * steps} steps, {CALLS} in a graph"
            yield row_of("kernels", case, "gear", median_us(seconds, CALLS))


def _repeat(run: Run) -> None:
    for _ in range(CALLS):
        run()


def online(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Adds of transitions, a whole captured step with one, and sums of rewards."""
    count = 256
    items = sizes.items
    sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    options: dict[str, Any] = {
        "sampler": sampler,
        "fields": {n: {} for n in TRANSITION},
        "batch_size": count,
    }
    with replay_of(TRANSITION, items, 1, clock.device, **options) as replay:
        batch = replay.new_batch()
        td = torch.rand(count, device=clock.device)
        for envs in sizes.envs:
            given = dict(_content(TRANSITION, envs, 1, clock.device))
            lengths = torch.ones(envs, dtype=torch.int64, device=clock.device)
            copies = {name: torch.zeros_like(values) for name, values in given.items()}

            def add(given: dict[str, Tensor] = given, lengths: Tensor = lengths) -> None:
                replay.add_(given, lengths)

            def turn(add: Run = add) -> None:
                add()
                replay.sample_(batch)
                replay.update_priorities_(batch, td)

            def copy(given: dict[str, Tensor] = given, copies: dict[str, Tensor] = copies) -> None:
                for name, values in given.items():
                    copies[name].copy_(values)

            case = f"{envs} transitions, {items} items"
            ceiling = "device copies of the columns"
            runs = {"add": add, "add, sample and update": turn, ceiling: copy}
            times = clock.compare({name: clock.graph(run) for name, run in runs.items()})
            found = rows_against("add", case, times, ceiling)
            for row, bound in zip(found.values(), (7.0, 20.0), strict=True):
                yield ask({**row, "figure": row["what"], "what": "gear"}, "us", at_most=bound)
    for envs, bounds in sizes.simulated.items():
        yield from _env_steps(clock, sizes, envs, bounds)
    yield from _sums(clock, sizes)


def _env_steps(clock: Clock, sizes: Sizes, envs: int, bounds: tuple[float, float]) -> Iterator[Row]:
    """Give the add of a step of every environment, alone and in a whole captured step."""
    count = 256
    ceiling = "device copies of the columns"
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": STEP}, "num_envs": envs}
    table |= {"capacity_steps": sizes.items, "max_length": sizes.episode}
    fields: dict[str, Any] = {name: {} for name in STEP}
    fields["next_observation"] = {"column": "observation", "offset": 1}
    sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    config = {
        "seed": 0,
        "tables": {"main": table},
        "sampler": sampler,
        "fields": fields,
        "batch_size": count,
    }
    with DeviceReplay(config, clock.device) as replay:
        batch = replay.new_batch()
        td = torch.rand(count, device=clock.device)
        step = {
            name: torch.zeros(envs, *shape, device=clock.device)
            for name, shape in SIMULATED.items()
        }
        following = {"observation": torch.zeros_like(step["observation"])}
        ends = step["terminated"] = torch.zeros(envs, dtype=torch.bool, device=clock.device)
        copies = {name: torch.zeros_like(values) for name, values in step.items()}

        def add() -> None:
            replay.add_steps_(step, following)

        def turn() -> None:
            add()
            replay.sample_(batch)
            replay.update_priorities_(batch, td)

        def copy() -> None:
            for name, values in step.items():
                copies[name].copy_(values)

        turn_of_end = torch.arange(envs, device=clock.device) % sizes.episode
        for number in range(
            sizes.episode
        ):  # later as many episodes end in each turn, at `max_length`
            ends.copy_(turn_of_end == number)
            add()
        ends.zero_()
        functions: dict[str, Run] = {
            "add_steps": add,
            "add_steps, sample and update": turn,
            ceiling: copy,
        }
        runs = {name: clock.graph(function) for name, function in functions.items()}
        for _ in range(replay.table.num_rows // envs):
            runs["add_steps"]()  # the table is full: an episode that begins evicts one
        case = f"{envs} environments, {replay.table.num_items} items"
        found = rows_against("add_steps", case, clock.compare(runs), ceiling)
        for row, bound in zip(found.values(), bounds, strict=True):
            yield ask({**row, "figure": row["what"], "what": "gear"}, "us", at_most=bound)


def _sums(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Give n-step returns of n = 10 and B = 256, and returns-to-go of trajectories of
    1,000 steps.
    """
    count = 256
    n = 10
    steps = 1000
    rows = sizes.rewarded * steps
    reward = torch.randn(rows, device=clock.device)
    ends = torch.zeros(rows, dtype=torch.bool, device=clock.device)
    powers = (0.99 ** torch.arange(n + 1, dtype=torch.float64)).to(clock.device)
    number = torch.arange(sizes.rewarded, device=clock.device)
    extents = torch.stack([number * steps, torch.full_like(number, steps)], 1)
    drawn = torch.arange(count, device=clock.device)
    zero = torch.zeros(count, dtype=torch.int64).to(clock.device)
    record = (zero, zero, zero, drawn % sizes.rewarded * steps, zero + steps, drawn, zero, zero)
    records = torch.stack(record, 1)
    returns = torch.zeros(count)
    discount = torch.zeros(count)
    taken = torch.zeros(count).long()
    outs = [out.to(clock.device) for out in (returns, discount, taken)]
    to_go = torch.zeros_like(reward)
    copies = torch.zeros_like(reward)
    ops = load_backend("cuda" if clock.is_cuda else "cpu")
    runs: dict[str, Run] = {
        "n-step returns": lambda: ops.n_step_(*outs, reward, ends, None, powers, records, n),
        "returns-to-go": lambda: ops.suffix_sum_(to_go, reward, extents),
        "device copy of the rewards": lambda: copies.copy_(reward),
    }
    times = clock.compare({name: clock.graph(run) for name, run in runs.items()})
    cases = (f"n = {n}, B={count}", f"{sizes.rewarded} of T = {steps}")
    found = rows_against("sums", "", times, "device copy of the rewards")
    for row, case, bound in zip(found.values(), cases, (3.0, 20.0), strict=True):
        named = {"figure": row["what"], "case": case, "what": "gear"}
        yield ask({**row, **named}, "us", at_most=bound)

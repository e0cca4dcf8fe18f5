"""CPU time of a step that is added: of one environment or many, published or not, beside other
buffers.

    python benchmarks/adding.py --json F [--quick]

One process and one thread, which adds and, in further rows, samples in turns. Episodes have 20 or
200 steps, those of different environments end at different times, and environments reset in the
step after the last one. The peers are a ring of NumPy arrays, as CleanRL and Stable-Baselines3 have
one, and cpprb where it is installed. The last rows are the calls of a program that steps one
gymnasium environment: an array, Python numbers and flags as `step` returns them, without and with a
policy between the calls, which replaces what the caches hold; wall time of the call. And those of a
rollout server that adds responses of 750 tokens, as arrays of the stored types or as lists and
Python numbers, to a plain table and to one of groups with a late reward; beside a list of copies as
arrays. The performance pages say what the columns mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from support.report import Report, Row, print_rows, say
from peers.interface import Rows, Steps, load
from support.plain_ring import PlainRing

from deepspeed_gear import Column, Replay, Schema, TransitionBuffer

LONGEST = 200  # steps of an episode
BATCH = 256
BLOCKS = 30
BLOCK_STEPS = 200
# elements of an observation
SMALL = 4
WIDE = 376
BOUNDS_US = {1: 8.0, 8: 8.0, 64: 15.0}  # of a step with small observations, by environments
FRAME_BOUND_US = 25.0
CALL_BOUNDS_US = {"": 5.0, ", a policy between": 8.0}  # of one add, by what lies between two
RESPONSES = 512
TOKENS = 750  # of a response
RESPONSE_BOUND_US = 15.0  # of one of arrays
#: Buffers that take what environments return: the module of their adapter, by name.
BUFFERS = {"numpy ring": "numpy_ring", "cpprb": "cpprb", "gear, TransitionBuffer": "gear"}
PACKAGES = {"cpprb": "cpprb", "gear": "gymnasium"}  # that they need


class EnvironmentSteps:
    """What environments give, step by step; arrays are used again, as environments do.

    Args:
        num_envs: N.
        observation: Shape of one.
        dtype: Of observations.
        length: Steps of an episode.
    """

    def __init__(
        self, num_envs: int, observation: tuple[int, ...], dtype: str, length: int
    ) -> None:
        random = np.random.default_rng(0)
        self.num_envs = num_envs
        seen = [random.integers(0, 255, (num_envs, *observation)).astype(dtype) for _ in range(5)]
        fixed = {
            "action": random.random((num_envs, 1), np.float32),
            "reward": np.ones(num_envs),  # float64, as gymnasium's
            "done": np.zeros(num_envs, bool),
        }
        begun = random.integers(0, length, num_envs)
        cycle: list[Rows] = [
            {
                "observation": seen[step % 5],
                "next_observation": seen[(step + 1) % 5],
                **fixed,
                "truncated": (begun + step + 1) % length == 0,
            }
            for step in range(length)  # a multiple of 5
        ]
        self.columns = cycle[0]
        self._cycle = itertools.cycle(cycle)

    def __next__(self) -> Rows:
        return next(self._cycle)


class Peer:
    """A buffer that takes steps as environments return them."""

    def __init__(self, module: str, steps: EnvironmentSteps, capacity: int) -> None:
        self._steps = steps
        need = Steps(
            capacity, steps.num_envs, BATCH, seed=None, columns=steps.columns, autoreset="next_step"
        )
        self._made = load(module).steps(need)

    def step(self) -> None:
        self._made.add(next(self._steps))

    def sample(self) -> None:
        found = self._made.sample()
        if isinstance(found, dict):
            for rows in found.values():
                torch.as_tensor(rows)

    def close(self) -> None:
        self._made.close()


def peers(steps: Callable[[], EnvironmentSteps], capacity: int) -> dict[str, Callable[[], Any]]:
    """Return what makes the buffers that are installed, by name."""
    return {
        name: partial(lambda module: Peer(module, steps(), capacity), module)
        for name, module in BUFFERS.items()
        if find_spec(PACKAGES.get(module, "numpy")) is not None
    }


class Gear:
    """A Replay, written to by a VectorWriter.

    Args:
        steps: What is added.
        capacity: Steps that the table holds.
        publish: Whether each step can be sampled at once.
        sampler: "prioritized", "uniform", or None where nothing samples.
    """

    def __init__(
        self, steps: EnvironmentSteps, capacity: int, publish: bool, sampler: str | None = None
    ) -> None:
        self._steps = steps
        self._publish = publish
        self.sampler = sampler
        rows = steps.columns["observation"]
        room = capacity + LONGEST * steps.num_envs
        columns = [
            Column("observation", rows.dtype.name, rows.shape[1:], "observation", "T+1"),
            Column("action", "float32", (1,), "action"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column("truncated", "bool", (), "truncated"),
        ]
        section = {
            "batch_size": BATCH,
            "sampler": {"kind": sampler or "uniform", "unit": "step"},
            "tables": {"main": {"capacity_steps": room, "max_length": LONGEST, "remove": "fifo"}},
            "fields": {"observation": {"length": 2}, "action": {}, "reward": {}, "terminated": {}},
        }
        self.replay = Replay(section, schemas={"main": Schema(columns)})
        self._writer = self.replay.writer().vector_writer(steps.num_envs, "next_step")
        self._writer.reset(observation=rows)
        self._priorities = torch.rand(BATCH)

    def step(self) -> None:
        rows = next(self._steps)
        self._writer.step(
            publish=self._publish,
            observation=rows["next_observation"],
            action=rows["action"],
            reward=rows["reward"],
            terminated=rows["done"],
            truncated=rows["truncated"],
        )

    def sample(self) -> None:
        batch = self.replay.sample()
        if self.sampler == "prioritized":
            self.replay.update_priorities(batch, self._priorities)

    def close(self) -> None:
        self.replay.close()


def micros(action: Callable[[], None], count: int) -> float:
    """Return the CPU time of a call, us."""
    begun = process_time()
    for _ in range(count):
        action()
    return (process_time() - begun) / count * 1e6


def adds(
    case: str, steps: Callable[[], EnvironmentSteps], capacity: int, blocks: int, count: int
) -> Iterator[Row]:
    """Measure every system in turns; a row of each, its ratio to the NumPy ring that of the same
    turns.
    """
    columns = steps().columns["observation"]
    num_envs = len(columns)
    elements = columns[0].size
    warm = min(2 * LONGEST, 2 * count) if blocks < BLOCKS else 2 * capacity // num_envs
    making = peers(steps, capacity)
    making["gear"] = lambda: Gear(steps(), capacity, False)
    making["gear, published"] = lambda: Gear(steps(), capacity, True)
    systems: dict[str, Any] = {name: make() for name, make in making.items()}
    try:
        for system in systems.values():
            micros(system.step, warm)
        times = np.array([[micros(s.step, count) for s in systems.values()] for _ in range(blocks)])
    finally:
        for system in systems.values():
            system.close()
    for name, column in zip(systems, times.T, strict=True):
        us = float(np.median(column))
        ratio = float(np.median(column / times[:, 0]))
        row = {"case": case, "system": name, "step_us": us, "x_ring": ratio}
        row["steps_per_s"] = num_envs / us * 1e6
        bound = {SMALL: BOUNDS_US[num_envs], WIDE: None}.get(elements, FRAME_BOUND_US)
        bound = bound if name.startswith("gear") else None
        yield row if bound is None else {**row, "bound": bound, "holds": us <= bound}


def beside(num_envs: int, blocks: int, count: int) -> Iterator[Row]:
    """Measure steps and batches of one process that does both in turns, as an off-policy algorithm
    does.
    """
    steps = partial(EnvironmentSteps, num_envs, (SMALL,), "float32", LONGEST)
    making = {(name, "uniform"): make for name, make in peers(steps, 100_000).items()}
    for sampler in ("uniform", "prioritized"):
        for publish in (False, True):
            name = f"gear{', published' * publish}, {sampler}"
            making[name, sampler] = lambda p=publish, s=sampler: Gear(steps(), 100_000, p, s)
    for (name, sampler), make in making.items():
        system = make()
        try:
            micros(system.step, 20 * LONGEST)
            micros(system.sample, 50)
            turns = range(blocks * count // 10)
            times = np.array([[micros(system.step, 1), micros(system.sample, 1)] for _ in turns])
        finally:
            system.close()
        step_us, sample_us = np.median(times, 0).tolist()
        case = f"{num_envs} environments and {sampler} batches of {BATCH}"
        yield {"case": case, "system": name, "step_us": step_us, "sample_us": sample_us}


def calls(blocks: int, count: int) -> Iterator[Row]:
    """Measure the calls of a program that steps one gymnasium environment; both buffers in turns.

    Yields:
        Rows of the case, the system and the median wall time of an add, us.
    """
    import gymnasium

    capacity = 10_000
    policy = torch.nn.Sequential(
        torch.nn.Linear(SMALL, 120), torch.nn.ReLU(),
        torch.nn.Linear(120, 84), torch.nn.ReLU(), torch.nn.Linear(84, 2),
    )  # fmt: skip
    for between, bound in CALL_BOUNDS_US.items():
        env = gymnasium.make("CartPole-v1")
        spaces = env.observation_space, env.action_space
        ours = TransitionBuffer(capacity, *spaces, n_envs=env, batch_size=BATCH)
        adds = {"numpy ring": PlainRing(capacity, SMALL).add, "gear, TransitionBuffer": ours.add}
        times: dict[str, list[float]] = {name: [] for name in adds}
        obs, _ = env.reset(seed=0)
        for step in range(blocks * count):
            action = int(policy(torch.from_numpy(obs)).argmax()) if between else step % 2
            next_obs, *results = env.step(action)
            for name in adds if step % 2 else reversed(adds):  # each is the first in turns
                begun = perf_counter()
                adds[name](obs, next_obs, action, *results[:3])
                times[name].append(perf_counter() - begun)
            obs = env.reset()[0] if results[1] or results[2] else next_obs
        ours.close()
        medians = {name: float(np.median(each[count:])) * 1e6 for name, each in times.items()}
        for name, us in medians.items():
            row = {"case": f"CartPole-v1 as gymnasium gives it{between}", "system": name}
            row |= {"step_us": us, "x_ring": us / medians["numpy ring"]}
            is_ours = name.startswith("gear")
            yield {**row, "bound": bound, "holds": us <= bound} if is_ours else row


RESPONSE_COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt_id": {"dtype": "int64", "rows": "1"},
}


def response(random: np.random.Generator, number: int, as_lists: bool) -> dict[str, Any]:
    """Return a response as a rollout server has it; 8 have the same prompt."""
    made = {
        "tokens": random.integers(0, 150_000, TOKENS).astype(np.int32),
        "loss_mask": np.arange(TOKENS) >= TOKENS // 2,
        "logp": -random.random(TOKENS, np.float32),
        "reward": np.float32(number % 2),
        "prompt_id": np.int64(number // 8),
    }
    return {name: rows.tolist() for name, rows in made.items()} if as_lists else made


def responses(blocks: int) -> Iterator[Row]:
    """Measure the calls of a rollout server: adds of responses, and copies of them, in turns."""
    names = RESPONSE_COLUMNS
    dtypes = {name: np.dtype(column["dtype"]) for name, column in names.items()}
    group = {"column": "prompt_id", "size": 8, "needs": ["reward"]}
    late = {**names, "reward": {**names["reward"], "late": True}}
    tables: dict[str, dict[str, Any]] = {
        "": {"schema": {"columns": names}},
        ", groups and a late reward": {"schema": {"columns": late}, "group": group},
    }
    random = np.random.default_rng(0)
    for table, options in tables.items():
        for as_lists in (False, True):
            made = [response(random, number, as_lists) for number in range(RESPONSES)]
            section = {
                "tables": {
                    "main": {
                        "capacity_trajectories": 2 * RESPONSES,
                        "capacity_steps": 2 * RESPONSES * TOKENS,
                        "max_length": TOKENS,
                        **options,
                    }
                },
                "sampler": {"kind": "fifo", "unit": "group" if table else "trajectory"},
                "pack": {"tokens": 16384},
                "rollout": {"groups" if table else "trajectories": 8},
            }
            copies: list[Rows] = []
            times = []
            with Replay(section) as replay:
                for _ in range(blocks):
                    replay.clear()  # nothing is evicted in the turn
                    begun = process_time()
                    for number, one in enumerate(made):
                        replay.add({**one, "prompt_id": number // 8})
                    added = process_time()
                    copies[:] = [
                        {name: np.array(rows, dtypes[name]) for name, rows in one.items()}
                        for one in made
                    ]
                    times.append((added - begun, process_time() - added))
            ours, others = (np.median(times[1:] or times, axis=0) / RESPONSES * 1e6).tolist()
            form = "lists and Python numbers" if as_lists else "arrays"
            case = f"responses of {TOKENS} tokens as {form}{table}"
            yield {"case": case, "system": "list of copies", "step_us": others}
            row = {"case": case, "system": "gear", "step_us": ours}
            bound = {"bound": RESPONSE_BOUND_US, "holds": ours <= RESPONSE_BOUND_US}
            yield row if as_lists else {**row, **bound}


def run(quick: bool) -> Iterator[Row]:
    """Yield all rows."""
    blocks, count = (2, 20) if quick else (BLOCKS, BLOCK_STEPS)
    for num_envs in (1, 8, 64):
        for elements, length in ((SMALL, 20), (SMALL, 200), (WIDE, 20), (WIDE, 200)):
            case = f"{num_envs} environments, observation float32[{elements}], episodes of {length}"
            make = partial(EnvironmentSteps, num_envs, (elements,), "float32", length)
            yield from adds(case, make, 100_000 if elements == SMALL else 20_000, blocks, count)
            say(case)
    frames = partial(EnvironmentSteps, 1, (84, 84), "uint8", LONGEST)
    yield from adds("1 environment, frame uint8[84, 84]", frames, 20_000, blocks, count)
    yield from beside(1, blocks, count)
    yield from calls(blocks, count)
    yield from responses(blocks)


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__)
    rows = list(run(report.options.quick))
    print_rows(rows, "case system step_us x_ring steps_per_s sample_us bound holds")
    report.write(rows)


if __name__ == "__main__":
    main()

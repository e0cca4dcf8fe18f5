"""How fast items are selected: prioritized and uniform batches against a C loop and against cpprb.

    python benchmarks/selection.py --json F                one thread: batches, memory
    python benchmarks/selection.py --ranks 2 --json F      also: ranks at once on one store

A batch is sampled, gathered and weighted, and its priorities are updated. The performance pages say
what the columns mean. B are the samples of a batch on each rank; ms with several ranks are wall
time over the batches of all. cpprb is judged by this project's time over its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.limit import SelectLimit
from support.ranks import run_ranks
from support.report import Report, Row, judge, print_rows, say
from support.subject import RING
from support.turns import Times, against_limit, block_size, in_turns, of_ranks, rank_blocks, timed
from support.workloads import PRIORITIZED, Workload, workload
from peers.gear import GearBatches
from peers.interface import Buffer, Steps, fresh_priorities, load

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import MOST_MASS_BITS, ONE_Q62

SAMPLERS = ("prioritized", "uniform")
SIZES = (256, 4096)
LIMIT_BOUND = {
    ("prioritized", 256): 1.2,
    ("prioritized", 4096): 1.25,
    ("uniform", 256): 1.5,
    ("uniform", 4096): 1.5,
}
CPPRB_BOUND = 2.5  # times as fast
RANKS_BOUND = 8000.0  # batches a second of all ranks
MEMORY_BOUND = 1.25  # store over payload
_CHUNK = 1 << 14  # priorities that are set at once before everything is timed


def mass(priorities: np.ndarray) -> torch.Tensor:
    """Return the masses of priorities. [n], float32 -> [n], int64."""
    masses = torch.empty(len(priorities), dtype=torch.int64)
    load_backend().mass_(
        masses, torch.from_numpy(priorities), round(PRIORITIZED["alpha"] * ONE_Q62), MOST_MASS_BITS
    )
    return masses


def first_priorities(num_items: int) -> np.ndarray:
    """Return what every system's items have before the first batch. [n], float32, in (0, 1]."""
    return 1 - np.random.default_rng(1).random(num_items, np.float32)


class Stepped:
    """A buffer whose batches are taken one after the other, perhaps with new priorities
    for each.
    """

    def __init__(self, made: Buffer, sampler: str, batch: int) -> None:
        self.made = made
        self.prioritized = sampler == "prioritized"
        self._fresh = fresh_priorities(batch)

    def step(self, turn: int) -> None:
        """Sample a batch with its weights, and update its priorities."""
        batch = self.made.sample()
        if self.prioritized:
            self.made.update(batch, self._fresh[turn % len(self._fresh)])

    def run(self, count: int) -> Times:
        return timed(self.step, count)


class Gear(Stepped):
    """A Replay over W2. Collective.

    Args:
        content: W2.
        sampler: "prioritized" or "uniform".
        batch: Samples of a batch on each rank.
    """

    def __init__(self, content: Workload, sampler: str, batch: int) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        how = PRIORITIZED if sampler == "prioritized" else {"kind": sampler}
        self.replay = content.filled(content.steps_section(ranks * batch, how))
        super().__init__(GearBatches.of(self.replay), sampler, batch)
        if self.prioritized:
            self._set_first(content.num_items, content.num_steps)

    def _set_first(self, num_items: int, num_steps: int) -> None:
        """Set the first priorities, in parts that the log has room for; all ranks sample between
        them.
        """
        values = first_priorities(num_items)
        for begin in range(0, num_items, _CHUNK):
            self.replay.sample()
            if self.replay.topology.rank == 0:
                items = np.arange(begin, min(begin + _CHUNK, num_items))
                ids, steps = (torch.from_numpy(x) for x in np.divmod(items, num_steps))
                self.replay.set_priorities(ids, torch.from_numpy(values[items]), steps)


def cpprb_of(content: Workload, sampler: str, batch: int) -> Stepped:
    """Return cpprb's buffer with the same transitions."""
    exponents = PRIORITIZED["alpha"], PRIORITIZED["beta"]
    need = Steps(
        content.num_items, 1, batch, sampler == "prioritized", *exponents, columns=content.make(0)
    )
    made = load("cpprb").steps(need)
    for trajectory in content.trajectories():
        made.add(trajectory)
    if need.prioritized:
        made.update({"indexes": np.arange(content.num_items)}, first_priorities(content.num_items))
    return Stepped(made, sampler, batch)


def limit_of(gear: Gear, content: Workload, batch: int) -> SelectLimit:
    """Return the limit over the rows that a Replay holds, with buffers of its own."""
    table = gear.replay.tables["main"]
    columns = [table.tensor(column.name) for column in content.schema]
    outs = [[torch.zeros(batch, *c.shape[1:], dtype=c.dtype) for c in columns] for _ in range(RING)]
    masses = mass(first_priorities(content.num_items)).numpy() if gear.prioritized else None
    fresh = mass(fresh_priorities(batch).reshape(-1)).view(-1, batch).numpy()
    return SelectLimit(columns, outs, masses, fresh, content.num_items)


def alone(sampler: str, batch: int, scale: float, repeats: int) -> list[Row]:
    """Measure one thread: blocks of each system in turn, each batch timed by itself."""
    content = workload("W2", scale)
    gear = Gear(content, sampler, batch)
    systems: dict[str, Any] = {"limit": limit_of(gear, content, batch), "gear": gear}
    if find_spec("cpprb") is not None:
        systems["cpprb"] = cpprb_of(content, sampler, batch)
    else:
        say("cpprb is not installed: left out")
    runs = {name: system.run for name, system in systems.items()}
    ms = in_turns(runs, {name: block_size(run) for name, run in runs.items()}, repeats)
    store = gear.replay.statistics()
    gear.made.close()
    case = {"what": "batch", "system": "", "sampler": sampler, "B": batch, "ranks": 1}
    case["items"] = content.num_items
    rows = against_limit(case, "system", ms)
    ratio = rows["gear"]["ratio"]
    bound = LIMIT_BOUND[sampler, batch]
    judge(rows["gear"], ratio, bound, ratio <= bound)
    if "cpprb" in rows:
        over = float(np.median(ms["gear"] / ms["cpprb"]))
        judge(rows["cpprb"], over, 1 / CPPRB_BOUND, over <= 1 / CPPRB_BOUND)
        rows["cpprb"]["times_as_long_as_gear"] = 1 / over
    found = list(rows.values())
    if batch == SIZES[0]:
        sizes = {name: float(store[name]) for name in ("store_bytes", "payload_bytes")}
        over = sizes["store_bytes"] / sizes["payload_bytes"]
        memory = {**case, "what": "memory", "system": "gear"}
        found.append({**judge(memory, over, MEMORY_BOUND, over <= MEMORY_BOUND), **sizes})
    return found


def at_once(ranks: int, batch: int, scale: float, repeats: int) -> Row:
    """Measure ranks of a node on one store, each with batches of its own, against as many limits at
    once.
    """
    ms, cpu = of_ranks(run_ranks(ranks, on_a_rank, batch, scale, repeats))
    case = {"what": "ranks", "system": "", "sampler": "prioritized", "B": batch, "ranks": ranks}
    row = against_limit({**case, "items": workload("W2", scale).num_items}, "system", ms)["gear"]
    judge(row, row["ms"], 1e3 / RANKS_BOUND, row["ms"] <= 1e3 / RANKS_BOUND)
    return {
        **row,
        "batches_per_s": 1e3 / row["ms"],
        **{f"{name}_cpu_ms": cpu[name] for name in cpu},
    }


def on_a_rank(batch: int, scale: float, repeats: int) -> dict[str, list[float]]:
    """Measure one of the ranks. Returns the times of its blocks."""
    content = workload("W2", scale)
    gear = Gear(content, "prioritized", batch)
    runs = {"limit": limit_of(gear, content, batch).run, "gear": gear.run}
    times = rank_blocks(runs, 20 if scale < 1 else 2000, repeats)
    gear.made.close()
    return times


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        ranks=(1, "measure this many ranks at once as well"),
        repeats=(15, "blocks of each system"),
    )
    scale, repeats = (0.02, 2) if report.options.quick else (1.0, report.options.repeats)
    rows: list[Row] = []
    for sampler in SAMPLERS:
        for batch in SIZES:
            rows += alone(sampler, batch, scale, repeats)
            say(f"{sampler} B={batch}")
    if report.options.ranks > 1:
        rows.append(at_once(report.options.ranks, SIZES[0], scale, repeats))
        say(f"{report.options.ranks} ranks")
    print_rows(rows, "what system sampler B ranks items ms limit_ms ratio judged bound holds more")
    report.meanwhile()
    report.write(rows)


if __name__ == "__main__":
    main()

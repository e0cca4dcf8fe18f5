"""Saves replays in the middle and goes on, or loads what another number of nodes has saved.

Arguments: the folder of the data sets; then any of `save=FOLDER` (what each case has done before and does
behind that, again and again), `load=FOLDER` and `lose=FOLDER`, which damages the folder. Rank 0 writes a line
for each: what the ranks had, joined to global batches, so that it is the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gear_support import SCHEMA, lengths_of, prefix, trajectory
from replay_support import streams_of

from deepspeed_gear import Replay
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Slot

BATCH, BEFORE, BEHIND = 16, 5, 5
WINDOWS = {
    "observation": {"offset": -3, "length": 4},
    "action": {},
    "return_to_go": {"offset": -1, "length": 3, "align": "right", "pad": "edge"},
    "code": {},
    "task": {},
}
STEPS = {
    "observation": {},
    "next_observation": {"column": "observation", "offset": "n_step"},
    "action": {},
    "code": {},
    "task": {},
}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4}
LOST = ("prioritized", "online")
ONLINE = {"capacity_steps": 1600, "capacity_trajectories": 100, "max_length": 30}


def cases(data: Path) -> dict[str, dict[str, Any]]:
    """The configs by name."""
    a, b = str(data / "a"), str(data / "b")
    parts = {"kind": "mixture", "shares": {"a": 0.3, "b": 0.7}, "of": PRIORITIZED}
    return {
        "uniform": {
            "data": a,
            "fields": WINDOWS,
            "sampler": {"unit": "step"},
            "prefetch": 2,
            "verify_every": 2,
        },
        "mapped": {"data": {"path": a, "load": "mmap"}, "fields": WINDOWS, "prefetch": 1},
        "epoch": {"data": a, "fields": WINDOWS, "sampler": {"kind": "epoch", "unit": "trajectory"}},
        "recent": {
            "data": a,
            "fields": WINDOWS,
            "sampler": {"kind": "recent", "unit": "step", "newest": 150},
        },
        "prioritized": {
            "data": a,
            "fields": WINDOWS,
            "sampler": {**PRIORITIZED, "normalize": "table"},
            "prefetch": 1,
            "count_draws": True,
        },
        "trajectories": {
            "data": b,
            "fields": WINDOWS,
            "sampler": {"kind": "prioritized", "alpha": 0.6, "beta": 0.4},
        },
        "n_step": {
            "data": b,
            "fields": STEPS,
            "n_step": {"n": 3, "gamma": 0.9},
            "sampler": PRIORITIZED,
            "prefetch": 2,
        },
        "mixture": {
            "tables": {"a": {"data": a}, "b": {"data": b}},
            "fields": WINDOWS,
            "sampler": parts,
            "prefetch": 1,
        },
        "online": {"tables": {"main": ONLINE}, "fields": WINDOWS, "sampler": PRIORITIZED, "prefetch": 1},
        "online_uniform": {"tables": {"main": ONLINE}, "fields": WINDOWS, "prefetch": 2},
        "changed": {"tables": {"main": ONLINE}, "fields": WINDOWS, "sampler": PRIORITIZED, "prefetch": 1},
        "changed_uniform": {"tables": {"main": ONLINE}, "fields": WINDOWS, "prefetch": 2},
        "changed_epoch": {
            "tables": {"main": ONLINE},
            "fields": WINDOWS,
            "sampler": {"kind": "epoch", "unit": "step"},
            "prefetch": 1,
        },
    }


class Run:
    """A case on this rank."""

    def __init__(self, section: dict[str, Any], changes: bool) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.online = "main" in section.get("tables", {})
        self.changes = changes
        common = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}, "batch_size": BATCH}
        config = {**common, **section}
        self.replay = Replay(config, schemas={"main": SCHEMA} if self.online else None)

    def fill(self) -> None:
        """Add trajectories, in parts of the ranks: their stored order is the same on any number of these."""
        lengths = lengths_of(48, seed=3)
        for rank in range(self.world):
            if rank == self.rank:
                for number in range(24 * rank // self.world, 24 * (rank + 1) // self.world):
                    self.replay.add(trajectory(number, lengths[number], terminated=True))
            self.wait()

    def change(self) -> None:
        """Remove and add trajectories, so that the orders of slots, of rows and of ids are all different."""
        replay, lengths = self.replay, lengths_of(48, seed=3)
        if self.rank == 0:
            table = replay.tables["main"]
            replay.remove(table.slots[[1, 2, 4], Slot.ID].copy())
        self.wait()
        self.take(2)
        for rank in range(self.world):
            if rank == self.rank:
                for number in range(24 + 8 * rank // self.world, 24 + 8 * (rank + 1) // self.world):
                    replay.add(trajectory(number, lengths[number]))
            self.wait()

    def evaluate(self) -> str:
        """Return a digest of a pass over the evaluation split."""
        if "eval" not in streams_of(self.replay):
            return ""
        mine = []
        for batch in self.replay.iterator("eval"):
            rows = zip(
                batch.trajectory_id.tolist(),
                batch.anchor.tolist(),
                map(_bytes, batch["observation"]),
                strict=True,
            )
            mine += [row for row, valid in zip(rows, batch.valid.tolist(), strict=True) if valid]
        every = sorted(row for of_rank in self.gather(mine) for row in of_rank)
        return hashlib.sha256(repr(every).encode()).hexdigest()[:12]

    def take(self, count: int, report: str = "batch") -> list[str]:
        """Take global batches, report priorities, and return a digest of each."""
        found = []
        for _ in range(count):
            batch = self.replay.sample()
            found.append(self._digest(batch))
            if self.replay.config.item_sampler.kind == "prioritized":
                self._report(batch, report)
        return found

    def _report(self, batch: Batch, how: str) -> None:
        priorities = ((batch["task"] * 2654435761 + batch.anchor * 40503) % 1000).float() / 100 + 0.01
        if how == "ids":
            self.replay.set_priorities(batch.trajectory_id, priorities, batch.anchor)
        else:
            self.replay.update_priorities(batch, priorities)

    def _digest(self, batch: Batch) -> str:
        tensors = [batch[name] for name in sorted(batch)] + [batch.mask[name] for name in sorted(batch.mask)]
        tensors += [batch.anchor, batch.is_weight, batch.probability, batch.epoch, batch.num_steps]
        if not self.online:  # ids tell which node has added a trajectory
            tensors.append(batch.trajectory_id)
        rows = [b"".join(_bytes(t[i]) for t in tensors) for i in range(batch.num_samples)]
        sources = batch.source.tolist() if len(self.replay.tables) > 1 else [0] * batch.num_samples
        mine = sorted(zip(sources, batch.sample_number.tolist(), rows, strict=True))
        every = sorted(sample for of_rank in self.gather(mine) for sample in of_rank)
        return hashlib.sha256(repr(every).encode()).hexdigest()[:12]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state, if it is equal on all ranks."""
        assert all(other == state for other in self.gather(state))
        return state


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Save in the middle; return what comes behind that, going on and loaded again."""
    run = Run(section, folder.name.startswith("changed"))
    if run.online:
        run.fill()
    before = run.take(BEFORE)
    if run.changes:
        run.change()
    state = run.state(run.replay.save(folder))
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps(state))
    behind = run.take(BEHIND)
    again = []
    for _ in range(2):
        run.replay.load(folder, state)
        again.append(run.take(BEHIND))
    passed = run.evaluate()
    run.replay.load_state_dict(run.state(run.replay.state_dict()))
    more = run.take(2)  # where priorities change, how far the tables are depends on how far a thread was
    run.replay.close()
    position = {name: value for name, value in state.items() if name != "save"}  # each save has its own id
    found = {"before": before, "state": position, "behind": behind, "passed": passed, "again": again}
    return found if run.replay.config.item_sampler.kind == "prioritized" else {**found, "more": more}


def load(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load; return what comes."""
    run = Run(section, False)
    run.replay.load(folder, json.loads((folder / "state.json").read_text()))
    by_id = run.replay.config.item_sampler.kind == "prioritized" and section.get("tables", {}).get("main")
    behind = run.take(BEHIND, "ids" if by_id else "batch")
    passed = run.evaluate()
    run.replay.close()
    return {"behind": behind, "passed": passed}


def lose(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Change a file of a shard, then lose the shard; return what each rank says to that."""
    run = Run(section, False)
    if run.online:
        run.fill()
    state, said = json.loads((folder / "state.json").read_text()), []
    (table,) = run.replay.tables
    for damage in ("change", "remove"):
        if run.rank == 0:
            shard = folder / table / "shard-1"
            if damage == "change":
                np.save(shard / "stream.train.queued.npy", np.zeros(3))
            else:
                shutil.rmtree(shard)
        run.wait()
        try:
            run.replay.load(folder, state)
            said.append(run.gather("nothing"))
        except GearError as error:
            said.append(run.gather(f"{type(error).__name__}: {error}"))
    found = {"said": said, "goes_on": len(run.take(2))}
    run.replay.close()
    return found


def main() -> None:
    """Do what the arguments say."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    data, *actions = arguments
    only = os.environ["CASES"].split(",") if "CASES" in os.environ else None
    for text in actions:
        action, _, folder = text.partition("=")
        for name, section in cases(Path(data)).items():
            if (only is None or name in only) and (action != "lose" or name in LOST):
                act = {"save": save, "load": load, "lose": lose}[action]
                found = {"action": text, "case": name, **act(section, Path(folder) / name)}
                if os.environ.get("RANK", "0") == "0":
                    sys.stdout.write("FOUND " + json.dumps(found) + "\n")
                    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


main()

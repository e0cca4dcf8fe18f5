"""Saves replays in the middle and goes on, or loads what another number of nodes has saved.

Arguments: the folder of the data sets; then any of `save=FOLDER` (what each case has done before and does
after that, again and again), `load=FOLDER` and `lose=FOLDER`, which damages the folder. Rank 0 writes a line
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
import replay_cases
import torch.distributed as dist
from gear_support import SCHEMA, lengths_of, prefix, trajectory
from replay_cases import BATCH, FOLLOWING, WINDOWS, digests, prioritized
from replay_support import streams_of

from deepspeed_gear import Replay
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Slot

BEFORE, BEHIND = 5, 5
LOST = ("prioritized_table", "online")
ONLINE = {"capacity_steps": 1600, "capacity_trajectories": 100, "max_length": 30}


def cases(data: Path) -> dict[str, dict[str, Any]]:
    """Return configs by name: of data sets, and of tables that all ranks fill (and change, if so named)."""
    known = replay_cases.cases(data / "a", data / "b")
    names = ("verified", "mapped", "short_epochs", "recent", "prioritized_plain", "mixture")
    steps = {"sampler": prioritized("step"), "prefetch": 1}
    online: dict[str, Any] = {"tables": {"main": ONLINE}, "fields": WINDOWS}
    return {
        **{name: known[name] for name in names},
        "prioritized_table": {**known["prioritized_table"], "prefetch": 1, "count_draws": True},
        "n_step": {**known["n_step"], "fields": {**FOLLOWING, "task": {}}, **steps, "prefetch": 2},
        "online": {**online, **steps},
        "online_uniform": {**online, "prefetch": 2},
        "changed": {**online, **steps},
        "changed_uniform": {**online, "prefetch": 2},
        "changed_epoch": {**online, "sampler": {"kind": "epoch", "unit": "step"}, "prefetch": 1},
    }


class Run:
    """A case on this rank."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.online = "main" in section.get("tables", {})
        common = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}, "batch_size": BATCH}
        self.replay = Replay({**common, **section}, schemas={"main": SCHEMA} if self.online else None)
        self.reports = self.replay.config.item_sampler.kind == "prioritized"

    def add(self, first: int, count: int) -> None:
        """Add trajectories, in parts of the ranks: their stored order is the same on any number of these."""
        lengths = lengths_of(48, seed=3)
        for rank in range(self.world):
            if rank == self.rank:
                for number in range(
                    first + count * rank // self.world, first + count * (rank + 1) // self.world
                ):
                    self.replay.add(trajectory(number, lengths[number], terminated=True))
            self.wait()

    def change(self) -> None:
        """Remove and add trajectories, so that the orders of slots, of rows and of ids are all different."""
        if self.rank == 0:
            self.replay.remove(self.replay.tables["main"].slots[[1, 2, 4], Slot.ID].copy())
        self.wait()
        self.take(2)
        self.add(24, 8)

    def evaluate(self) -> str:
        """Return a digest of a pass over the evaluation split."""
        valid: dict[str, str] = {}
        for batch in self.replay.iterator("eval") if "eval" in streams_of(self.replay) else ():
            of_batch = zip(digests(batch).items(), batch.valid.tolist(), strict=True)
            valid.update(item for item, is_valid in of_batch if is_valid)
        return self.joined(valid)

    def take(self, count: int, by_id: bool = False) -> list[str]:
        """Take global batches, report priorities of their items, and return a digest of each."""
        found = []
        for _ in range(count):
            batch = self.replay.sample()
            found.append(
                self.joined(digests(batch, with_ids=not self.online))
            )  # ids tell which node has added
            if not self.reports:
                continue
            values = ((batch["task"] * 2654435761 + batch.anchor * 40503) % 1000).float() / 100 + 0.01
            if by_id:
                self.replay.set_priorities(batch.trajectory_id, values, batch.anchor)
            else:
                self.replay.update_priorities(batch, values)
        return found

    def joined(self, mine: dict[str, str]) -> str:
        """Return a digest of what all ranks had, in the order of sample numbers."""
        every = sorted(sample for of_rank in self.gather(mine) for sample in of_rank.items())
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


def save(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Save in the middle; return what comes after that, going on and loaded again."""
    run = Run(section)
    if run.online:
        run.add(0, 24)
    before = run.take(BEFORE)
    if folder.name.startswith("changed"):
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
    return found if run.reports else {**found, "more": more}


def load(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load; return what comes."""
    run = Run(section)
    run.replay.load(folder, json.loads((folder / "state.json").read_text()))
    found = {"behind": run.take(BEHIND, by_id=run.online), "passed": run.evaluate()}
    run.replay.close()
    return found


def lose(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Change a file of a shard, then lose the shard; return the errors of each rank."""
    run = Run(section)
    if run.online:
        run.add(0, 24)
    state, said = json.loads((folder / "state.json").read_text()), []
    (table,) = run.replay.tables
    shard = folder / table / "shard-1"
    for damage in (
        lambda: np.save(shard / "stream.train.queued.npy", np.zeros(3)),
        lambda: shutil.rmtree(shard),
    ):
        if run.rank == 0:
            damage()
        run.wait()
        try:
            run.replay.load(folder, state)
            said.append(run.gather("nothing"))
        except GearError as error:
            said.append(run.gather(f"{type(error).__name__}: {error}"))
    found = {"said": said, "goes_on": len(run.take(2))}
    run.replay.close()
    return found


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
data, *actions = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
for text in actions:
    action, _, where = text.partition("=")
    for name, section in cases(Path(data)).items():
        if action != "lose" or name in LOST:
            act = {"save": save, "load": load, "lose": lose}[action]
            found = {"action": text, "case": name, **act(section, Path(where) / name)}
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write("FOUND " + json.dumps(found) + "\n")
                sys.stdout.flush()
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()

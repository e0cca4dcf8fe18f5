"""Epochs and lengths: a Replay is added to, removed from, cleared, sampled and rewound.

Against plain Python; `test_online_machine.py` has uniform and prioritized samplers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, SHM, STEP, config_of, trajectory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_support import streams_of
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.errors import StoreError, StoreFullError

LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
CAPACITY_STEPS, NUM_SLOTS = 30, 5
NUM_ROWS = CAPACITY_STEPS + NUM_SLOTS
BATCH = 6
Item = tuple[int, int]  # trajectory, and its step unless the unit is a trajectory (then 0)


class ReplayMachine(RuleBasedStateMachine):
    """The oracle: `stored` is what the table holds, `epoch_items` what the epoch under way consists of."""

    kind, unit = "epoch", "step"

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, int] = {}  # id -> num_steps
        self.epoch_items: set[Item] = set()
        self.visited: set[Item] = set()
        self.epoch = -1
        self.num_samples = self.next_id = 0
        self.folder = Path(tempfile.mkdtemp(dir=SHM))  # no disk is waited for

    @initialize(seed=st.integers(0, 1000))
    def make(self, seed: int) -> None:
        self.replay = Replay(
            config_of(
                seed=seed,
                tables={"main": {"capacity_steps": CAPACITY_STEPS, "capacity_trajectories": NUM_SLOTS}},
                sampler={"kind": self.kind, "unit": self.unit},
                fields={"code": {}, "return_to_go": {}},
                batch_size=BATCH,
            ),
            schemas={"main": SCHEMA},
        )
        self.change([], [4, 7, 1, 5], 0)

    # ---- changes ---------------------------------------------------------------------------------

    @rule(
        removed=st.lists(st.integers(0, 8), max_size=4),
        lengths=st.lists(st.integers(1, 6) | st.integers(1, 35), max_size=4),
        samples=st.integers(0, 4),
    )
    def change(self, removed: list[int], lengths: list[int], samples: int) -> None:
        """Remove some of the latest trajectories, add others, sample."""
        self.remove([self.next_id - 1 - back for back in removed])
        for num_steps in lengths:
            self.add(num_steps)
        for _ in range(samples):
            self.sample()

    def add(self, num_steps: int) -> None:
        try:
            found = self.replay.add(trajectory(self.next_id, num_steps))
        except StoreFullError:
            assert self.stored or num_steps + 1 > NUM_ROWS
            return
        assert found == self.next_id
        self.stored[found] = num_steps
        self.next_id += 1

    def remove(self, choice: list[int]) -> None:
        gone = {number for number in choice if number in self.stored}
        assert self.replay.remove(choice) == len(gone)
        for number in gone:
            del self.stored[number]

    @rule(how=st.sampled_from(["clear", "remove", *["not"] * 6]))
    def empty(self, how: str) -> None:
        if how == "remove":
            self.replay.remove(sorted(self.stored))
            self.stored.clear()
        elif how == "clear":
            self.replay.clear()
            self.stored.clear()
            self.epoch_items, self.visited = set(), set()

    def sample(self) -> None:
        if not self.stored:
            with pytest.raises(StoreError, match="must hold at least one item"):
                self.replay.sample()
            self.epoch_items, self.visited = set(), set()  # the epoch has ended
            return
        batch = self.replay.sample()
        for i, (number, anchor) in enumerate(
            zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)
        ):
            assert batch["code"][i] == number * STEP + anchor
            assert 0 <= anchor < self.stored[number] == batch.num_steps[i]
        self.check_items(batch)

    @precondition(lambda self: self.stored)
    @rule()
    def rewind(self) -> None:
        """What was saved is continued with the same batches."""
        state = self.replay.save(self.folder)
        wanted = [self.replay.sample().clone() for _ in range(3)]
        self.replay.load(self.folder, state)
        for batch in wanted:
            again = self.replay.sample()
            assert torch.equal(again.host_records[:, [0, 4, 5, 6, 7]], batch.host_records[:, [0, 4, 5, 6, 7]])
            assert torch.equal(again.epoch, batch.epoch)
            assert all(torch.equal(again[name], batch[name]) for name in batch)
        self.replay.load(self.folder, state)
        shutil.rmtree(self.folder)

    # ---- checks ----------------------------------------------------------------------------------

    def items(self) -> set[Item]:
        if self.unit == "trajectory":
            return {(number, 0) for number in self.stored}
        return {(number, step) for number, steps in self.stored.items() for step in range(steps)}

    def check_items(self, batch: Batch) -> None:
        assert batch.sample_number.tolist() == list(range(self.num_samples, self.num_samples + BATCH))
        self.num_samples += BATCH
        if self.kind == "length":
            total = sum(self.stored.values())
            wanted = [self.stored[number] / total for number in batch.trajectory_id.tolist()]
            assert batch.probability.tolist() == wanted
            return
        current, anchors = self.items(), batch.anchor.tolist() if self.unit == "step" else [0] * BATCH
        for item, epoch in zip(
            zip(batch.trajectory_id.tolist(), anchors, strict=True), batch.epoch.tolist(), strict=True
        ):
            self.visit(item, epoch, current)

    def visit(self, item: Item, epoch: int, current: set[Item]) -> None:
        if epoch != self.epoch:
            assert epoch > self.epoch
            left = {one for one in self.epoch_items - self.visited if one[0] in self.stored}
            assert not left, "an epoch ended before all that is there was visited"
            self.epoch, self.epoch_items, self.visited = epoch, set(current), set()
        assert item in self.epoch_items
        assert item in current, "a removed item was visited"
        assert item not in self.visited, "visited twice in one epoch"
        self.visited.add(item)

    @invariant()
    def counts(self) -> None:
        assert len(self.replay) == len(self.stored)
        assert self.replay.num_steps == sum(self.stored.values())

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            check_whole(self.replay.tables["main"], list(streams_of(self.replay).values()))
            self.replay.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def case(kind: str, unit: str) -> Any:
    """Return the tests of one sampler."""
    machine = type(f"{kind}_{unit}", (ReplayMachine,), {"kind": kind, "unit": unit})
    made: Any = machine.TestCase
    made.settings = settings(max_examples=40 if LONG else 8, stateful_step_count=30)
    return made


TestByLength = case("length", "trajectory")
TestEpochOfSteps = case("epoch", "step")
TestEpochOfTrajectories = case("epoch", "trajectory")

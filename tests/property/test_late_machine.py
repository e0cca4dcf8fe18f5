"""Late columns of trajectories that come, go and are replaced, against plain Python."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import exit_status, in_child
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.errors import DataError, StoreError
from deepspeed_gear.writer import late

SCHEMA = Schema(
    [
        Column("whose", "int64", (), "observation", "T+1"),
        Column("after", "int64", late=True),
        Column("score", "int64", rows="1", late=True),
    ]
)
SLOTS, BATCH = 4, 16


def after_of(number: int, steps: int) -> np.ndarray:
    return np.arange(steps) + 1000 * (number + 1)


class LateMachine(RuleBasedStateMachine):
    """The oracle: `stored` holds what is there, oldest first, and which of it has the late column."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, int] = {}  # id -> steps
        self.filled: set[int] = set()
        self.count = 0
        self.folder = Path(tempfile.mkdtemp())

    @initialize(
        backend=st.sampled_from(["cpu", "reference"]), kind=st.sampled_from(["uniform", "prioritized"])
    )
    def make(self, backend: str, kind: str) -> None:
        table = {"capacity_steps": 200, "capacity_trajectories": SLOTS, "remove": "fifo", "max_length": 9}
        section = {
            "backend": backend,
            "tables": {"main": table},
            "sampler": {"kind": kind, "unit": "step"},
            "fields": {"whose": {}, "after": {}},
            "batch_size": BATCH,
        }
        self.replay = Replay(section, schemas={"main": SCHEMA})

    @rule(steps=st.integers(1, 9), fills=st.booleans())
    def add(self, steps: int, fills: bool) -> None:
        whose = np.full(steps + 1, self.count)
        more = {"after": after_of(self.count, steps)} if fills else {}
        assert self.replay.add({"whose": whose, **more}) == self.count
        self.stored[self.count] = steps
        self.filled |= {self.count} if fills else set()
        self.count += 1
        while len(self.stored) > SLOTS:
            del self.stored[min(self.stored)]

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 7))
    def fill(self, back: int) -> None:
        """Write the column of a trajectory, whether it is there, gone, or has it already."""
        number = max(0, self.count - 1 - back)
        steps = self.stored.get(number, 3)
        if number not in self.stored:
            with pytest.raises(StoreError, match="must be stored"):
                self.replay.fill(number, after=after_of(number, steps))
        elif number in self.filled:
            with pytest.raises(DataError, match="must be written once"):
                self.replay.fill(number, after=after_of(number, steps) + 1)
        else:
            self.replay.fill(number, after=after_of(number, steps))
            self.filled.add(number)

    @precondition(lambda self: set(self.stored) - self.filled)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Be killed behind the rows, before they are said to be there."""
        number = data.draw(st.sampled_from(sorted(set(self.stored) - self.filled)))

        def work() -> None:
            write = late._write

            def half(*arguments: Any) -> None:
                write(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

            late._write = half
            self.replay.fill(number, after=np.full(self.stored[number], -1))

        assert exit_status(in_child(work)) == -signal.SIGKILL

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.stored)))
        assert self.replay.remove([number]) == 1
        del self.stored[number]

    @rule(count=st.integers(1, 3))
    def sample(self, count: int) -> None:
        ready = set(self.stored) & self.filled
        assert self.replay.can_sample() == bool(ready)
        for _ in range(count if ready else 0):
            batch = self.replay.sample()
            whose, anchor = batch["whose"].numpy(), batch.anchor.numpy()
            assert set(whose.tolist()) <= ready
            assert (batch["after"].numpy() == anchor + 1000 * (whose + 1)).all()

    @precondition(lambda self: self.stored)
    @rule()
    def rewind(self) -> None:
        state = self.replay.save(self.folder)
        self.replay.load(self.folder, state)
        shutil.rmtree(self.folder)

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.replay.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TestLate = LateMachine.TestCase
TestLate.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)

"""What actors and ranks do to a table, in any order and with deaths in between, against plain
Python.

GEAR_LONG_TESTS=1 tries 400 orders instead of 12: some minutes.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SHM
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from process_support import exit_status, in_child
from replay_support import streams_of
from store_support import check_whole

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import DataError, StoreError, StoreFullError
from deepspeed_gear.store import late_columns
from deepspeed_gear.store.records import Control

SCHEMA = Schema(
    [
        Column("state", "int64", (), "observation", "T+1"),
        Column("action", "int64"),
        Column("truncated", "bool", (), "truncated"),
        Column("number", "int64", rows="1"),
        Column("after", "int64", late=True),
    ]
)
CAPACITY = 4
LONGEST = 9
BATCH = 16
PRIORITIES = np.array([0.5, 1.0, 4.0], np.float32)


@dataclass
class Stored:
    """What a trajectory holds: its steps are numbered from `first` on."""

    number: int
    first: int
    steps: int
    is_open: bool = False
    is_filled: bool = False
    is_truncated: bool = False


def steps_of(number: int, first: int, count: int) -> dict[str, Any]:
    states = 1000 * number + first + np.arange(count + 1)
    return {
        "state": states,
        "action": -states[:-1],
        "truncated": np.zeros(count, bool),
        "number": np.int64(number),
    }


def after_of(number: int, first: int, count: int) -> np.ndarray:
    return 7 + 1000 * number + first + np.arange(count)


def die() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return signal.pause()


class Machine(RuleBasedStateMachine):
    """What happens to a replay, which may be saved."""

    replay: Replay

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHM))  # no disk is waited for

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.replay.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class OnlineMachine(Machine):
    """The oracle: `stored` holds what is there by id, `opened` the writer's open trajectories by
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, Stored] = {}
        self.opened: dict[int, Any] = {}
        self.appended: dict[int, int] = {}  # steps of the open ones
        self.first: dict[int, int] = {}  # the first of them that is not another trajectory's
        self.known: dict[
            tuple[int, int], float
        ] = {}  # priorities of items that a selection has seen
        self.reports: list[tuple[int, list[tuple[int, int]], np.ndarray]] = []
        self.unknown: set[int] = set()  # open ones whose writer does not know that its part is gone
        self.batches: list[tuple[int, Batch]] = []
        self.count = self.next_id = self.num_batches = 0

    @initialize(
        kind=st.sampled_from(["uniform", "uniform", "prioritized", "prioritized", "length"]),
        unit=st.sampled_from(["step", "trajectory"]),
        wants_late=st.booleans(),
    )
    def make(self, kind: str, unit: str, wants_late: bool) -> None:
        table = {"capacity_steps": 200, "capacity_trajectories": CAPACITY, "max_length": LONGEST}
        table |= {"remove": "fifo", "writers": 1}
        fields = ("state", "action", *(["after"] if wants_late else []))
        first = {"initial": 1.0} if kind == "prioritized" else {}
        unit = "trajectory" if kind == "length" else unit
        section = {
            "tables": {"main": table},
            "sampler": {"kind": kind, "unit": unit, **first},
            "fields": {name: {} for name in fields},
            "batch_size": BATCH,
            "timeout_s": 5.0,
        }
        self.kind = kind
        self.by_step = unit == "step"
        self.wants_late = wants_late
        self.replay = Replay(section, schemas={"main": SCHEMA})
        self.table = self.replay.tables["main"]
        self.writer = self.replay.writer()

    # ---- the oracle ------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Let the oldest that does not grow go where there are too many."""
        if len(self.stored) + len(self.unknown) == CAPACITY:
            del self.stored[min(key for key, held in self.stored.items() if not held.is_open)]

    def put(self, stored: Stored) -> int:
        self.make_room()
        self.stored[self.next_id] = stored
        self.next_id += 1
        return self.next_id - 1

    def ready(self) -> dict[int, Stored]:
        return {
            key: held for key, held in self.stored.items() if held.is_filled or not self.wants_late
        }

    def open_id(self, number: int) -> int | None:
        """Return the id of an open trajectory's published part, if it is there."""
        return next((k for k, h in self.stored.items() if h.is_open and h.number == number), None)

    # ---- whole ones ------------------------------------------------------------------------------

    @rule(steps=st.integers(1, LONGEST), fills=st.booleans())
    def add(self, steps: int, fills: bool) -> None:
        number = self.count
        self.count += 1
        more = {"after": after_of(number, 0, steps)} if fills else {}
        expected = self.put(Stored(number, 0, steps, is_filled=fills))
        assert self.replay.add({**steps_of(number, 0, steps), **more}) == expected

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.remove_one(data.draw(st.sampled_from(sorted(self.stored))))

    def remove_one(self, key: int) -> None:
        assert self.replay.remove([key]) == 1
        held = self.stored.pop(key)
        if held.is_open:
            self.first[held.number] = held.first + held.steps
            self.unknown.add(held.number)

    # ---- growing ones ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.opened) < 2)
    @rule(steps=st.integers(0, 2))
    def open(self, steps: int) -> None:
        number = self.count
        self.count += 1
        self.opened[number] = self.writer.trajectory(number=number)
        self.appended[number] = self.first[number] = 0
        self.opened[number].append(
            state=1000 * number
        )  # so that a step is whole as soon as it is appended
        for _ in range(steps):
            self.append_to(number, True)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), publish=st.sampled_from([True, True, False]))
    def append(self, data: st.DataObject, publish: bool) -> None:
        self.append_to(data.draw(st.sampled_from(sorted(self.opened))), publish)

    @precondition(lambda self: any(held.is_open for held in self.stored.values()))
    @rule(data=st.data())
    def remove_and_append(self, data: st.DataObject) -> None:
        """Take what is published of a trajectory; what follows is another one."""
        key = data.draw(st.sampled_from([key for key, held in self.stored.items() if held.is_open]))
        number = self.stored[key].number
        self.remove_one(key)
        self.append_to(number, True)

    def append_to(self, number: int, publish: bool) -> None:
        if self.appended[number] - self.first[number] == LONGEST:
            return
        t = self.appended[number]
        self.appended[number] += 1
        if publish:
            self.publish(number)
        state = 1000 * number + t
        self.opened[number].append(state=state + 1, action=-state, truncated=False, publish=publish)

    def publish(self, number: int) -> None:
        key = self.open_id(number)
        first = self.first[number]
        steps = self.appended[number] - first
        self.unknown -= {number} if steps else set()
        if key is not None:
            self.stored[key].steps = steps
        elif steps:
            self.put(Stored(number, first, steps, is_open=True))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), breaks=st.booleans())
    def end(self, data: st.DataObject, breaks: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.opened)))
        opened = self.opened.pop(number)
        was_published = opened._growing.is_published
        if not breaks and (was_published or self.appended[number]):
            self.publish(number)
        self.unknown.discard(number)
        key = self.open_id(number)
        if key is not None:
            self.stored[key].is_open = False
            self.stored[key].is_truncated = breaks
        if breaks:
            with pytest.raises(KeyError), opened:
                raise KeyError(number)
        elif was_published or self.appended[number]:
            with opened:
                pass

    # ---- late columns ----------------------------------------------------------------------------

    @precondition(lambda self: self.next_id)
    @rule(back=st.integers(0, 7))
    def fill(self, back: int) -> None:
        """Write the column of a trajectory, whether it is there, grows, is gone, or has
        it already.
        """
        key = max(0, self.next_id - 1 - back)
        held = self.stored.get(key, Stored(0, 0, 3))
        values = after_of(held.number, held.first, held.steps)
        if key in self.stored and not held.is_filled and not held.is_open:
            self.replay.fill(key, after=values)
            held.is_filled = True
            return
        error = DataError if key in self.stored else StoreError
        with pytest.raises(error, match=r"must be (written once|stored)|must have ended"):
            self.replay.fill(key, after=values + 1)

    # ---- ranks -----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def sample(self, count: int) -> None:
        ready = self.ready()
        assert self.replay.can_sample() == bool(ready)
        for _ in range(count if ready else 0):
            batch = self.replay.sample()
            self.settle()
            samples = (
                batch.trajectory_id.tolist(),
                batch.anchor.tolist(),
                batch["state"],
                batch["action"],
            )
            for key, anchor, state, action in zip(*samples, strict=True):
                held = ready[key]
                assert 0 <= anchor < held.steps
                assert int(state) == 1000 * held.number + held.first + anchor == -int(action)
            if self.wants_late:
                assert torch.equal(batch["after"], batch["state"] + 7)
            if self.kind == "uniform":
                items = sum(held.steps for held in ready.values()) if self.by_step else len(ready)
                assert batch.probability.tolist() == [1 / items] * BATCH
            elif self.kind == "length":
                total = sum(held.steps for held in ready.values())
                assert batch.probability.tolist() == [
                    ready[key].steps / total for key in samples[0]
                ]
            self.batches = [*self.batches[-2:], (self.num_batches, batch.clone())]
            self.num_batches += 1

    def settle(self) -> None:
        """Do what a selection does to priorities: new items get their first one, then reports come
        in.
        """
        count = {key: held.steps if self.by_step else 1 for key, held in self.ready().items()}
        items = {(key, step) for key, steps in count.items() for step in range(steps)}
        self.known = {item: self.known.get(item, 1.0) for item in items}
        for _, reported, values in sorted(
            self.reports, key=lambda report: report[0]
        ):  # the last batch wins
            self.known.update(
                {i: float(v) for i, v in zip(reported, values, strict=True) if i in items}
            )
        self.reports = []
        if self.kind == "prioritized" and items:
            keys, steps = (list(part) for part in zip(*items, strict=True))
            found = self.replay.priorities(keys, steps if self.by_step else None)
            assert found.tolist() == [self.known[item] for item in zip(keys, steps, strict=True)]

    @precondition(lambda self: self.batches and self.kind == "prioritized")
    @rule(data=st.data(), seed=st.integers(0, 99))
    def update(self, data: st.DataObject, seed: int) -> None:
        """Report priorities of one of the last batches; its items may be gone by now, or by the
        selection.
        """
        which, batch = drawn = data.draw(st.sampled_from(self.batches))
        values = np.random.default_rng(seed).choice(PRIORITIES, BATCH)
        self.replay.update_priorities(batch, torch.from_numpy(values))
        anchors = batch.anchor.tolist() if self.by_step else [0] * BATCH
        self.reports.append(
            (which, list(zip(batch.trajectory_id.tolist(), anchors, strict=True)), values)
        )
        self.batches.remove(drawn)

    # ---- death -----------------------------------------------------------------------------------

    def in_dying_writer(self, work: Callable[[TrajectoryWriter, Any], Any], number: int) -> None:
        """Let a process write that is killed, and let a selection find what it has left."""
        name = self.table.memory.path.name

        def write() -> None:
            writer = TrajectoryWriter.attach(name=name)
            work(writer, writer.trajectory(number=number))
            die()

        assert exit_status(in_child(write)) == -signal.SIGKILL
        streams_of(self.replay)["train"]._next_cleaning = 0.0
        self.replay.can_sample()

    @rule()
    def die_with_rows_reserved(self) -> None:
        self.make_room()
        self.in_dying_writer(lambda writer, _: writer.parts[1].reserve(5), 0)

    @rule(steps=st.integers(1, 4), where=st.sampled_from(["between", "first", "last"]))
    def die_while_it_grows(self, steps: int, where: str) -> None:
        """Be killed with a published part, or with the lock held while the first or last is
        published.
        """
        number = self.count
        self.count += 1

        def work(writer: TrajectoryWriter, opened: Any) -> None:
            opened.append(state=1000 * number)
            table, inserter = writer.parts
            extents = table.extents

            def dying(publish: Callable[..., Any]) -> Callable[..., Any]:
                def publish_and_die(*arguments: Any) -> None:
                    extents.note = lambda slot: die()  # which the native commit does not call
                    publish(*arguments)
                    die()

                return publish_and_die

            for t in range(steps):
                if (where, t) in (("first", 0), ("last", steps - 1)):
                    inserter.publish = dying(inserter.publish)
                    extents.grow = dying(extents.grow)
                state = 1000 * number + t
                opened.append(state=state + 1, action=-state, truncated=False, publish=True)

        self.put(Stored(number, 0, 1 if where == "first" else steps, is_truncated=True))
        self.in_dying_writer(work, number)

    @precondition(lambda self: any(not h.is_filled and not h.is_open for h in self.stored.values()))
    @rule(data=st.data())
    def die_while_it_fills(self, data: st.DataObject) -> None:
        """Be killed behind the rows of a late column, before they are said to be there."""
        missing = [
            key for key, held in self.stored.items() if not held.is_filled and not held.is_open
        ]
        key = data.draw(st.sampled_from(missing))

        def work(writer: TrajectoryWriter, _: Any) -> None:
            write = late_columns._write

            def write_and_die(*arguments: Any) -> None:
                write(*arguments)
                die()

            late_columns._write = write_and_die
            writer.fill(key, after=np.full(self.stored[key].steps, -1))

        self.in_dying_writer(work, 0)

    # ---- the whole -------------------------------------------------------------------------------

    @rule()
    def rewind(self) -> None:
        """Save, and go on from there: what grew has ended."""
        state = self.replay.save(self.folder)
        self.replay.load(self.folder, state)
        shutil.rmtree(self.folder)
        self.batches = []
        self.unknown = set()
        for held in self.stored.values():
            if held.is_open:
                held.is_open = False
                held.is_truncated = True
                self.first[held.number] = held.first + held.steps

    @rule()
    def look(self) -> None:
        """Everything is there as a whole, and no room is lost."""
        for key, held in self.stored.items():
            rows = self.replay.read([key])[0]
            expected = steps_of(held.number, held.first, held.steps)
            expected["truncated"][-1] = held.is_truncated
            if held.is_filled:
                expected["after"] = after_of(held.number, held.first, held.steps)
            for name, values in expected.items():
                assert (rows[name].numpy() == values).all(), (key, name)
        with self.table.lock:
            self.writer.parts[1].evictor.free_retired()
        control = self.table.control
        closed = [h for h in self.stored.values() if not h.is_open]
        assert control[Control.NUM_COMMITTED] == len(self.stored)
        assert control[Control.PENDING] == 0
        grow = len(self.stored) - len(closed)
        assert control[Control.ROWS_HELD] == sum(h.steps + 1 for h in closed) + grow * (LONGEST + 1)
        free = control[Control.FREE_ROWS] + self.table.slots[self.table.extents.retired(), 5].sum()
        assert free + control[Control.ROWS_HELD] == self.table.spec.capacity_rows


TestOnline = OnlineMachine.TestCase
TestOnline.settings = settings(
    max_examples=400 if os.environ.get("GEAR_LONG_TESTS") else 12, stateful_step_count=40
)


# ---- epochs --------------------------------------------------------------------------------------

CAPACITY_STEPS = 30
NUM_SLOTS = 5
EPOCH_BATCH = 6


class EpochMachine(Machine):
    """Epochs of a table from which nothing is evicted: `stored` has the steps of its trajectories
    by id.

    The epoch under way consists of `items`: trajectories, and a step of each; 0 where they are
    whole.
    """

    unit = "step"

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, int] = {}
        self.items: set[tuple[int, int]] = set()
        self.visited: set[tuple[int, int]] = set()
        self.epoch = -1
        self.num_samples = self.next_id = 0

    @initialize(seed=st.integers(0, 1000))
    def make(self, seed: int) -> None:
        table = {"capacity_steps": CAPACITY_STEPS, "capacity_trajectories": NUM_SLOTS}
        sampler = {"kind": "epoch", "unit": self.unit}
        section = {
            "tables": {"main": table},
            "sampler": sampler,
            "fields": {"state": {}, "action": {}},
        }
        section |= {"batch_size": EPOCH_BATCH, "seed": seed}
        self.replay = Replay(section, schemas={"main": SCHEMA})
        self.change([], [4, 7, 1, 5], 0)

    @rule(
        removed=st.lists(st.integers(0, 8), max_size=4),
        lengths=st.lists(st.integers(1, 6) | st.integers(1, 35), max_size=4),
        samples=st.integers(0, 4),
    )
    def change(self, removed: list[int], lengths: list[int], samples: int) -> None:
        """Remove some of the latest trajectories, add others, sample."""
        choice = [self.next_id - 1 - back for back in removed]
        gone = {number for number in choice if number in self.stored}
        assert self.replay.remove(choice) == len(gone)
        for number in gone:
            del self.stored[number]
        for steps in lengths:
            try:
                assert self.replay.add(steps_of(self.next_id, 0, steps)) == self.next_id
            except StoreFullError:
                assert self.stored or steps + 1 > CAPACITY_STEPS + NUM_SLOTS
                continue
            self.stored[self.next_id] = steps
            self.next_id += 1
        for _ in range(samples):
            self.sample()

    @rule(how=st.sampled_from(["clear", "remove", *["not"] * 6]))
    def empty(self, how: str) -> None:
        if how == "remove":
            self.replay.remove(sorted(self.stored))
            self.stored.clear()
        elif how == "clear":
            self.replay.clear()
            self.stored.clear()
            self.items = set()
            self.visited = set()

    def sample(self) -> None:
        if not self.stored:
            with pytest.raises(StoreError, match="must hold at least one item"):
                self.replay.sample()
            # the epoch has ended
            self.items = set()
            self.visited = set()
            return
        batch = self.replay.sample()
        by_step = self.unit == "step"
        numbers = range(self.num_samples, self.num_samples + EPOCH_BATCH)
        assert batch.sample_number.tolist() == list(numbers)
        self.num_samples += EPOCH_BATCH
        count = {number: steps if by_step else 1 for number, steps in self.stored.items()}
        current = {(number, step) for number, steps in count.items() for step in range(steps)}
        assert batch["state"].tolist() == (1000 * batch.trajectory_id + batch.anchor).tolist()
        samples = (batch.trajectory_id, batch.anchor, batch.num_steps, batch.epoch)
        for number, anchor, steps, epoch in zip(*(part.tolist() for part in samples), strict=True):
            assert 0 <= anchor < steps == self.stored[number], "of no removed trajectory"
            if epoch != self.epoch:
                assert epoch > self.epoch
                left = {item for item in self.items - self.visited if item[0] in self.stored}
                assert not left, "an epoch ended before all that is there was visited"
                self.epoch = epoch
                self.items = set(current)
                self.visited = set()
            item = (number, anchor if by_step else 0)
            assert item in self.items
            assert item not in self.visited, "visited twice in one epoch"
            self.visited.add(item)

    @precondition(lambda self: self.stored)
    @rule()
    def rewind(self) -> None:
        """What was saved is continued with the same batches."""
        state = self.replay.save(self.folder)
        wanted = [self.replay.sample().clone() for _ in range(3)]
        self.replay.load(self.folder, state)
        for batch in wanted:
            again = self.replay.sample()
            assert torch.equal(
                again.host_resolutions[:, [0, 4, 5, 6, 7]],
                batch.host_resolutions[:, [0, 4, 5, 6, 7]],
            )
            assert torch.equal(again.epoch, batch.epoch)
            assert all(torch.equal(again[name], batch[name]) for name in batch)
        self.replay.load(self.folder, state)
        shutil.rmtree(self.folder)

    @invariant()
    def counts(self) -> None:
        assert len(self.replay) == len(self.stored)
        assert self.replay.num_steps == sum(self.stored.values())

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            check_whole(self.replay.tables["main"], list(streams_of(self.replay).values()))
        super().teardown()


def epochs_of(unit: str) -> Any:
    """Return the tests of one unit."""
    made: Any = type(unit, (EpochMachine,), {"unit": unit}).TestCase
    made.settings = settings(
        max_examples=40 if os.environ.get("GEAR_LONG_TESTS") else 8, stateful_step_count=30
    )
    return made


TestEpochOfSteps = epochs_of("step")
TestEpochOfTrajectories = epochs_of("trajectory")

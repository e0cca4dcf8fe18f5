"""The lists of a store, which C++ changes, against an oracle that knows no lists."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.memory_layout import HEADER_BYTES
from deepspeed_gear.store.native_store import native_store
from deepspeed_gear.store.records import Control, Peer, Refusal, SlotLink, SlotRetention
from deepspeed_gear.store.row_allocator import RowAllocator
from deepspeed_gear.store.table_spec import Shard, TableSpec

PEER = 3
IDS = (1, 2)


def regions(num_slots: int, log_size: int) -> dict[str, np.ndarray]:
    shapes = {
        "control": (Control.NUM_WORDS,),
        "slots": (num_slots, Slot.NUM_WORDS),
        "links": (num_slots + 2, SlotLink.NUM_WORDS),
        "log": (log_size,),
        "peers": (1, Peer.NUM_WORDS),
    }
    retention = np.ones((num_slots, SlotRetention.NUM_WORDS), np.int64)  # a commit sets it to 0
    return {
        **{name: np.zeros(shape, np.int64) for name, shape in shapes.items()},
        "retention": retention,
    }


NATIVE = load_backend("cpu").native


def allocator(views: dict[str, np.ndarray], num_rows: int) -> RowAllocator:
    """Open lists that never lock: their mutex is not initialised."""
    memory: Any = SimpleNamespace(buffer=bytearray(HEADER_BYTES), peer=PEER)
    schema = Schema([Column("x", "int64")])
    columns = {"x": np.zeros(num_rows, np.int64)}
    spec = TableSpec(
        "main", schema, len(views["slots"]), num_rows, None, True, False, 1, Shard(*IDS)
    )
    store = native_store(NATIVE, spec, memory, views, columns, list(columns.values()))
    return RowAllocator(store, spec, memory, views)


def ring(extents: RowAllocator, sentinel: int, on: int, back: int) -> list[int]:
    """Walk a list forth, and check that it is the same back."""
    found = []
    slot = int(extents.links[sentinel, on])
    while slot != sentinel:
        found.append(slot)
        assert len(found) <= len(extents.slots)
        slot = int(extents.links[slot, on])
    there = []
    slot = int(extents.links[sentinel, back])
    while slot != sentinel:
        there.append(slot)
        slot = int(extents.links[slot, back])
    assert there == found[::-1]
    return found


def free_slots(extents: RowAllocator) -> list[int]:
    found = []
    slot = int(extents.control[Control.FREE_SLOT])
    while slot >= 0:
        found.append(slot)
        slot = int(extents.links[slot, SlotLink.AFTER])
    return found


class ExtentsMachine(RuleBasedStateMachine):
    """The oracle: `held` says what each slot holds, `old` and `gone` in which order they came and
    went.
    """

    @initialize(
        num_slots=st.integers(1, 7), num_rows=st.integers(1, 40), log_size=st.integers(1, 9)
    )
    def make(self, num_slots: int, num_rows: int, log_size: int) -> None:
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.views = regions(num_slots, log_size)
        self.extents = allocator(self.views, num_rows)
        self.extents.rebuild()
        self.held: dict[int, tuple[int, int, int]] = {}  # slot -> state, rows, steps
        self.old: list[int] = []
        self.gone: list[int] = []
        self.open: set[int] = set()  # slots whose trajectories grow
        self.noted: list[int] = []
        self.inserted = self.steps_inserted = 0

    def _of(self, state: int) -> list[int]:
        return sorted(slot for slot, held in self.held.items() if held[0] == state)

    def _longest_run(self) -> int:
        taken = np.zeros(self.num_rows + 1, bool)
        taken[-1] = True
        for slot in self.held:
            first, count = self.extents.slots[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
            taken[first : first + count] = True
        return int(np.diff(np.nonzero(np.append(True, taken))[0]).max()) - 1

    def _next_fit(self, num_rows: int) -> int | None:
        """Return the row at which the first sufficient gap begins, from the extent of the last
        search on.
        """
        records = self.extents.slots
        rover = int(self.extents.control[Control.ROVER])
        held = sorted(self.held, key=lambda slot: int(records[slot, Slot.FIRST_ROW]))
        begins = [0, *(int(records[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].sum()) for slot in held)]
        ends = [*records[held, Slot.FIRST_ROW].tolist(), self.num_rows]
        first = [self.extents.ends, *held].index(rover)
        for at in [*range(first, len(begins)), *range(first)]:
            if ends[at] - begins[at] >= num_rows:
                return begins[at]
        return None

    @rule(num_rows=st.integers(1, 20))
    def reserve(self, num_rows: int) -> None:
        where = self._next_fit(num_rows)
        free = self.num_rows - sum(rows for _, rows, _ in self.held.values())
        longest = self._longest_run()
        slot = self.extents.reserve(num_rows, max(1, num_rows - 1))
        if len(self.held) == self.num_slots:
            assert slot == Refusal.NO_SLOT
        elif num_rows > free:
            assert slot == Refusal.NO_ROWS
        elif num_rows > longest:
            assert slot == Refusal.SCATTERED
        else:
            assert 0 <= slot < self.num_slots
            assert slot not in self.held
            assert self.extents.slots[slot, [Slot.FIRST_ROW, Slot.OWNER]].tolist() == [where, PEER]
            self.held[slot] = SlotState.RESERVED, num_rows, max(1, num_rows - 1)

    @precondition(lambda self: self._of(SlotState.RESERVED))
    @rule(data=st.data(), born=st.integers(0, 9), grows=st.booleans())
    def commit(self, data: st.DataObject, born: int, grows: bool) -> None:
        """Commit a trajectory, or the first step of one that keeps its rows to grow."""
        slot = data.draw(st.sampled_from(self._of(SlotState.RESERVED)))
        reserved = self.held[slot][1]
        steps = 1 if grows else data.draw(st.integers(1, reserved))
        rows = reserved if grows else steps
        if grows:
            self.extents.retention[slot, SlotRetention.OPEN] = 1
            self.open.add(slot)
        number = self.extents.commit(slot, steps, rows, born, 0)
        assert number == self.inserted * IDS[1] + IDS[0]
        self.held[slot] = SlotState.COMMITTED, rows, steps
        self.old.append(slot)
        self.noted.append(slot)
        self.inserted = self.inserted + 1
        self.steps_inserted = self.steps_inserted + steps

    @precondition(lambda self: self.open & set(self.old))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open & set(self.old))))
        state, rows, steps = self.held[slot]
        longer = data.draw(st.integers(steps, rows))
        self.extents.grow(slot, longer)
        self.held[slot] = state, rows, longer
        self.steps_inserted += longer - steps
        self.noted.append(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_growth(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        state, rows, steps = self.held[slot]
        self.extents.end(slot, truncated=False)
        self.held[slot] = state, steps if state == SlotState.COMMITTED else rows, steps
        self.open.remove(slot)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.old))
        self.extents.retire(slot)
        self.held[slot] = SlotState.EVICTED, *self.held[slot][1:]
        self.old.remove(slot)
        self.gone.append(slot)
        self.noted.append(slot)

    def _can_be_freed(self) -> list[int]:
        return self._of(SlotState.RESERVED) + [slot for slot in self.gone if slot not in self.open]

    @precondition(lambda self: self._can_be_freed())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self._can_be_freed()))
        self.extents.free(slot)
        if self.held.pop(slot)[0] == SlotState.EVICTED:
            self.gone.remove(slot)

    @rule()
    def rebuild(self) -> None:
        """Order by id: of those that are retired this is all that the slot table knows."""
        self.extents.rebuild()
        self.gone.sort(key=lambda slot: int(self.extents.slots[slot, Slot.ID]))

    @invariant()
    def right(self) -> None:
        extents = self.extents
        control = self.extents.control
        slots = self.extents.slots
        for slot in range(self.num_slots):
            state, rows, steps = self.held.get(slot, (SlotState.FREE, 0, 0))
            assert slots[slot, Slot.STATE] == state
            if state != SlotState.FREE:
                assert slots[slot, [Slot.NUM_ROWS, Slot.NUM_STEPS]].tolist() == [rows, steps]
        by_address = ring(extents, extents.ends, SlotLink.AFTER, SlotLink.BEFORE)
        assert sorted(by_address) == sorted(self.held)
        end = 0
        for slot in by_address:
            assert slots[slot, Slot.FIRST_ROW] >= end
            end = int(slots[slot, Slot.FIRST_ROW] + slots[slot, Slot.NUM_ROWS])
        assert end <= self.num_rows
        assert control[Control.FREE_ROWS] == self.num_rows - sum(
            rows for _, rows, _ in self.held.values()
        )
        assert extents.longest_run == self._longest_run()
        assert sorted([*free_slots(extents), *self.held]) == list(range(self.num_slots))
        assert ring(extents, extents.ends, SlotLink.NEWER, SlotLink.OLDER) == self.old
        retired = ring(extents, extents.retired_ends, SlotLink.NEWER, SlotLink.OLDER)
        assert extents.retired().tolist() == retired == self.gone
        grown = [slot for slot in self.old if slot not in self.open]
        assert extents.first_complete(SlotLink.NEWER) == (grown[0] if grown else -1)
        assert extents.first_complete(SlotLink.OLDER) == (grown[-1] if grown else -1)

    @invariant()
    def counted(self) -> None:
        control = self.extents.control
        assert control[Control.NUM_COMMITTED] == len(self.old)
        assert control[Control.STEPS_COMMITTED] == sum(self.held[slot][2] for slot in self.old)
        held = [rows for state, rows, _ in self.held.values() if state != SlotState.EVICTED]
        assert control[Control.ROWS_HELD] == sum(held)
        inserted = control[[Control.INSERTED, Control.STEPS_INSERTED]].tolist()
        assert inserted == [self.inserted, self.steps_inserted]
        assert control[Control.NEXT_ID] == self.inserted
        reserved = [self.held[slot][2] for slot in self._of(SlotState.RESERVED)]
        assert control[[Control.PENDING, Control.STEPS_PENDING]].tolist() == [
            len(reserved),
            sum(reserved),
        ]
        assert control[Control.CHANGED] == len(self.noted)
        seen = max(0, len(self.noted) - len(self.extents.log))
        assert self.extents.changed_since(seen).tolist() == sorted(set(self.noted[seen:]))
        if seen:
            assert self.extents.changed_since(seen - 1) is None

    @invariant()
    def rebuilt_is_the_same(self) -> None:
        """Of a copy: the same lists, although the search for rows may begin elsewhere."""
        views = {name: view.copy() for name, view in self.views.items()}
        views["links"][:] = 12345
        derived = [Control.FREE_ROWS, Control.NUM_COMMITTED, Control.STEPS_COMMITTED]
        derived += [Control.ROWS_HELD, Control.PENDING, Control.STEPS_PENDING]
        views["control"][[Control.FREE_SLOT, *derived]] = 12345
        copy = allocator(views, self.num_rows)
        copy.rebuild()
        assert sorted(free_slots(copy)) == sorted(free_slots(self.extents))
        ends = self.extents.ends
        by_address = [
            ring(one, ends, SlotLink.AFTER, SlotLink.BEFORE) for one in (copy, self.extents)
        ]
        assert by_address[0] == by_address[1]
        assert ring(copy, ends, SlotLink.NEWER, SlotLink.OLDER) == self.old
        assert sorted(copy.retired().tolist()) == sorted(self.gone)
        words = [
            *derived,
            Control.NEXT_ID,
            Control.CHANGED,
            Control.INSERTED,
            Control.STEPS_INSERTED,
        ]
        assert (copy.control[words] == self.extents.control[words]).all()


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40)

"""The lists of a store: plain Python and C++ side by side, against an oracle that knows no lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.native_handle import address
from deepspeed_gear.store.records import Control, Refusal, SlotLink, SlotRetention
from deepspeed_gear.store.retention import UNLIMITED
from deepspeed_gear.store.row_allocator import NativeRowAllocator, RowAllocator

PEER, IDS = 3, (1, 2)


def arrays_of(num_slots: int, log_size: int) -> tuple[np.ndarray, ...]:
    shapes = (
        (Control.NUM_WORDS,),
        (num_slots, Slot.NUM_WORDS),
        (num_slots + 2, SlotLink.NUM_WORDS),
        (log_size,),
    )
    retention = np.ones((num_slots, SlotRetention.NUM_WORDS), np.int64)  # a commit sets it to 0
    return (*(np.zeros(shape, np.int64) for shape in shapes), retention)


def native_extents(arrays: tuple[np.ndarray, ...], num_rows: int) -> NativeRowAllocator:
    """Open lists in C++ that never lock: there is no mutex."""
    native = load_backend("cpu").native
    control, slots, links, log, retention = arrays
    store = native.Store(
        mutex=0,
        holder=0,
        control=address(control),
        links=address(links),
        log=address(log),
        retention=address(retention),
        slots=address(slots),
        num_slots=len(slots),
        num_rows=num_rows,
        log_size=len(log),
        id_index=IDS[0],
        id_count=IDS[1],
        peer=PEER,
        most_trajectories=UNLIMITED,
        most_steps=UNLIMITED,
        position=0,
        least_free_rows=UNLIMITED,
    )
    return NativeRowAllocator(native, store, *arrays, num_rows, IDS, PEER)


def ring(extents: RowAllocator, sentinel: int, on: int, back: int) -> list[int]:
    """Walk a list forth, and check that it is the same back."""
    found, slot = [], int(extents.links[sentinel, on])
    while slot != sentinel:
        found.append(slot)
        assert len(found) <= len(extents.slots)
        slot = int(extents.links[slot, on])
    there, slot = [], int(extents.links[sentinel, back])
    while slot != sentinel:
        there.append(slot)
        slot = int(extents.links[slot, back])
    assert there == found[::-1]
    return found


def free_slots(extents: RowAllocator) -> list[int]:
    found, slot = [], int(extents.control[Control.FREE_SLOT])
    while slot >= 0:
        found.append(slot)
        slot = int(extents.links[slot, SlotLink.AFTER])
    return found


class ExtentsMachine(RuleBasedStateMachine):
    """The oracle: `held` says what each slot holds, `old` and `gone` in which order they came and went."""

    @initialize(num_slots=st.integers(1, 7), num_rows=st.integers(1, 40), log_size=st.integers(1, 9))
    def make(self, num_slots: int, num_rows: int, log_size: int) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        plain, other = arrays_of(num_slots, log_size), arrays_of(num_slots, log_size)
        self.plain = RowAllocator(*plain, num_rows, IDS, PEER)
        self.native = native_extents(other, num_rows)
        self.both: list[RowAllocator] = [self.plain, self.native]
        self._on_both("rebuild")
        self.held: dict[int, tuple[int, int, int]] = {}  # slot -> state, rows, steps
        self.old: list[int] = []
        self.gone: list[int] = []
        self.open: set[int] = set()  # slots whose trajectories grow
        self.noted: list[int] = []
        self.inserted = self.steps_inserted = 0

    def _on_both(self, name: str, *arguments: int) -> Any:
        first, second = (getattr(extents, name)(*arguments) for extents in self.both)
        assert first == second
        return first

    def _of(self, state: int) -> list[int]:
        return sorted(slot for slot, held in self.held.items() if held[0] == state)

    def _longest_run(self) -> int:
        taken = np.zeros(self.num_rows + 1, bool)
        taken[-1] = True
        for slot in self.held:
            first, count = self.plain.slots[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
            taken[first : first + count] = True
        return int(np.diff(np.nonzero(np.append(True, taken))[0]).max()) - 1

    @rule(num_rows=st.integers(1, 20))
    def reserve(self, num_rows: int) -> None:
        free, longest = self.num_rows - sum(rows for _, rows, _ in self.held.values()), self._longest_run()
        slot = self._on_both("reserve", num_rows, max(1, num_rows - 1))
        if len(self.held) == self.num_slots:
            assert slot == Refusal.NO_SLOT
        elif num_rows > free:
            assert slot == Refusal.NO_ROWS
        elif num_rows > longest:
            assert slot == Refusal.SCATTERED
        else:
            assert 0 <= slot < self.num_slots
            assert slot not in self.held
            self.held[slot] = SlotState.RESERVED, num_rows, max(1, num_rows - 1)

    @precondition(lambda self: self._of(SlotState.RESERVED))
    @rule(data=st.data(), born=st.integers(0, 9))
    def commit(self, data: st.DataObject, born: int) -> None:
        slot = data.draw(st.sampled_from(self._of(SlotState.RESERVED)))
        num_rows = data.draw(st.integers(1, self.held[slot][1]))
        number = self._on_both("commit", slot, num_rows, num_rows, born)
        assert number == self.inserted * IDS[1] + IDS[0]
        self.held[slot] = SlotState.COMMITTED, num_rows, num_rows
        self.old.append(slot)
        self.noted.append(slot)
        self.inserted, self.steps_inserted = self.inserted + 1, self.steps_inserted + num_rows

    @precondition(lambda self: self._of(SlotState.RESERVED))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Commit the beginning of a trajectory that keeps its rows to grow."""
        slot = data.draw(st.sampled_from(self._of(SlotState.RESERVED)))
        for extents in self.both:
            extents.retention[slot, SlotRetention.OPEN] = 1
        rows = self.held[slot][1]
        self._on_both("commit", slot, 1, rows, 0)
        self.held[slot] = SlotState.COMMITTED, rows, 1
        self.old.append(slot)
        self.noted.append(slot)
        self.open.add(slot)
        self.inserted, self.steps_inserted = self.inserted + 1, self.steps_inserted + 1

    @precondition(lambda self: self.open & set(self.old))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open & set(self.old))))
        state, rows, steps = self.held[slot]
        longer = data.draw(st.integers(steps, rows))
        self._on_both("grow", slot, longer)
        self.held[slot] = state, rows, longer
        self.steps_inserted += longer - steps
        self.noted.append(slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_growth(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open)))
        state, rows, steps = self.held[slot]
        self._on_both("end_growth", slot, steps)
        self.held[slot] = state, steps if state == SlotState.COMMITTED else rows, steps
        self.open.remove(slot)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.old))
        self._on_both("retire", slot)
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
        self._on_both("free", slot)
        if self.held.pop(slot)[0] == SlotState.EVICTED:
            self.gone.remove(slot)

    @rule()
    def rebuild(self) -> None:
        """Order by id: of those that are retired this is all that the slot table knows."""
        self._on_both("rebuild")
        self.gone.sort(key=lambda slot: int(self.plain.slots[slot, Slot.ID]))

    @invariant()
    def same_in_both(self) -> None:
        if not hasattr(self, "plain"):
            return
        words = np.arange(Control.NUM_WORDS) != Control.RECOVERIES
        assert (self.plain.control[words] == self.native.control[words]).all()
        for name in ("slots", "links", "log", "retention"):
            assert (getattr(self.plain, name) == getattr(self.native, name)).all(), name

    @invariant()
    def right(self) -> None:
        if not hasattr(self, "plain"):
            return
        extents, control, slots = self.plain, self.plain.control, self.plain.slots
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
        assert control[Control.FREE_ROWS] == self.num_rows - sum(rows for _, rows, _ in self.held.values())
        assert extents.longest_run == self._longest_run()
        assert sorted([*free_slots(extents), *self.held]) == list(range(self.num_slots))
        assert ring(extents, extents.ends, SlotLink.NEWER, SlotLink.OLDER) == self.old
        assert (
            extents.retired().tolist()
            == ring(extents, extents.retired_ends, SlotLink.NEWER, SlotLink.OLDER)
            == self.gone
        )
        grown = [slot for slot in self.old if slot not in self.open]
        assert extents.oldest() == (grown[0] if grown else -1)
        assert extents.newest() == (grown[-1] if grown else -1)

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "plain"):
            return
        control = self.plain.control
        assert control[Control.NUM_COMMITTED] == len(self.old)
        assert control[Control.STEPS_COMMITTED] == sum(self.held[slot][2] for slot in self.old)
        held = [
            rows
            for state, rows, _ in self.held.values()
            if state in (SlotState.RESERVED, SlotState.COMMITTED)
        ]
        assert control[Control.ROWS_HELD] == sum(held)
        assert control[[Control.INSERTED, Control.STEPS_INSERTED]].tolist() == [
            self.inserted,
            self.steps_inserted,
        ]
        assert control[Control.NEXT_ID] == self.inserted
        reserved = [self.held[slot][2] for slot in self._of(SlotState.RESERVED)]
        assert control[[Control.PENDING, Control.STEPS_PENDING]].tolist() == [len(reserved), sum(reserved)]
        assert control[Control.CHANGED] == len(self.noted)
        seen = max(0, len(self.noted) - len(self.plain.log))
        assert self.plain.changed_since(seen).tolist() == sorted(set(self.noted[seen:]))
        if seen:
            assert self.plain.changed_since(seen - 1) is None

    @invariant()
    def rebuilt_is_the_same(self) -> None:
        """Of a copy: the same lists, although the search for rows may begin elsewhere."""
        if not hasattr(self, "plain"):
            return
        arrays = [
            getattr(self.plain, name).copy() for name in ("control", "slots", "links", "log", "retention")
        ]
        arrays[2][:] = 12345
        derived = [
            Control.FREE_ROWS,
            Control.NUM_COMMITTED,
            Control.STEPS_COMMITTED,
            Control.ROWS_HELD,
            Control.PENDING,
            Control.STEPS_PENDING,
        ]
        arrays[0][[Control.FREE_SLOT, *derived]] = 12345
        copy = RowAllocator(*arrays, self.num_rows, IDS, PEER)
        copy.rebuild()
        assert sorted(free_slots(copy)) == sorted(free_slots(self.plain))
        ends = self.plain.ends
        assert ring(copy, ends, SlotLink.AFTER, SlotLink.BEFORE) == ring(
            self.plain, ends, SlotLink.AFTER, SlotLink.BEFORE
        )
        assert ring(copy, ends, SlotLink.NEWER, SlotLink.OLDER) == self.old
        assert sorted(copy.retired().tolist()) == sorted(self.gone)
        words = [*derived, Control.NEXT_ID, Control.CHANGED, Control.INSERTED, Control.STEPS_INSERTED]
        assert (copy.control[words] == self.plain.control[words]).all()


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40)

"""Stores of nodes with a prompt ledger and the words of a table of groups, without trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.prompt_ledger import PromptLedger
from deepspeed_gear.store.prompt_spec import Entry, EntryState, Left, PromptCount, PromptSpec
from deepspeed_gear.store.records import Control, Head, SlotRetention

ATTEMPTS = 2
WORKERS = (1, 2, 3)  # 0 is the rank
GATEWAY = 3  # its remote workers outlive it
COMMIT = [Slot.NUM_STEPS, Slot.NUM_ROWS]  # words of a slot without rows that `write` uses
STREAM = ("stream/train/position", "stream/train/consumed")


class Extents:
    """The slots of a store whose trajectories have no rows."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self.control = np.zeros(Control.NUM_WORDS, np.int64)

    def retire(self, slot: int) -> None:
        self.slots[slot, Slot.STATE] = SlotState.EVICTED

    def free(self, slot: int) -> None:
        self.slots[slot, Slot.STATE] = SlotState.FREE

    def reserve(self, num_rows: int, num_steps: int) -> int:
        free = np.nonzero(self.slots[:, Slot.STATE] == SlotState.FREE)[0]
        if not len(free):
            return -1
        self.slots[free[0], Slot.STATE] = SlotState.RESERVED
        return int(free[0])

    def note(self, slot: int) -> None: ...

    def rebuild(self) -> None: ...


class NodeStore:
    """A node's ledger, and the words of its table of groups, of `size` trajectories at most.

    Args:
        index, count: Which store of how many it is.
        batches: Room for groups, beyond those within the lag, in batches.
        outlives: Whether the store outlives its jobs.
        size: Most trajectories of a group.
        how: Options of `PromptSpec`.
    """

    def __init__(
        self,
        index: int,
        count: int,
        batches: int,
        outlives: bool = False,
        size: int = 1,
        **how: Any,
    ) -> None:
        how = {"seed": 0, "random_key": 0, "attempts": ATTEMPTS, "keep_bytes": 1, **how}
        how |= {"num_stores": count, "store": index, "is_kept": outlives}
        self.spec = PromptSpec("", "", 20, size=size, **how)
        room = max(-(-(self.spec.max_lag + batches) * self.spec.groups // count), self.spec.groups)
        room *= size
        self.alive = set(WORKERS)
        self.memory: Any = SimpleNamespace(peer=0, is_alive=lambda peer: peer in self.alive)
        self.views = {one.name: np.zeros(one.shape, one.dtype) for one in self.spec.regions()}
        self.position = np.zeros(Head.NUM_WORDS, np.int64)
        self.consumed = np.zeros(1, np.int64)
        self.slots = np.zeros((room, Slot.NUM_WORDS), np.int64)
        self.drawn = np.full(room, -1)
        self.retention = np.zeros((room, SlotRetention.NUM_WORDS), np.int64)
        self.numbers = np.zeros(room, np.int64)
        self.views |= dict(zip(STREAM, (self.position, self.consumed), strict=True))
        self.views |= {"slots": self.slots, "stream/train/last_drawn": self.drawn}
        self.views |= {"retention": self.retention, "group_counts": np.zeros(16, np.int64)}
        self.views |= {"groups": np.zeros((room, SlotGroup.NUM_WORDS), np.int64)}
        self.views |= {"group_sizes": np.zeros(room, np.int64)}
        self.views |= {"fill_claims": np.zeros((1, room + 1, 3), np.int64)}
        self.leaders: np.ndarray = self.views["groups"][:, SlotGroup.LEADER]
        self.completed: np.ndarray = self.views["groups"][:, SlotGroup.NUMBER]
        self.num_completed = 0  # ever
        self.seen: tuple[int, set[int]] = index, set()  # of `take_left`: the next number, open ones
        self.extents: Any = Extents(self.slots)
        given = self.spec, self.views, self.numbers, self.memory
        self.ledger = KeptLedger(*given, self.extents) if outlives else PromptLedger(*given)
        if self.ledger.masses is not None:
            self.ledger.masses.initialise()

    def owns(self, number: int) -> bool:
        return number % self.spec.num_stores == self.spec.store

    def slots_in(self, state: int) -> np.ndarray:
        return np.nonzero(self.slots[:, Slot.STATE] == state)[0]

    @property
    def following(self) -> int:
        """The number that the store issues next."""
        return int(self.ledger.counts[PromptCount.ISSUED]) * self.spec.num_stores + self.spec.store

    @property
    def open_numbers(self) -> set[int]:
        """The numbers that are issued and have not left."""
        entries = self.ledger.entries
        return set(entries[entries[:, Entry.STATE] != EntryState.FREE, Entry.NUMBER].tolist())

    def take_left(self) -> set[int]:
        """Return the numbers that have left since the last call, drawn or dropped."""
        issued = range(self.seen[0], self.following, self.spec.num_stores)
        before = self.seen[1]
        self.seen = self.following, self.open_numbers
        return before.union(issued) - self.seen[1]

    @property
    def complete(self) -> np.ndarray:
        """The leaders of groups."""
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] == slots + 1]

    @property
    def lacking(self) -> np.ndarray:
        """The slots of groups that lack a late column."""
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] == 0]

    def make_room(self, count: int = 1) -> bool:
        """Free the oldest retired trajectories that are not in training, one by one.

        Return whether so many slots are free.
        """
        while len(self.slots_in(SlotState.FREE)) < count:
            retired = self.slots_in(SlotState.EVICTED)
            retired = retired[self.drawn[retired] < self.consumed[0]]
            if not len(retired):
                return False
            self.extents.free(int(retired[self.slots[retired, Slot.ID].argmin()]))
        return True

    def write(
        self,
        slot: int,
        number: int,
        state: int,
        drawn: int,
        present: int,
        version: int,
        commit: tuple[int, int] = (0, 1),
    ) -> None:
        """Write a trajectory of a group that is not complete yet.

        Args:
            present: Whether it has its late column.
            commit: Which commit it is from, and how many trajectories that has; for `check_whole`.
        """
        control = self.extents.control
        self.slots[slot, Slot.ID] = (
            control[Control.NEXT_ID] * self.spec.num_stores + self.spec.store
        )
        self.slots[slot, Slot.STATE] = state
        self.slots[slot, COMMIT] = commit
        control[Control.NEXT_ID] += 1
        self.numbers[slot] = number
        self.drawn[slot] = drawn
        self.leaders[slot] = 0
        self.retention[slot, SlotRetention.PRESENT] = present
        self.retention[slot, SlotRetention.POLICY_VERSION] = version

    def complete_as(self, slot: int, place: int) -> None:
        """Complete the group of a slot as the `place`-th one ever."""
        used = np.nonzero(self.slots[:, Slot.STATE] == self.slots[slot, Slot.STATE])[0]
        slots = used[self.numbers[used] == self.numbers[slot]]
        leader = slots[self.slots[slots, Slot.ID].argmax()]
        self.leaders[slots] = leader + 1
        self.completed[leader] = place
        self.num_completed = max(self.num_completed, place)

    def update(self) -> list[int]:
        """Complete the groups that have their late column; return their numbers."""
        lacking = self.lacking
        has_column = self.retention[lacking, SlotRetention.PRESENT] > 0
        formed = list[int]()
        for number in dict.fromkeys(self.numbers[lacking].tolist()):
            is_own = self.numbers[lacking] == number
            if has_column[is_own].all():
                self.complete_as(int(lacking[is_own][0]), self.num_completed + 1)
                formed.append(number)
        return formed

    def leave(self, number: int, counter: int) -> None:
        """Let a held group leave the table."""
        held = self.slots_in(SlotState.COMMITTED)
        slots = held[self.numbers[held] == number]
        assert len(slots)
        is_drawn = counter == Left.DRAWN
        self.drawn[slots] = self.position[Head.NUMBER] - 1 if is_drawn else -1
        self.slots[slots, Slot.STATE] = SlotState.EVICTED if is_drawn else SlotState.FREE
        self.ledger.leave(np.array([number]), counter)

    def check_whole(self) -> None:
        """Check that each number in the table has all trajectories of one commit, and no others."""
        held = self.slots_in(SlotState.COMMITTED)
        for number in np.unique(self.numbers[held]):
            slots = held[self.numbers[held] == number]
            (words,) = {*map(tuple, self.slots[slots[:, None], COMMIT].tolist())}
            assert words[1] == len(slots), (number, words)

    def drop(self, selected: int) -> None:
        """Drop what is too old for the next batch."""
        slots = self.slots_in(SlotState.COMMITTED)
        self.slots[slots[self.ledger.too_old(slots, selected)], Slot.STATE] = SlotState.FREE

    def rows(self) -> list[tuple[Any, ...]]:
        """Return what a checkpoint has of the groups: those that wait, and those in training.

        As `write` takes them, number first; the last word is the place of a complete one with its
        leader, else 0.
        """
        places = self.completed * (self.leaders == np.arange(len(self.slots)) + 1)
        retention = self.retention[:, [SlotRetention.PRESENT, SlotRetention.POLICY_VERSION]]
        words = [self.numbers, self.slots[:, Slot.STATE], self.drawn, retention]
        columns = zip(np.column_stack(words), self.slots[:, COMMIT], places, strict=True)
        rows = [
            (*own.tolist(), tuple(commit.tolist()), int(place)) for own, commit, place in columns
        ]
        trained = int(self.consumed[0])
        return [
            row
            for row in rows
            if row[1] == SlotState.COMMITTED or (row[1] == SlotState.EVICTED and row[2] >= trained)
        ]


Each = Callable[[Callable[[Any], Any]], list[Any]]  # what a call returns for each store


def exchange(
    stores: Sequence[NodeStore], each: Each, progress: Callable[[Any], np.ndarray], draws: bool
) -> list[int]:
    """Make the exchanges of a selection, or of a question; return what may be drawn, in order.

    If it `draws`, and there is a batch, the stores know that it is drawn.
    """
    spec = stores[0].spec
    known = np.stack(each(progress))
    each(lambda store: store.ledger.take_progress(known))

    def record(store: NodeStore) -> tuple[int, int, np.ndarray]:
        slots = store.ledger.in_order(store.complete)
        due = store.ledger.due(slots) if spec.is_joint else np.empty(0, np.int64)
        return store.ledger.num_held, len(slots), due

    held, left, due = zip(*each(record), strict=True)
    may = [store.ledger.admits(np.stack(due)) for store in stores]
    assert len({*may}) == 1
    is_drawn = draws and may[0] and sum(left) >= spec.groups

    def take(store: NodeStore) -> None:
        store.ledger.note_others(sum(held) - held[store.spec.store], is_drawn)

    each(take)
    if not may[0]:
        return []
    own = each(lambda store: store.numbers[store.ledger.in_order(store.complete)])
    numbers = np.concatenate(own)
    if not spec.is_joint:
        return np.sort(numbers).tolist() if spec.order == "lease" else numbers.tolist()
    marks = np.concatenate(
        [store.ledger.marks(part) for store, part in zip(stores, own, strict=True)]
    )
    orders = [numbers[store.ledger.merged(numbers, marks)].tolist() for store in stores]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) >= spec.groups or not is_drawn
    return list(orders[0])

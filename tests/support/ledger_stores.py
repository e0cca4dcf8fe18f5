"""Stores of several nodes: prompt ledgers, and what they exchange, without processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.prompt_ledger import Entry, EntryState, PromptLedger, PromptSpec
from deepspeed_gear.store.records import Head

STREAM = ("stream/train/position", "stream/train/consumed")


class NodeStore:
    """The words of a node's table of groups, of one trajectory each; `workers` are processes that
    live.
    """

    ledger: PromptLedger

    def __init__(
        self, index: int, count: int, batches: int, workers: Collection[int], **how: Any
    ) -> None:
        how = {"seed": 0, "random_key": 0, **how}
        self.spec = PromptSpec("", "", 20, size=1, **how, num_stores=count, store=index)
        room = max(-(-(self.spec.max_lag + batches) * self.spec.groups // count), self.spec.groups)
        self.alive = set(workers)
        self.memory: Any = SimpleNamespace(peer=0, is_alive=lambda peer: peer in self.alive)
        self.views = {one.name: np.zeros(one.shape, one.dtype) for one in self.spec.regions()}
        self.position = np.zeros(Head.NUM_WORDS, np.int64)
        self.consumed = np.zeros(1, np.int64)
        self.slots = np.zeros((room, Slot.NUM_WORDS), np.int64)
        self.drawn = np.full(room, -1)
        self.views |= {"slots": self.slots, "stream/train/last_drawn": self.drawn}
        self.views |= dict(zip(STREAM, (self.position, self.consumed), strict=True))
        self.views["groups"] = np.zeros((room, SlotGroup.NUM_WORDS), np.int64)
        self.leaders: np.ndarray = self.views["groups"][:, SlotGroup.LEADER]
        self.completed: np.ndarray = self.views["groups"][:, SlotGroup.NUMBER]
        self.num_completed = 0  # ever
        self.numbers = np.zeros(room, np.int64)

    def owns(self, number: int) -> bool:
        return number % self.spec.num_stores == self.spec.store

    def slots_in(self, state: int) -> np.ndarray:
        return np.nonzero(self.slots[:, Slot.STATE] == state)[0]

    @property
    def open_numbers(self) -> set[int]:
        """The numbers that are issued and have not left."""
        return set(self.ledger.export()["prompt_entries"][:, Entry.NUMBER].tolist())

    @property
    def complete(self) -> np.ndarray:
        """The slots of groups with a leader."""
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] > 0]

    @property
    def lacking(self) -> np.ndarray:
        """The slots of groups that lack a late column."""
        return np.setdiff1d(self.slots_in(SlotState.COMMITTED), self.complete)

    def fill(self, slot: int) -> int:
        """Complete a group; return its number."""
        self.num_completed += 1
        self.leaders[slot] = slot + 1
        self.completed[slot] = self.num_completed
        return int(self.numbers[slot])

    def drop(self, selected: int) -> None:
        """Drop what is too old for the next batch."""
        slots = self.slots_in(SlotState.COMMITTED)
        self.slots[slots[self.ledger.too_old(slots, selected)], Slot.STATE] = SlotState.FREE


Each = Callable[[Callable[[Any], Any]], list[Any]]  # what a call returns for each store


def exchange(
    stores: Sequence[NodeStore],
    each: Each,
    progress: Callable[[Any], np.ndarray],
    draws: bool = True,
) -> list[int]:
    """Make the exchanges of a selection, or of a question; return the numbers that may be drawn, in
    order.

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


def check_due(stores: Sequence[NodeStore], selected: int) -> None:
    """Check that, of the entries of all stores, those that are due by a batch fit into those up to
    it.
    """
    entries = np.concatenate([store.ledger.export()["prompt_entries"] for store in stores])
    is_kept = (entries[:, Entry.STATE] == EntryState.RETURNED) & (entries[:, Entry.KEPT] > 1)
    counts = is_kept | np.isin(entries[:, Entry.STATE], (EntryState.LEASED, EntryState.HELD))
    spec = stores[0].spec
    due = entries[counts, Entry.VERSION] + spec.max_lag - selected
    assert all(
        (due <= after).sum() <= (after + 1) * spec.groups for after in range(spec.max_lag + 1)
    )
    assert (due >= 0).all()

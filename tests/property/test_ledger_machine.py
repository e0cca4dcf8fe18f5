"""Prompt ledgers of several stores under faults: batches in one order, within the lag, one account.

A `Machine` lets the workers and ranks of some nodes act in a random order, without processes:
leases of any length, failures, deaths, groups that are dropped, saves. `Resharding` loads its saves
on other numbers of stores; the stores of `Successors` outlive their jobs (`KeptLedger`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_support import check_epochs

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.prompt_ledger import LeaseRecord, PromptLedger, merge
from deepspeed_gear.store.prompt_spec import Entry, EntryState, Left, PromptCount, PromptSpec
from deepspeed_gear.store.records import Control, Head, SlotRetention

LEASE_S = 6.0
ATTEMPTS = 2
WORKERS = (1, 2, 3)  # 0 is the rank
GATEWAY = 3  # its remote workers outlive it
STREAM = ("stream/train/position", "stream/train/consumed")
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


# ---- the stores of nodes -------------------------------------------------------------------------


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
    """A node's ledger, and the words of its table of groups, of one trajectory each.

    Args:
        index, count: Which store of how many it is.
        batches: Room for groups, beyond those within the lag, in batches.
        outlives: Whether the store outlives its jobs.
        how: Options of `PromptSpec`.
    """

    def __init__(
        self, index: int, count: int, batches: int, outlives: bool = False, **how: Any
    ) -> None:
        how = {"seed": 0, "random_key": 0, "attempts": ATTEMPTS, "keep_bytes": 1, **how}
        how |= {"num_stores": count, "store": index, "members": int(outlives)}
        self.spec = PromptSpec("", "", 20, size=1, **how)
        room = max(-(-(self.spec.max_lag + batches) * self.spec.groups // count), self.spec.groups)
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
        self.views |= {"fill_claims": np.zeros((1, room + 1, 3), np.int64)}
        self.leaders: np.ndarray = self.views["groups"][:, SlotGroup.LEADER]
        self.completed: np.ndarray = self.views["groups"][:, SlotGroup.NUMBER]
        self.num_completed = 0  # ever
        self.seen: tuple[int, set[int]] = index, set()  # of `take_left`: the next number, open ones
        self.extents: Any = Extents(self.slots)
        given = self.spec, self.views, self.numbers, self.memory
        self.ledger = KeptLedger(*given, self.extents) if outlives else PromptLedger(*given)

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
        """The slots of groups with a leader."""
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] > 0]

    @property
    def lacking(self) -> np.ndarray:
        """The slots of groups that lack a late column."""
        return np.setdiff1d(self.slots_in(SlotState.COMMITTED), self.complete)

    def make_room(self) -> bool:
        """Free the oldest retired group that is not in training; return whether a slot is free."""
        retired = self.slots_in(SlotState.EVICTED)
        retired = retired[self.drawn[retired] < self.consumed[0]]
        if len(retired) and not len(self.slots_in(SlotState.FREE)):
            self.extents.free(int(retired[self.slots[retired, Slot.ID].argmin()]))
        return len(self.slots_in(SlotState.FREE)) > 0

    def write(
        self, slot: int, number: int, state: int, drawn: int, present: int, version: int
    ) -> None:
        """Write a group that is not complete yet; `present`: whether it has its late column."""
        control = self.extents.control
        self.slots[slot, Slot.ID] = (
            control[Control.NEXT_ID] * self.spec.num_stores + self.spec.store
        )
        self.slots[slot, Slot.STATE] = state
        control[Control.NEXT_ID] += 1
        self.numbers[slot] = number
        self.drawn[slot] = drawn
        self.leaders[slot] = 0
        self.retention[slot, SlotRetention.PRESENT] = present
        self.retention[slot, SlotRetention.POLICY_VERSION] = version

    def complete_as(self, slot: int, place: int) -> None:
        """Complete a group as the `place`-th one ever."""
        self.leaders[slot] = slot + 1
        self.completed[slot] = place
        self.num_completed = max(self.num_completed, place)

    def update(self) -> list[int]:
        """Complete the groups that have their late column; return their numbers."""
        lacking = self.lacking
        formed = lacking[self.retention[lacking, SlotRetention.PRESENT] > 0].tolist()
        for slot in formed:
            self.complete_as(slot, self.num_completed + 1)
        return self.numbers[formed].tolist()

    def leave(self, number: int, counter: int) -> None:
        """Let a held group leave the table."""
        held = self.slots_in(SlotState.COMMITTED)
        (slot,) = held[self.numbers[held] == number]
        is_drawn = counter == Left.DRAWN
        self.drawn[slot] = self.position[Head.NUMBER] - 1 if is_drawn else -1
        self.slots[slot, Slot.STATE] = SlotState.EVICTED if is_drawn else SlotState.FREE
        self.ledger.leave(np.array([number]), counter)

    def drop(self, selected: int) -> None:
        """Drop what is too old for the next batch."""
        slots = self.slots_in(SlotState.COMMITTED)
        self.slots[slots[self.ledger.too_old(slots, selected)], Slot.STATE] = SlotState.FREE

    def rows(self) -> list[tuple[int, ...]]:
        """Return what a checkpoint has of the groups: those that wait, and those in training.

        As `write` takes them, number first; the last word is the place of a complete one, else 0.
        """
        places = self.completed * (self.leaders > 0)
        retention = self.retention[:, [SlotRetention.PRESENT, SlotRetention.POLICY_VERSION]]
        words = [self.numbers, self.slots[:, Slot.STATE], self.drawn, retention, places]
        rows = map(tuple, np.column_stack(words).tolist())
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


# ---- workers, ranks and faults -------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint: what `merge` returned, and the groups of all stores, as of `NodeStore.rows`."""

    ledger: dict[str, np.ndarray]
    rows: list[tuple[int, ...]]
    trained: list[int]
    gone: set[int]
    selected: int
    num_trained: int

    @property
    def in_training(self) -> list[int]:
        return sorted({row[0] for row in self.rows if row[1] == SlotState.EVICTED})

    def seek(self, store: NodeStore) -> None:
        """Set the position of a store's stream."""
        store.position[Head.NUMBER] = self.selected
        store.consumed[:] = self.num_trained


class Machine:
    """Nodes, their workers and ranks, and what must be true of them."""

    BATCHES = 2  # of `NodeStore`
    OUTLIVES = False

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        self.seed = seed
        self.words = random.Random(seed)
        self.how = how
        self.groups: int = how["groups"]
        self.max_lag: int = how["max_lag"]
        self.by_lease = how["order"] == "lease"
        self.drops = how["late"] == "drop"
        self.races = False  # whether workers and ranks go on between the steps of an exchange
        self.now = 0.0
        self.held: list[tuple[float, NodeStore, LeaseRecord, int]] = []  # end, store, lease, worker
        self.trained: list[int] = []  # numbers of all batches
        self.gone: set[int] = set()  # dropped numbers
        self.saved: Saved | None = None
        self.counts = Counter[str]()  # of what has happened
        self.make(count)

    def make(self, count: int) -> None:
        self.stores = [self.store_of(index, count) for index in range(count)]

    def store_of(self, index: int, count: int) -> NodeStore:
        return NodeStore(index, count, self.BATCHES, self.OUTLIVES, **self.how)

    @property
    def selected(self) -> int:
        return min(int(store.position[Head.NUMBER]) for store in self.stores)

    @property
    def num_trained(self) -> int:
        return min(int(store.consumed[0]) for store in self.stores)

    def batch(self, number: int) -> int:
        """Return the batch of a number, if no further one is dropped."""
        return (number - sum(gone < number for gone in self.gone)) // self.groups

    # ---- workers

    def lease(self, store: NodeStore | None = None, count: int = 0) -> list[LeaseRecord]:
        store = store or self.words.choice(self.stores)
        self.note_dropped(store)
        worker = self.words.choice(WORKERS)
        store.memory.peer = worker
        store.alive.add(worker)
        leases = self.take(store, count or self.words.randint(1, 4))
        for lease in leases:
            assert store.owns(lease.number)
            assert lease.number not in self.gone
            assert 0 <= lease.version <= self.num_trained
            assert not self.by_lease or self.batch(lease.number) <= lease.version + self.max_lag
            if self.words.random() < 0.15:  # the next lease of the number will have this version
                store.ledger.keep(lease, b"k")
            length = self.words.lognormvariate(1.0, 1.2 if self.by_lease else 2.0)
            self.held.append((self.now + min(length, 200.0), store, lease, worker))
        return leases

    def take(self, store: NodeStore, count: int) -> list[LeaseRecord]:
        """Lease; sometimes a worker dies before it has counted the last number."""
        issued = int(store.ledger.counts[PromptCount.ISSUED])
        leases = store.ledger.lease(count)
        if store.ledger.counts[PromptCount.ISSUED] > issued and self.words.random() < 0.1:
            store.ledger.counts[PromptCount.ISSUED] -= 1
            store.ledger.recover(store.extents.retire)
        return leases

    def work(self) -> None:
        """Go on to the end of a lease."""
        if not self.held:
            return
        end = min(self.held, key=lambda one: one[0])
        self.held.remove(end)
        until, store, lease, store.memory.peer = end
        self.now = max(self.now, until)
        try:
            if self.words.random() < 0.12:
                reason = f"reason {lease.number % 40}"  # of more names than have a counter
                store.ledger.fail(lease, reason, retry=self.words.random() < 0.7)
            else:
                self.commit(store, lease)
        except LeaseExpiredError:
            self.counts["expired"] += 1
        self.note_dropped(store)

    def commit(self, store: NodeStore, lease: LeaseRecord) -> None:
        if not self.has_room(store):
            return
        slot = int(store.slots_in(SlotState.FREE)[0])
        present = self.has_column()
        with store.ledger.committing(lease, 1):
            store.write(slot, lease.number, SlotState.COMMITTED, -1, present, lease.version)
        self.completed(store)

    def has_room(self, store: NodeStore) -> bool:
        """Make room for a group; without any, its worker goes on until its lease has expired."""
        return store.make_room()

    def has_column(self) -> bool:
        """Return whether a group comes with its late column."""
        return not self.how["needs"]

    def completed(self, store: NodeStore) -> None:
        """See what groups have become complete."""

    def fill(self) -> None:
        """Fill the late column of a group, in any order."""
        lacking = [(store, slot) for store in self.stores for slot in store.lacking.tolist()]
        if lacking:
            store, slot = self.words.choice(lacking)
            store.retention[slot, SlotRetention.PRESENT] = 1
            self.completed(store)

    def die(self) -> None:
        store, worker = self.words.choice(self.stores), self.words.choice(WORKERS)
        store.alive.discard(worker)
        self.held = [
            one for one in self.held if one[1] is not store or one[3] != worker or worker == GATEWAY
        ]
        store.ledger.recover(store.extents.retire)
        self.note_dropped(store)

    def note_dropped(self, store: NodeStore) -> None:
        """Note the numbers that a store has issued and lost: neither open nor trained."""
        store.ledger.reclaim()
        self.gone |= store.take_left().difference(self.trained)

    # ---- ranks

    def each(self, call: Callable[[NodeStore], Any]) -> list[Any]:
        """Return what a call returns for each store, made in any order."""
        found = dict[int, Any]()
        for store in self.words.sample(self.stores, len(self.stores)):
            found[store.spec.store] = call(store)
            for _ in range(self.words.choice([0, 0, 1, 3]) if self.races else 0):
                self.words.choice(self.between())()
        return [found[index] for index in range(len(found))]

    def between(self) -> list[Callable[[], Any]]:
        """Return what may go on in an exchange."""
        return [self.lease, self.lease, self.work, self.work, self.fill, self.train]

    def agree(self, draws: bool) -> list[int]:
        """Make the exchanges of a selection, or of a question; return what a batch may have."""
        self.each(self.ask)
        return exchange(self.stores, self.each, self.progress, draws)

    def ask(self, store: NodeStore) -> None:
        """Drop what is too old, as a rank does that waits for a batch."""
        if self.drops:
            store.drop(self.selected)
        self.note_dropped(store)

    def progress(self, store: NodeStore) -> np.ndarray:
        return store.ledger.progress()

    def select(self) -> bool:
        """Select the next batch if its groups are there; a rank may be late with the one before."""
        batch = self.selected
        draws = self.num_trained >= batch - self.words.randint(0, 1)
        known = self.agree(draws)
        self.check_order(known)
        numbers = known[: self.groups]
        if len(numbers) < self.groups or not draws:
            return False
        self.trained += numbers

        def commit(store: NodeStore) -> None:
            store.position[Head.NUMBER] += 1
            for number in filter(store.owns, numbers):
                slot = store.complete[store.numbers[store.complete] == number][0]
                assert batch - store.retention[slot, SlotRetention.POLICY_VERSION] <= self.max_lag
                store.leave(number, Left.DRAWN)

        self.each(commit)
        before = {number for number in self.gone if number <= numbers[-1]}
        assert not self.by_lease or {*range(numbers[-1] + 1)} == {*self.trained} | before
        return True

    def check_order(self, known: list[int]) -> None:
        """Check the numbers that a batch may have, in order."""

    def train(self) -> None:
        """End the next batch on a node, or note on all that every rank has selected it."""
        store = self.words.choice(self.stores)
        if store.consumed[0] < self.selected and store.consumed[0] <= self.num_trained:
            store.consumed += 1
        is_known = store.ledger.counts[PromptCount.TRAINED] >= 0  # else none is, since a load
        if is_known and self.num_trained >= self.selected - 1:
            store.ledger.note_trained(self.selected - 1)

    def check(self) -> None:
        """Check that the books of all stores are one account."""
        for store in self.stores:
            store.update()
            self.note_dropped(store)
        books = [store.ledger.books.account() for store in self.stores]
        dropped = sum(sum(one["dropped"].values()) for one in books)
        sums = {name: sum(one[name] for one in books) for name in ("issued", *PARTS)}
        assert sums["issued"] == sum(sums[name] for name in PARTS) + dropped
        assert dropped == len(self.gone)
        assert sums["trained"] + sums["training"] == len(self.trained)
        assert [one["incomplete"] for one in books] == [len(store.lacking) for store in self.stores]
        assert min(one[name] for one in books for name in PARTS) >= 0
        assert max(one["largest_lag"] for one in books) <= self.max_lag
        check_epochs(books)
        if not (self.by_lease or self.drops):
            self.check_due()
        for store in self.stores:  # a number has one group, and a trajectory an id of its store
            used = store.slots[:, Slot.STATE] != SlotState.FREE
            assert used.sum() == len({*store.numbers[used].tolist()})
            ids = store.slots[used, Slot.ID]
            assert len(ids) == len({*ids.tolist()})
            assert (ids % len(self.stores) == store.spec.store).all()

    def check_due(self) -> None:
        """Check that what is due by a batch, of all stores, fits into the batches up to it."""
        entries = np.concatenate([store.ledger.export()["prompt_entries"] for store in self.stores])
        state = entries[:, Entry.STATE]
        is_kept = (state == EntryState.RETURNED) & (entries[:, Entry.KEPT] > 1)
        counts = is_kept | np.isin(state, (EntryState.LEASED, EntryState.HELD))
        due = entries[counts, Entry.VERSION] + self.max_lag - self.selected
        for after in range(self.max_lag + 1):
            assert (due <= after).sum() <= (after + 1) * self.groups
        assert (due >= 0).all()

    # ---- checkpoints

    def save(self) -> None:
        """Save the stores one after the other, while workers go on."""
        parts = dict[int, Any]()
        rows = list[tuple[int, ...]]()
        gone = set[int]()
        for store in self.words.sample(self.stores, len(self.stores)):
            self.note_dropped(store)
            parts[store.spec.store] = store.ledger.export()
            rows += store.rows()
            gone |= set(filter(store.owns, self.gone))
            for _ in range(self.words.randint(0, 4)):
                self.words.choice([self.lease, self.work])()
        ledger = merge([parts[index] for index in range(len(parts))])
        at = self.selected, self.num_trained
        self.saved = Saved(ledger, rows, list(self.trained), gone, *at)

    def load(self) -> None:
        """Go on with the latest save."""
        if self.saved is not None and self.restore(self.saved):
            self.counts["loads"] += 1

    def restore(self, saved: Saved) -> bool:
        raise NotImplementedError

    def finish(self, batches: int) -> None:
        """Generate without failures: the learner is never stuck."""
        for _ in range(batches):
            for _ in range(4):
                self.now += 1000.0
                for store in self.stores:
                    for lease in self.lease(store, 99):
                        self.commit(store, lease)
                    store.retention[:, SlotRetention.PRESENT] = 1
                    self.completed(store)
                while self.num_trained < self.selected:
                    self.train()
                if self.select():
                    break
            else:
                raise AssertionError("no batch can be selected")

    def rare(self, turn: int) -> list[Callable[[], Any]]:
        raise NotImplementedError

    def drive(self, turns: int) -> None:
        """Let workers and ranks go on, with faults, saves and loads; then without failures."""
        usual: list[Callable[[], Any]] = [self.lease] * 6 + [self.work] * 12 + [self.select] * 3
        usual += [self.train] * 2 * max(2, len(self.stores)) + [self.fill] * 8 * self.how["needs"]
        for turn in range(turns):
            self.words.choice(usual)()
            if turn % 16 == 15:
                self.words.choice(self.rare(turn // 16))()
            if turn % 5 == 0:
                self.check()
        self.finish(5)
        self.check()


class Resharding(Machine):
    """Stores of one job: its saves are loaded on any number of stores. Conditions reject groups."""

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        self.places: dict[int, int] = {}  # of complete groups as they were completed, by number
        self.saved_places: dict[int, int] = {}
        self.last = 0  # place at the latest agreement
        self.num_gone = 0  # at the latest agreement
        self.rejects = True
        super().__init__(seed, count, **how)

    def commit(self, store: NodeStore, lease: LeaseRecord) -> None:
        store.ledger.own(lease)  # before there is room for it
        super().commit(store, lease)

    def has_room(self, store: NodeStore) -> bool:
        while not store.make_room() and not len(store.slots_in(SlotState.COMMITTED)):
            self.train()  # all rows of the store are in training
        if not store.make_room():  # of other stores: more than this one would issue
            assert self.counts["loads"]
            self.counts["evicted"] += 1
            store.leave(int(store.numbers[store.slots_in(SlotState.COMMITTED)].min()), Left.EVICTED)
        return True

    def completed(self, store: NodeStore) -> None:
        """Reject some complete groups; one node rejects more than the others do."""
        for number in store.update():
            share = 0.9 if store.spec.store == self.seed % 2 else 0.1
            if self.rejects and self.words.random() < share:
                store.leave(number, Left.REJECTED)
        self.note_dropped(store)

    def between(self) -> list[Callable[[], Any]]:
        has_room = all(store.make_room() for store in self.stores)  # none is evicted in a selection
        works = [self.work, self.work] if has_room else []
        return [self.lease, self.lease, *works, self.fill, self.train]

    def agree(self, draws: bool) -> list[int]:
        self.last = max(self.places.values(), default=0)
        order = super().agree(draws)
        self.num_gone = len(self.gone)
        # None was completed since.
        assert not self.stores[0].spec.is_joint or {*order} <= {*self.places}
        return order

    def progress(self, store: NodeStore) -> np.ndarray:
        """Note what has been completed since the last agreement: after all that was, by turns."""
        words = super().progress(store)
        slots = store.complete.tolist() if store.spec.is_joint else []
        new = [slot for slot in slots if int(store.numbers[slot]) not in self.places]
        new.sort(key=lambda slot: store.completed[slot])
        self.places |= {int(store.numbers[slot]): self.last + 1 + at for at, slot in enumerate(new)}
        return words

    def select(self) -> bool:
        self.races = self.stores[0].spec.is_joint and self.words.random() < 0.5
        is_selected = super().select()
        self.races = False
        return is_selected

    def check_order(self, known: list[int]) -> None:
        if self.by_lease:
            lacking = np.concatenate([store.numbers[store.lacking] for store in self.stores])
            complete = np.concatenate([store.numbers[store.complete] for store in self.stores])
            first = lacking.min(initial=1 << 40)
            assert max(known, default=-1) < first
            self.counts["waits"] += int(first < complete.max(initial=-1))
        elif len(self.stores) > 1 and not self.races:
            assert known == self.order_of_one()
            is_enough = sum(len(store.complete) for store in self.stores) >= self.groups
            self.counts["waits"] += not known and is_enough
            places = [self.places[number] for number in known]
            self.counts["first"] += places != sorted(places)

    def order_of_one(self) -> list[int]:
        """Return what a batch may have by a ledger of one store that has all, in order."""
        whole = self.store_of(0, 1)
        entries = np.concatenate([store.ledger.export()["prompt_entries"] for store in self.stores])
        whole.ledger.entries[: len(entries)] = entries
        whole.position[Head.NUMBER] = self.selected
        groups = [
            (store, slot)
            for store in self.stores
            for slot in store.slots_in(SlotState.COMMITTED).tolist()
        ]
        for at, (store, slot) in enumerate(groups):
            number = int(store.numbers[slot])
            whole.write(at, number, SlotState.COMMITTED, -1, 0, 0)
            if store.leaders[slot]:
                whole.complete_as(at, self.places[number] * 100_000 + number)
        return [int(number) for number in whole.numbers[whole.ledger.in_order(whole.complete)]]

    def check_admission(self) -> None:
        """Lease all that is admitted; drops of others after the first open number are not known."""
        self.agree(draws=False)
        first = min(int(store.ledger.progress()[0]) for store in self.stores)
        for store in self.stores:
            while self.lease(store, 9):
                pass
            following = store.following
            is_known = all(store.owns(n) for n in self.gone if first <= n < following)
            if not self.by_lease:
                is_known = len(self.gone) == self.num_gone
            used = store.ledger.books.num_in_training + len(store.open_numbers)
            if is_known and used < len(store.slots):
                gone = [n for n in self.gone if not self.by_lease or n < following]
                assert (following - len(gone)) // self.groups > self.num_trained + self.max_lag
                self.counts["exact"] += 1

    def save(self) -> None:
        self.saved_places = dict(self.places)
        super().save()

    def restore(self, saved: Saved) -> bool:
        """Load a save on any number of stores, unless their tables are too small."""
        before = self.stores
        self.make(self.words.randint(1, 3))
        owned = [[row for row in saved.rows if store.owns(row[0])] for store in self.stores]
        if any(len(own) > len(store.slots) for own, store in zip(owned, self.stores, strict=True)):
            self.stores = before
            return False
        self.held = []
        self.trained = list(saved.trained)
        self.gone = set(saved.gone)
        waiting = {row[0] for row in saved.rows if row[1] == SlotState.COMMITTED}
        self.places = {n: place for n, place in self.saved_places.items() if n in waiting}
        drawn = saved.in_training
        for store, own in zip(self.stores, owned, strict=True):
            for slot, (*words, place) in enumerate(own):
                store.write(slot, *words)
                if place:
                    store.complete_as(slot, place)
            store.ledger.restore(saved.ledger, drawn)
            # Nothing is leased before the stores have agreed.
            assert len(self.stores) == 1 or not store.ledger.lease(9)
            saved.seek(store)
        self.agree(draws=False)
        return True

    def finish(self, batches: int) -> None:
        self.rejects = False
        super().finish(batches)

    def rare(self, turn: int) -> list[Callable[[], Any]]:
        loads = [self.load] if self.seed % 4 > 1 else []  # without one nothing is evicted
        return [self.die, self.save, self.save, self.check_admission, *loads]


class Successors(Machine):
    """Jobs, one after the other, in stores that outlive them; half of the groups lack a column."""

    BATCHES = 5
    OUTLIVES = True

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        super().__init__(seed, count, **{**how, "needs": True})
        self.races = count > 1
        self.agree(draws=False)

    def take(self, store: NodeStore, count: int) -> list[LeaseRecord]:
        """Lease, and count what is held instead; some of it is older than a lease would be."""
        before = store.slots_in(SlotState.COMMITTED)
        version = store.ledger.books.version
        leases = super().take(store, count)
        found = np.setdiff1d(store.slots_in(SlotState.COMMITTED), before)
        self.counts["found"] += len(found)
        versions = store.retention[found, SlotRetention.POLICY_VERSION]
        self.counts["older"] += int((versions < version).sum())
        return leases

    def commit(self, store: NodeStore, lease: LeaseRecord) -> None:
        committed = len(store.slots_in(SlotState.COMMITTED))
        if not store.make_room():
            return
        super().commit(store, lease)
        self.counts["from before"] += len(store.slots_in(SlotState.COMMITTED)) == committed
        if self.words.random() < 0.2:  # the answer was lost
            with pytest.raises(LeaseExpiredError), store.ledger.committing(lease, 1):
                pass

    def has_column(self) -> bool:
        return self.words.random() < 0.5

    def ask(self, store: NodeStore) -> None:
        """Hold what is found, and drop what is too old, as a rank does that waits for a batch."""
        store.memory.peer = 0
        store.update()
        self.take(store, 0)
        store.update()
        super().ask(store)

    def progress(self, store: NodeStore) -> np.ndarray:
        self.ask(store)
        return super().progress(store)

    def restart(self) -> None:
        """Begin a job at number 0 in the stores; one of them may be lost with its workers."""
        for index, store in enumerate(self.stores):
            if self.words.random() < 0.3:
                self.lose(index)
            store = self.stores[index]
            store.drawn[:] = -1
            store.ledger.begin(STREAM)
            store.seen = index, set()
        self.trained = []
        self.gone = set()
        self.begin()

    def lose(self, index: int) -> None:
        """Replace a store by an empty one, to which the leases of remote workers go."""
        lost = self.stores[index]
        new = self.stores[index] = self.store_of(index, len(self.stores))
        held = [one for one in self.held if one[1] is not lost or one[3] == GATEWAY]
        self.held = [(end, new if of is lost else of, *more) for end, of, *more in held]
        self.counts["lost"] += 1

    def begin(self) -> None:
        """Agree for the first time: nothing is leased before. What is found has any version."""
        for store in self.stores:
            for slot in store.slots_in(SlotState.EVICTED).tolist():
                if store.drawn[slot] < 0 and self.words.random() < 0.5:
                    oldest = self.selected - self.max_lag - 1
                    version = max(self.words.randint(oldest, self.selected + 1), 0)
                    store.retention[slot, SlotRetention.POLICY_VERSION] = version
            self.ask(store)
            assert len(self.stores) == 1 or not self.lease(store)
        if self.words.random() < 0.5:
            self.work()  # of the job before
        self.agree(draws=False)

    def restore(self, saved: Saved) -> bool:
        """Load a save into the stores, whose other groups may be found again."""
        self.trained = list(saved.trained)
        self.gone = set(saved.gone)
        drawn = saved.in_training
        for store in self.stores:
            own = [row[:-1] for row in saved.rows if store.owns(row[0])]
            saved.seek(store)
            store.drawn[:] = -1
            store.ledger.begin()
            records = np.zeros((len(own), Slot.NUM_WORDS), np.int64)
            placed, _ = store.ledger.place(records, saved.ledger)
            for slot, row in zip(placed.tolist(), own, strict=True):
                store.write(slot, *row)
            store.ledger.restore(saved.ledger, drawn)
            saved.seek(store)
            store.seen = store.following, store.open_numbers
            self.ask(store)
        self.begin()
        return True

    def rare(self, turn: int) -> list[Callable[[], Any]]:
        rare = [self.save], [self.die, self.check], [self.load, self.load, self.restart]
        return rare[turn % 3]


# ---- the tests -----------------------------------------------------------------------------------


def driven(
    kind: type[Machine], count: int, turns: int, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> Counter[str]:
    """Drive four machines; return how often what happened in all of them."""
    counts = Counter[str]()
    how["lease_s"] = LEASE_S if how["order"] == "lease" else 300.0  # slow ones are to be due
    for seed in range(4):
        machine = kind(100 * count + seed, count, **how, needs=seed % 2 > 0)
        clock = SimpleNamespace(monotonic_ns=lambda machine=machine: int(machine.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        machine.drive(turns)
        assert len(machine.trained) == len({*machine.trained} - machine.gone)
        assert machine.trained == sorted(machine.trained) or not machine.by_lease
        dropped = [store.ledger.books.account()["dropped"] for store in machine.stores]
        counts["too old"] += sum(one.get("too old", 0) for one in dropped)
        counts += machine.counts
    return counts


CASES = [  # groups, max_lag, order, late
    (1, 0, "lease", "wait"),
    (4, 1, "lease", "wait"),
    (5, 3, "lease", "wait"),
    (5, 3, "completion", "wait"),
    (5, 3, "completion", "drop"),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("groups", "max_lag", "order", "late"), [*CASES, (7, 0, "lease", "wait")])
def test_stores_share_an_order_a_lag_and_an_account(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"groups": groups, "max_lag": max_lag, "order": order, "late": late}
    counts = driven(Resharding, count, 500 if order == "lease" else 850, monkeypatch, **how)
    assert min(counts["exact"], counts["loads"]) > 0, counts
    assert counts["expired"] > 0 or groups == 1, counts
    assert counts["waits"] > 0 or groups == 1 or late == "drop", counts
    assert counts["first"] > 0 or order == "lease", counts
    assert (counts["too old"] > 0) == (late == "drop"), counts


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "max_lag", "order", "late"), [*CASES, (4, 1, "completion", "wait")]
)
def test_jobs_go_on_in_the_stores_of_those_before(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"groups": groups, "max_lag": max_lag, "order": order, "late": late}
    counts = driven(Successors, count, 450, monkeypatch, **how)
    names = ["expired", "found", "from before", "lost", "loads"]
    if order == "completion" and max_lag == 3:  # elsewhere few are older than a lease
        names.append("older")
    assert min(counts[name] for name in names) > 0 or groups == 1, counts


def agree(stores: Sequence[NodeStore], known: Sequence[np.ndarray]) -> None:
    """Let stores take what all of them have told."""
    for store in stores:
        store.ledger.take_progress(np.stack(known))


def test_a_store_that_is_told_late_leases_nothing_for_a_batch_that_is_full() -> None:
    """What one store knows to be trained, the others know before that store's groups are drawn."""
    how = {"groups": 2, "max_lag": 1, "order": "completion", "late": "wait", "lease_s": LEASE_S}
    one, other = stores = [NodeStore(index, 2, 2, **how) for index in range(2)]
    for store in stores:
        store.memory.peer = WORKERS[0]

    def commit(store: NodeStore, leases: list[LeaseRecord]) -> list[int]:
        for lease in leases:
            slot = int(store.slots_in(SlotState.FREE)[0])
            with store.ledger.committing(lease, 1):
                store.write(slot, lease.number, SlotState.COMMITTED, -1, 1, lease.version)
            store.update()
        return [lease.number for lease in leases]

    agree(stores, [store.ledger.progress() for store in stores])
    slow = one.ledger.lease(2)
    assert (commit(one, slow[:1]), commit(other, other.ledger.lease(1))) == ([0], [1])
    for number, store in enumerate(stores):
        store.position[Head.NUMBER] = 1
        store.leave(number, Left.DRAWN)
    of_other = other.ledger.progress()  # and then the batch ends
    for store in stores:
        store.consumed += 1
    one.ledger.note_trained(1)
    assert commit(one, slow[1:] + one.ledger.lease(1)) == [2, 4]
    agree(stores, [one.ledger.progress(), of_other])
    slots = [store.ledger.in_order(store.complete) for store in stores]
    due = np.stack([store.ledger.due(at) for store, at in zip(stores, slots, strict=True)])
    assert one.ledger.admits(due)
    assert one.numbers[slots[0]].tolist() == [2, 4]  # batch 1
    assert [(lease.number, lease.version) for lease in other.ledger.lease(1)] == [(3, 1)]


@pytest.mark.parametrize("case", ["shares", "an exchange", "more are trained", "too old", "begun"])
def test_stores_divide_what_may_be_older_than_a_lease(case: str) -> None:
    """Two stores have groups of version 0, of which two fit into the next batch."""
    how = {"groups": 2, "max_lag": 2, "order": "completion", "late": "wait", "lease_s": 1.0}
    stores = [NodeStore(index, 2, 5, outlives=True, needs=True, **how) for index in range(2)]
    selected = 3 if case == "too old" else 2
    for store in stores:
        store.position[Head.NUMBER] = selected
        store.consumed[:] = 1 if case == "more are trained" else 2
        for number in range(2 * selected + store.spec.store, 2 * selected + 6, 2):
            store.write(number // 2, number, SlotState.EVICTED, -1, 1, 0)
        store.ledger.counts[PromptCount.ISSUED] = selected
        store.views["prompt_left"][0, Left.DRAWN] = selected
        store.views["life_words"][1] = 99
        if case == "begun":
            store.ledger.begin()
    agree(stores, [store.ledger.progress() for store in stores])
    if case == "begun":  # nothing is leased before the second exchange
        assert not any(store.ledger.lease(1) for store in stores)

    def each(call: Callable[[NodeStore], Any]) -> list[Any]:
        return [call(store) for store in stores]

    exchange(stores, each, lambda store: store.ledger.progress(), False)
    for store in stores:
        if case == "an exchange":
            store.ledger.progress()
        elif case == "more are trained":
            store.ledger.note_trained(2)
        store.ledger.update()
        assert len(store.slots_in(SlotState.COMMITTED)) == (case == "shares")
        assert len(store.ledger.lease(1)) == 1  # by a worker: never waits

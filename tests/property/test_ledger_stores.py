"""Prompt ledgers of several stores: batches in one order, within the lag, and one account."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_stores import NodeStore, check_due, exchange
from ledger_support import check_epochs

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.leases import LeaseRecord
from deepspeed_gear.store.prompt_books import books_of
from deepspeed_gear.store.prompt_ledger import (
    Left,
    PromptCount,
    PromptLedger,
    merge,
)
from deepspeed_gear.store.records import Head

LEASE_S = 6.0
ATTEMPTS = 2
WORKERS = 3
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


class Store(NodeStore):
    """A node's ledger, and the groups of its table."""

    def __init__(self, index: int, count: int, **how: Any) -> None:
        how = {"lease_s": LEASE_S, "attempts": ATTEMPTS, "keep_bytes": 1, **how}
        super().__init__(
            index, count, 2, range(WORKERS), **how
        )  # as little room as a config may give
        self.ledger = PromptLedger(self.spec, self.views, self.numbers, self.memory)

    def put(
        self, number: int, state: int = SlotState.COMMITTED, key: int = -1, completed: int = 0
    ) -> int:
        """Write a group; `completed`: complete groups ever, up to it, or 0: it lacks a
        late column.
        """
        slot = int(self.slots_in(SlotState.FREE)[0])
        self.numbers[slot] = number
        self.slots[slot, Slot.STATE] = state
        self.drawn[slot] = key
        self.leaders[slot] = (slot + 1) * (completed > 0)
        self.completed[slot] = completed
        self.num_completed = max(self.num_completed, completed)
        return slot

    def leave(self, number: int, counter: int) -> None:
        """Let a held group leave the table."""
        slot = [slot for slot in self.slots_in(SlotState.COMMITTED) if self.numbers[slot] == number]
        is_drawn = counter == Left.DRAWN
        self.slots[slot, Slot.STATE] = SlotState.EVICTED if is_drawn else SlotState.FREE
        self.drawn[slot] = self.position[Head.NUMBER] - 1
        self.ledger.leave(np.array([number]), counter)

    def train(self) -> None:
        """End the next batch on this node."""
        self.consumed += 1
        slots = self.slots_in(SlotState.EVICTED)
        self.slots[slots[self.drawn[slots] < self.consumed[0]], Slot.STATE] = SlotState.FREE


class Run:
    """Nodes, their workers, and what must be true of them."""

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        self.words = random.Random(seed)
        self.seed = seed
        self.how = how
        self.groups = how["groups"]
        self.max_lag = how["max_lag"]
        self.needs = how["needs"]
        self.by_lease = how["order"] == "lease"
        self.drops = how["late"] == "drop"
        self.places: dict[int, int] = {}  # of complete groups in the order of completion, by number
        # place, and dropped numbers, of the latest agreement
        self.last = 0
        self.num_gone = 0
        self.now = 0.0
        self.saved = None
        self.held: list[tuple[float, Store, LeaseRecord, int]] = []  # end, store, lease, worker
        self.versions: dict[int, int] = {}  # of the latest lease of each number
        self.trained: list[int] = []  # numbers of all batches
        self.gone: set[int] = set()  # dropped numbers
        self.counts = dict.fromkeys(("expired", "loads", "exact", "evicted", "waits", "first"), 0)
        self.make(count)

    def make(self, count: int) -> None:
        self.stores = [Store(index, count, **self.how) for index in range(count)]

    @property
    def selected(self) -> int:
        return min(int(store.position[Head.NUMBER]) for store in self.stores)

    @property
    def num_trained(self) -> int:
        return min(int(store.consumed[0]) for store in self.stores)

    def batch(self, number: int) -> int:
        """Return the batch of a number, if no further one is dropped."""
        return (number - sum(gone < number for gone in self.gone)) // self.groups

    # ---- workers -------------------------------------------------------------------------------

    def lease(self, store: Store | None = None, count: int = 0) -> list[LeaseRecord]:
        self.reclaim()
        store = store or self.words.choice(self.stores)
        store.memory.peer = worker = self.words.randrange(WORKERS)
        store.alive.add(worker)
        issued = int(store.ledger.counts[PromptCount.ISSUED])
        leases = store.ledger.lease(count or self.words.randint(1, 4))
        if store.ledger.counts[PromptCount.ISSUED] > issued and self.words.random() < 0.1:
            store.ledger.counts[PromptCount.ISSUED] -= 1  # as after a death
            store.ledger.recover(lambda _: None)
        for lease in leases:
            assert store.owns(lease.number)
            assert lease.number not in self.gone
            assert 0 <= lease.version <= self.num_trained
            assert not self.by_lease or self.batch(lease.number) <= lease.version + self.max_lag
            self.versions[lease.number] = lease.version
            if self.words.random() < 0.2:  # the next lease of the number will have this version
                store.ledger.keep(lease, b"k")
            length = min(self.words.lognormvariate(1.0, 1.2 if self.by_lease else 2.0), 200.0)
            self.held.append((self.now + length, store, lease, worker))
        return leases

    def work(self) -> None:
        """Go on to the end of a lease."""
        if not self.held:
            return
        end = min(self.held, key=lambda one: one[0])
        self.held.remove(end)
        self.now, (_, store, lease, worker) = max(self.now, end[0]), end
        chance = self.words.random()
        number = lease.number
        store.memory.peer = worker
        try:
            if chance < 0.15:
                store.ledger.fail(lease, f"reason {number % 40}", retry=chance < 0.1)
                if chance >= 0.1 or lease.attempt == ATTEMPTS:
                    self.gone.add(number)
                return
            self.commit(store, lease)
        except LeaseExpiredError:
            self.counts["expired"] += 1
            return
        if not self.needs:
            self.reject(store, number)
        elif chance > 0.95:
            self.die(store, worker)

    def reject(self, store: Store, number: int) -> None:
        """Let the conditions of groups reject a complete one; one node rejects more than the others
        do.
        """
        if self.words.random() < 0.1 + 0.8 * (store.spec.store == self.seed % 2):
            store.leave(number, Left.REJECTED)
            self.gone.add(number)

    def commit(self, store: Store, lease: LeaseRecord) -> None:
        store.ledger.own(lease)
        while not len(store.slots_in(SlotState.FREE)) and not len(
            store.slots_in(SlotState.COMMITTED)
        ):
            self.train()  # all rows of the store are in training
        if not len(
            store.slots_in(SlotState.FREE)
        ):  # of other stores: more than this one would issue
            assert self.counts["loads"]
            self.counts["evicted"] += 1
            oldest = int(store.numbers[store.slots_in(SlotState.COMMITTED)].min())
            store.leave(oldest, Left.EVICTED)
            self.gone.add(oldest)
        slot = store.put(lease.number)
        with store.ledger.committing(lease, 1):
            pass
        if not self.needs:
            store.fill(slot)

    def fill(self) -> None:
        """Fill the late column of a group, in any order."""
        lacking = [(store, slot) for store in self.stores for slot in store.lacking.tolist()]
        if lacking:
            store, slot = self.words.choice(lacking)
            self.reject(store, store.fill(slot))

    def die(self, store: Store | None = None, worker: int | None = None) -> None:
        store = store or self.words.choice(self.stores)
        worker = self.words.randrange(WORKERS) if worker is None else worker
        store.alive.discard(worker)
        self.reclaim()
        self.held = [one for one in self.held if one[1] is not store or one[3] != worker]

    def reclaim(self) -> None:
        """Let leases come back; some are dropped."""
        for store in self.stores:
            before = store.open_numbers
            store.ledger.reclaim()
            self.gone |= before - store.open_numbers

    # ---- ranks -----------------------------------------------------------------------------------

    def each(self, call: Callable[[Store], Any], races: bool = False) -> list[Any]:
        """Return what a call returns for each store, made in any order; in `races` others go on
        between.
        """
        found = dict[int, Any]()
        for store in self.words.sample(self.stores, len(self.stores)):
            found[store.spec.store] = call(store)
            for _ in range(races * self.words.randint(0, 3)):
                # None is evicted in a selection.
                has_room = all(len(one.slots_in(SlotState.FREE)) for one in self.stores)
                works = [self.work, self.work] if has_room else []
                self.words.choice([self.lease, self.lease, *works, self.fill, self.train])()
        return [found[index] for index in range(len(found))]

    def agree(self, races: bool = False) -> list[int]:
        """Make the exchanges that begin a selection; return the numbers that a batch may have, in
        order.
        """
        if self.drops:
            self.each(self.drop, races)
        self.last = max(self.places.values(), default=0)
        order = exchange(self.stores, partial(self.each, races=races), self.progress)
        self.num_gone = len(self.gone)
        assert not self.stores[0].spec.is_joint or {*order} <= {
            *self.places
        }  # none was completed since
        return order

    def progress(self, store: Store) -> np.ndarray:
        """What has been completed since the last agreement comes after all that was, by turns of
        stores.
        """
        words = store.ledger.progress()
        slots = store.complete.tolist() if store.spec.is_joint else []
        new = [slot for slot in slots if int(store.numbers[slot]) not in self.places]
        new.sort(key=lambda slot: store.completed[slot])
        self.places |= {int(store.numbers[slot]): self.last + 1 + at for at, slot in enumerate(new)}
        return words

    def drop(self, store: Store) -> None:
        before = store.open_numbers
        store.drop(self.selected)
        self.gone |= before - store.open_numbers

    def order_of_one(self) -> list[int]:
        """Return the numbers that a batch may have, in order, by a ledger of one store that has
        all.
        """
        whole = Store(0, 1, **self.how)
        entries = np.concatenate([store.ledger.export()["prompt_entries"] for store in self.stores])
        whole.ledger.entries[: len(entries)] = entries
        whole.position[Head.NUMBER] = self.selected
        for store in self.stores:
            for slot in store.slots_in(SlotState.COMMITTED).tolist():
                number = int(store.numbers[slot])
                place = self.places[number] * 100_000 + number if store.leaders[slot] else 0
                whole.put(number, completed=place)
        return [int(number) for number in whole.numbers[whole.ledger.in_order(whole.complete)]]

    def select(self) -> bool:
        """Select the next batch if its groups are there; a rank may be late with the one before."""
        races = self.stores[0].spec.is_joint and self.words.random() < 0.5
        known = self.agree(races)
        batch = self.selected
        if self.by_lease:
            lacking = [
                number for store in self.stores for number in store.numbers[store.lacking].tolist()
            ]
            assert max(known, default=-1) < min(lacking, default=1 << 40)
            complete = max(
                int(store.numbers[store.complete].max(initial=-1)) for store in self.stores
            )
            self.counts["waits"] += min(lacking, default=complete) < complete
        elif len(self.stores) > 1 and not races:
            assert known == self.order_of_one()
            self.counts["waits"] += (
                not known and sum(len(one.complete) for one in self.stores) >= self.groups
            )
            places = [self.places[number] for number in known]
            self.counts["first"] += places != sorted(places)
        numbers = known[: self.groups]
        if len(numbers) < self.groups or self.num_trained < batch - self.words.randint(0, 1):
            return False

        def commit(store: Store) -> None:
            store.position[Head.NUMBER] += 1
            for number in filter(store.owns, numbers):
                store.leave(number, Left.DRAWN)

        self.each(commit, races)
        self.trained += numbers
        assert max(batch - self.versions[number] for number in numbers) <= self.max_lag
        if self.by_lease:
            assert set(range(numbers[-1] + 1)) == {*self.trained} | {
                n for n in self.gone if n <= numbers[-1]
            }
        return True

    def train(self) -> None:
        """End the next batch on a node, or note on all that every rank has selected it."""
        store = self.words.choice(self.stores)
        if store.consumed[0] < self.selected and store.consumed[0] <= self.num_trained:
            store.train()
        if self.num_trained >= self.selected - 1:
            store.ledger.note_trained(self.selected - 1)

    def check(self) -> None:
        """Check that the books of all stores are one account."""
        books = [books_of(store.ledger) for store in self.stores]
        dropped = sum(sum(one["dropped"].values()) for one in books)
        sums = {name: sum(one[name] for one in books) for name in ("issued", *PARTS)}
        assert sums["issued"] == sum(sums[name] for name in PARTS) + dropped
        assert dropped == len(self.gone)
        assert [one["incomplete"] for one in books] == [len(store.lacking) for store in self.stores]
        assert min(one[name] for one in books for name in PARTS) >= 0
        assert sums["trained"] + sums["training"] == len(self.trained)
        assert max(one["largest_lag"] for one in books) <= self.max_lag
        check_epochs(books)
        if not (self.by_lease or self.drops):  # all that is due by a batch fits into those up to it
            check_due(self.stores, self.selected)

    def check_admission(self) -> None:
        """Lease all that is admitted; drops of others after the first open number are not known."""
        self.agree()
        first = min(int(store.ledger.progress()[0]) for store in self.stores)
        for store in self.stores:
            while self.lease(store, 9):
                pass
            following = (
                int(store.ledger.counts[PromptCount.ISSUED]) * len(self.stores) + store.spec.store
            )
            is_known = all(store.owns(n) for n in self.gone if first <= n < following)
            if not self.by_lease:
                is_known = len(self.gone) == self.num_gone
            used = len(store.slots_in(SlotState.EVICTED)) + len(store.open_numbers)
            if is_known and used < len(store.slots):
                gone = [n for n in self.gone if not self.by_lease or n < following]
                assert (following - len(gone)) // self.groups > self.num_trained + self.max_lag
                self.counts["exact"] += 1

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Save the stores one after the other, while workers go on."""
        parts = dict[int, Any]()
        rows = list[tuple[int, int, int, int]]()
        gone = set[int]()
        count = len(self.stores)
        for store in self.words.sample(self.stores, count):
            parts[store.spec.store] = store.ledger.export()
            for state in (SlotState.COMMITTED, SlotState.EVICTED):
                for at in store.slots_in(state):
                    completed = int(store.completed[at] * (store.leaders[at] > 0))
                    rows.append((int(store.numbers[at]), state, int(store.drawn[at]), completed))
            gone |= set(filter(store.owns, self.gone))
            for _ in range(self.words.randint(0, 4)):
                self.words.choice([self.lease, self.work])()
        at = self.selected, self.num_trained
        rows = [row for row in rows if row[1] == SlotState.COMMITTED or row[2] >= at[1]]
        held = {number for number, state, *_ in rows if state == SlotState.COMMITTED}
        places = {number: place for number, place in self.places.items() if number in held}
        ledger = merge([parts[index] for index in range(count)])
        self.saved = ledger, rows, list(self.trained), gone, at, places

    def load(self) -> None:
        """Go on with a save on any number of stores, unless their tables are too small."""
        if self.saved is None:
            return
        (ledger, rows, trained, gone, at, places) = self.saved
        before = self.stores
        self.make(self.words.randint(1, 3))
        owned = [[row for row in rows if store.owns(row[0])] for store in self.stores]
        if any(len(own) > len(store.slots) for own, store in zip(owned, self.stores, strict=True)):
            self.stores = before
            return
        self.held = []
        self.trained = list(trained)
        self.gone = set(gone)
        self.places = dict(places)
        self.last = max(places.values(), default=0)
        drawn = sorted({number for number, state, *_ in rows if state == SlotState.EVICTED})
        for store, own in zip(self.stores, owned, strict=True):
            for row in own:
                store.put(*row)
            store.ledger.restore(ledger, drawn)
            assert len(self.stores) == 1 or not store.ledger.lease(
                9
            )  # before the stores have agreed
            store.position[Head.NUMBER], store.consumed[:] = at
        self.agree()
        self.counts["loads"] += 1

    def finish(self, batches: int) -> None:
        """Generate without failures: the learner is never stuck."""
        for _ in range(batches):
            for _ in range(4):
                self.now += 1000.0
                for store in self.stores:
                    for lease in self.lease(store, 99):
                        self.commit(store, lease)
                    for slot in store.lacking.tolist():
                        store.fill(slot)
                while self.num_trained < self.selected:
                    self.train()
                if self.select():
                    break
            else:
                raise AssertionError("no batch can be selected")


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "max_lag", "order", "late"),
    [
        (1, 0, "lease", "wait"),
        (4, 1, "lease", "wait"),
        (7, 0, "lease", "wait"),
        (5, 3, "lease", "wait"),
        (5, 3, "completion", "wait"),
        (5, 3, "completion", "drop"),
    ],
)
def test_stores_share_an_order_a_lag_and_an_account(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = dict.fromkeys(("exact", "waits", "first", "too old"), 0)
    for seed in range(4):
        how = {
            "groups": groups,
            "max_lag": max_lag,
            "order": order,
            "late": late,
            "needs": seed % 2 > 0,
        }
        how["lease_s"] = LEASE_S if order == "lease" else 300.0  # slow ones are to be due
        run = Run(100 * count + seed, count, **how)
        clock = SimpleNamespace(monotonic_ns=lambda run=run: int(run.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        for turn in range(600 if order == "lease" else 1000):
            works = [run.work] * 12 + [run.fill] * (8 * run.needs)
            run.words.choice([run.lease] * 6 + works + [run.select] * 2 + [run.train] * 4)()
            if turn % 15 == 14:
                loads = (
                    [run.load] if seed > 1 else []
                )  # without one, a table never evicts what waits
                run.words.choice([run.die, run.save, run.save, run.check_admission, *loads])()
            if turn % 5 == 0:
                run.check()
        run.finish(5)
        run.check()
        assert not run.gone & {*run.trained}
        assert len(run.trained) == len({*run.trained})
        assert run.trained == sorted(run.trained) or not run.by_lease
        dropped = sum(books_of(store.ledger)["dropped"].get("too old", 0) for store in run.stores)
        sums = {name: sums[name] + run.counts.get(name, dropped) for name in sums}
    assert sums["exact"] > 0
    assert sums["waits"] > 0 or groups == 1 or late == "drop"
    assert sums["first"] > 0 or order == "lease"
    assert (sums["too old"] > 0) == (late == "drop")


def test_a_store_that_is_told_late_leases_nothing_for_a_batch_that_is_full() -> None:
    """What one store knows to be trained, the others know before that store's groups are drawn."""
    how = {"groups": 2, "max_lag": 1, "order": "completion", "late": "wait", "needs": False}
    one, other = stores = [Store(index, 2, **how) for index in range(2)]

    def commit(store: Store, leases: list[LeaseRecord]) -> list[int]:
        for lease in leases:
            slot = store.put(lease.number)
            with store.ledger.committing(lease, 1):
                pass
            store.fill(slot)
        return [lease.number for lease in leases]

    known = np.stack([store.ledger.progress() for store in stores])
    for store in stores:
        store.ledger.take_progress(known)
    slow = one.ledger.lease(2)
    assert (commit(one, slow[:1]), commit(other, other.ledger.lease(1))) == ([0], [1])
    for number, store in enumerate(stores):
        store.position[Head.NUMBER] = 1
        store.leave(number, Left.DRAWN)
    of_other = other.ledger.progress()  # and then the batch ends
    for store in stores:
        store.train()
    one.ledger.note_trained(1)
    assert commit(one, slow[1:] + one.ledger.lease(1)) == [2, 4]
    known = np.stack([one.ledger.progress(), of_other])
    for store in stores:
        store.ledger.take_progress(known)
    slots = [store.ledger.in_order(store.complete) for store in stores]
    due = np.stack([store.ledger.due(at) for store, at in zip(stores, slots, strict=True)])
    assert one.ledger.admits(due)
    assert one.numbers[slots[0]].tolist() == [2, 4]  # batch 1
    assert [(lease.number, lease.version) for lease in other.ledger.lease(1)] == [(3, 1)]

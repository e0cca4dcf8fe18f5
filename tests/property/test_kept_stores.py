"""Stores of several nodes that outlive their jobs: batches in one order, within the lag, and one
account.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_stores import STREAM, NodeStore, check_due, exchange
from ledger_support import check_epochs

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.leases import LeaseRecord
from deepspeed_gear.store.prompt_books import books_of
from deepspeed_gear.store.prompt_ledger import Left, PromptCount, merge
from deepspeed_gear.store.records import Control, Head, SlotRetention

# 0 is the rank; remote workers outlive 3
LEASE_S = 6.0
WORKERS = (1, 2, 3)
GATEWAY = 3
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


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
        if len(free):
            self.slots[free[0], Slot.STATE] = SlotState.RESERVED
        return int(free[0]) if len(free) else -1

    def note(self, slot: int) -> None: ...

    def rebuild(self) -> None: ...


class Store(NodeStore):
    """A node's ledger, and the groups of its table, half of which have a late column."""

    def __init__(self, index: int, count: int, **how: Any) -> None:
        how = {"attempts": 2, "keep_bytes": 1, "needs": True, "members": 1, **how}
        super().__init__(index, count, 5, WORKERS, **how)
        room = len(self.slots)
        self.views |= {"retention": np.zeros((room, SlotRetention.NUM_WORDS), np.int64)}
        self.views |= {"group_counts": np.zeros(16, np.int64)}
        self.views |= {"fill_claims": np.zeros((1, room + 1, 3), np.int64)}
        self.retention = self.views["retention"]
        self.extents = Extents(self.slots)
        extents: Any = self.extents
        self.ledger = KeptLedger(self.spec, self.views, self.numbers, self.memory, extents)

    def write(
        self, slot: int, number: int, state: int, drawn: int, present: int, version: int
    ) -> None:
        control = self.extents.control
        spec = self.spec
        self.slots[slot, Slot.ID] = control[Control.NEXT_ID] * spec.num_stores + spec.store
        self.slots[slot, Slot.STATE] = state
        control[Control.NEXT_ID] += 1
        self.numbers[slot] = number
        self.drawn[slot] = drawn
        self.leaders[slot] = 0
        self.retention[slot, [SlotRetention.PRESENT, SlotRetention.POLICY_VERSION]] = (
            present,
            version,
        )

    def rows(self) -> list[tuple[int, ...]]:
        """Return what a checkpoint has of the groups: those that wait, and those in training."""
        slots = [*self.slots_in(SlotState.COMMITTED), *self.slots_in(SlotState.EVICTED)]
        words = np.column_stack(
            [self.numbers, self.slots[:, Slot.STATE], self.drawn, self.retention[:, 1:3]]
        )
        found = [tuple(words[slot].tolist()) for slot in slots]
        return [row for row in found if row[1] == SlotState.COMMITTED or row[2] >= self.consumed[0]]

    def update(self) -> None:
        """Form the groups that have their late column."""
        for slot in self.lacking[self.retention[self.lacking, SlotRetention.PRESENT] > 0].tolist():
            self.fill(slot)

    def leave(self, number: int, counter: int) -> None:
        (slot,) = (
            slot for slot in self.slots_in(SlotState.COMMITTED) if self.numbers[slot] == number
        )
        self.drawn[slot] = self.position[Head.NUMBER] - 1 if counter == Left.DRAWN else -1
        self.slots[slot, Slot.STATE] = (
            SlotState.EVICTED if counter == Left.DRAWN else SlotState.FREE
        )
        self.ledger.leave(np.array([number]), counter)

    def make_room(self) -> bool:
        """Free the oldest retired group that is not in training; return whether a slot is free."""
        retired = self.slots_in(SlotState.EVICTED)
        retired = retired[self.drawn[retired] < self.consumed[0]]
        if len(retired) and not len(self.slots_in(SlotState.FREE)):
            self.extents.free(int(retired[self.slots[retired, Slot.ID].argmin()]))
        return len(self.slots_in(SlotState.FREE)) > 0


class Run:
    """Jobs on nodes, one after the other, their workers, and what must be true of them."""

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        self.words = random.Random(seed)
        self.how = how
        self.now = 0.0
        self.groups = how["groups"]
        self.max_lag = how["max_lag"]
        self.by_lease = how["order"] == "lease"
        self.stores = [Store(index, count, **how) for index in range(count)]
        self.held: list[tuple[float, Store, LeaseRecord, int]] = []  # end, store, lease, worker
        self.trained = list[int]()
        self.gone = set[int]()
        self.saved = None
        self.counts = dict.fromkeys(("found", "older", "from before", "lost", "loads"), 0)
        self.agree()

    @property
    def selected(self) -> int:
        return min(int(store.position[Head.NUMBER]) for store in self.stores)

    @property
    def num_trained(self) -> int:
        return min(int(store.consumed[0]) for store in self.stores)

    # ---- workers -------------------------------------------------------------------------------

    def lease(self, store: Store | None = None, count: int = 0) -> list[LeaseRecord]:
        store = store or self.words.choice(self.stores)
        self.note_dropped(store)
        store.memory.peer = worker = self.words.choice(WORKERS)
        store.alive.add(worker)
        leases = self.take(store, count or self.words.randint(1, 4))
        for lease in leases:
            assert lease.number % len(self.stores) == store.spec.store
            assert lease.number not in self.gone
            assert 0 <= lease.version <= self.num_trained
            batch = (lease.number - sum(gone < lease.number for gone in self.gone)) // self.groups
            assert batch <= lease.version + self.max_lag or not self.by_lease
            if self.words.random() < 0.1:  # the next lease of the number will have this version
                store.ledger.keep(lease, b"k")
            length = min(self.words.lognormvariate(1.0, 1.2 if self.by_lease else 2.0), 200.0)
            self.held.append((self.now + length, store, lease, worker))
        return leases

    def take(self, store: Store, count: int) -> list[LeaseRecord]:
        """Lease, and count what is held instead; some of these are older than a lease would be."""
        before = store.slots_in(SlotState.COMMITTED)
        version = prompt_ledger.version_of(store.spec, store.views)
        leases = store.ledger.lease(count)
        found = np.setdiff1d(store.slots_in(SlotState.COMMITTED), before)
        self.counts["found"] += len(found)
        versions = store.retention[found, SlotRetention.POLICY_VERSION]
        self.counts["older"] += int((versions < version).sum())
        return leases

    def num_held(self, store: Store) -> int:
        return len(store.slots_in(SlotState.COMMITTED))

    def work(self) -> None:
        """Go on to the end of a lease."""
        if self.held:
            end = min(self.held, key=lambda one: one[0])
            self.held.remove(end)
            self.now, (_, store, lease, store.memory.peer) = max(self.now, end[0]), end
            try:
                if self.words.random() < 0.1:
                    store.ledger.fail(lease, "failed", retry=self.words.random() < 0.7)
                else:
                    self.commit(store, lease)
            except LeaseExpiredError:
                pass
            self.note_dropped(store)

    def commit(self, store: Store, lease: LeaseRecord) -> None:
        if store.make_room():
            committed = self.num_held(store)
            words = (-1, self.words.randint(0, 1), lease.version)
            slot = int(store.slots_in(SlotState.FREE)[0])
            with store.ledger.committing(lease, 1):
                store.write(slot, lease.number, SlotState.COMMITTED, *words)
            self.counts["from before"] += self.num_held(store) == committed
            if self.words.random() < 0.2:  # the answer was lost
                with pytest.raises(LeaseExpiredError), store.ledger.committing(lease, 1):
                    pass

    def fill(self) -> None:
        store = self.words.choice(self.stores)
        if len(store.lacking):
            store.retention[self.words.choice(store.lacking.tolist()), SlotRetention.PRESENT] = 1

    def die(self) -> None:
        store = self.words.choice(self.stores)
        worker = self.words.choice(WORKERS)
        store.alive.discard(worker)
        self.held = [
            one for one in self.held if one[1] is not store or one[3] != worker or worker == GATEWAY
        ]
        store.ledger.recover(store.extents.retire)
        self.note_dropped(store)

    def note_dropped(self, store: Store) -> None:
        """Note the numbers that a store has issued and lost, which are neither open nor trained."""
        store.ledger.reclaim()
        spec = store.spec
        issued = int(store.ledger.counts[PromptCount.ISSUED])
        issued_numbers = {n * spec.num_stores + spec.store for n in range(issued)}
        self.gone |= issued_numbers - store.open_numbers - {*self.trained}

    # ---- ranks -----------------------------------------------------------------------------------

    def each(self, call: Callable[[Store], Any]) -> list[Any]:
        """Return what a call returns for each store, made in any order; workers and ranks go on
        between.
        """
        found = dict[int, Any]()
        for store in self.words.sample(self.stores, len(self.stores)):
            found[store.spec.store] = call(store)
            for _ in range(self.words.choice([0, 0, 1, 3]) * (len(self.stores) > 1)):
                self.words.choice(
                    [self.lease, self.lease, self.work, self.work, self.fill, self.train]
                )()
        return [found[index] for index in range(len(found))]

    def agree(self, draws: bool = False) -> list[int]:
        """Make the exchanges of a selection, or of a question; return what a batch may have, in
        order.
        """
        self.each(self.ask)
        return exchange(self.stores, self.each, self.progress, draws)

    def progress(self, store: Store) -> np.ndarray:
        self.ask(store)
        return store.ledger.progress()

    def ask(self, store: Store) -> None:
        """Hold what is found, and drop what is too old, as a rank does that waits for a batch."""
        store.memory.peer = 0
        store.update()
        self.take(store, 0)
        store.update()
        if self.how["late"] == "drop":
            store.drop(self.selected)
        self.note_dropped(store)

    def select(self) -> bool:
        """Select the next batch if its groups are there; a rank may be late with the one before."""
        batch = self.selected
        draws = self.num_trained >= batch - self.words.randint(0, 1)
        numbers = self.agree(draws)[: self.groups]
        if len(numbers) < self.groups or not draws:
            return False
        self.trained += numbers

        def commit(store: Store) -> None:
            store.position[Head.NUMBER] += 1
            for number in filter(store.owns, numbers):
                slot = store.complete[store.numbers[store.complete] == number][0]
                assert batch - store.retention[slot, SlotRetention.POLICY_VERSION] <= self.max_lag
                store.leave(number, Left.DRAWN)

        self.each(commit)
        assert not self.by_lease or set(range(numbers[-1] + 1)) == {*self.trained} | {
            n for n in self.gone if n <= numbers[-1]
        }
        return True

    def train(self) -> None:
        store = self.words.choice(self.stores)
        if store.consumed[0] < self.selected and store.consumed[0] <= self.num_trained:
            store.consumed += 1
        is_known = (
            store.ledger.counts[PromptCount.TRAINED] >= 0
        )  # else no rank has one since the load
        if is_known and self.num_trained >= self.selected - 1:
            store.ledger.note_trained(self.selected - 1)

    def check(self) -> None:
        for store in self.stores:
            store.update()
            self.note_dropped(store)
        books = [books_of(store.ledger) for store in self.stores]
        dropped = sum(sum(one["dropped"].values()) for one in books)
        sums = {name: sum(one[name] for one in books) for name in ("issued", *PARTS)}
        assert sums["issued"] == sum(sums[name] for name in PARTS) + dropped
        assert (dropped, sums["trained"] + sums["training"]) == (len(self.gone), len(self.trained))
        assert min(one[name] for one in books for name in PARTS) >= 0
        check_epochs(books)
        if self.how["order"] == "completion" and self.how["late"] == "wait":
            check_due(self.stores, self.selected)
        for store in self.stores:  # a number has one group, and a trajectory an id of its store
            used = store.slots[:, Slot.STATE] != SlotState.FREE
            assert len(store.numbers[used]) == len({*store.numbers[used].tolist()})
            ids = store.slots[used, Slot.ID]
            assert len(ids) == len({*ids.tolist()})
            assert (ids % len(self.stores) == store.spec.store).all()

    # ---- jobs ------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin a job at number 0 in the stores; one of them may be lost with its workers."""
        for index in range(len(self.stores)):
            if self.words.random() < 0.3:
                lost = self.stores[index]
                new = self.stores[index] = Store(index, len(self.stores), **self.how)
                held = [one for one in self.held if one[1] is not lost or one[3] == GATEWAY]
                self.held = [(end, new if of is lost else of, *more) for end, of, *more in held]
                self.counts["lost"] += 1
            store = self.stores[index]
            store.drawn[:] = -1
            store.ledger.begin(STREAM)
        self.trained = []
        self.gone = set()
        self.begin()

    def begin(self) -> None:
        """Agree for the first time; nothing is leased before. Groups that may be found have any
        versions.
        """
        for store in self.stores:
            for slot in store.slots_in(SlotState.EVICTED).tolist():
                if store.drawn[slot] < 0 and self.words.random() < 0.5:
                    version = self.words.randint(
                        self.selected - self.max_lag - 1, self.selected + 1
                    )
                    store.retention[slot, SlotRetention.POLICY_VERSION] = max(version, 0)
            self.ask(store)
            assert len(self.stores) == 1 or not self.lease(store)
        if self.words.random() < 0.5:
            self.work()  # of the job before
        self.agree()

    def save(self) -> None:
        ledger = merge([store.ledger.export() for store in self.stores])
        rows = [store.rows() for store in self.stores]
        self.saved = (
            ledger,
            rows,
            list(self.trained),
            set(self.gone),
            (self.selected, self.num_trained),
        )

    def load(self) -> None:
        if self.saved is not None:
            ledger, rows, self.trained, self.gone, at = self.saved
            self.trained, self.gone = list(self.trained), set(self.gone)
            drawn = sorted({row[0] for own in rows for row in own if row[1] == SlotState.EVICTED})
            for store, own in zip(self.stores, rows, strict=True):
                store.position[Head.NUMBER], store.consumed[:] = at
                store.drawn[:] = -1
                store.ledger.begin()
                placed, _ = store.ledger.place(
                    np.zeros((len(own), Slot.NUM_WORDS), np.int64), ledger
                )
                for slot, row in zip(placed.tolist(), own, strict=True):
                    store.write(slot, *row)
                store.ledger.restore(ledger, drawn)
                store.position[Head.NUMBER], store.consumed[:] = at
                self.ask(store)
            self.begin()
            self.counts["loads"] += 1

    def finish(self, batches: int) -> None:
        """Generate without failures: the learner is never stuck."""
        for _ in range(batches):
            for _ in range(4):
                self.now += 1000.0
                for store in self.stores:
                    for lease in self.lease(store, 99):
                        self.commit(store, lease)
                    store.retention[:, SlotRetention.PRESENT] = 1
                while self.num_trained < self.selected:
                    self.train()
                if self.select():
                    break
            else:
                raise AssertionError("no batch can be selected")


def drive(run: Run) -> None:
    """Let workers and ranks go on, with saves, loads and other jobs; then without failures."""
    for turn in range(500):
        works = [run.work] * 12 + [run.fill] * 8
        run.words.choice(
            [run.lease] * 6 + works + [run.select] * 3 + [run.train] * 2 * len(run.stores)
        )()
        if turn % 20 == 19:
            rare = [run.save], [run.die, run.check], [run.load, run.load, run.restart]
            run.words.choice(rare[turn // 20 % 3])()
        if turn % 5 == 0:
            run.check()
    run.finish(4)
    run.check()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "max_lag", "order", "late"),
    [
        (1, 0, "lease", "wait"),
        (4, 1, "lease", "wait"),
        (5, 3, "lease", "wait"),
        (4, 1, "completion", "wait"),
        (5, 3, "completion", "wait"),
        (5, 3, "completion", "drop"),
    ],
)
def test_jobs_go_on_in_the_stores_of_those_before(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("found", "older", "from before", "lost", "loads"), 0)
    for seed in range(4):
        how = {"groups": groups, "max_lag": max_lag, "order": order, "late": late}
        how["lease_s"] = LEASE_S if order == "lease" else 300.0  # slow ones are to be due
        run = Run(100 * count + seed, count, **how)
        clock = SimpleNamespace(monotonic_ns=lambda run=run: int(run.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        drive(run)
        assert run.trained == sorted(set(run.trained)) or order == "completion"
        assert len(run.trained) == len({*run.trained} - run.gone)
        counts = {name: counts[name] + run.counts[name] for name in counts}
    if order == "lease" or max_lag < 3:  # few are older than a lease
        del counts["older"]
    assert min(counts.values()) > 0 or groups == 1, counts


@pytest.mark.parametrize("case", ["shares", "an exchange", "more are trained", "too old", "begun"])
def test_stores_divide_what_may_be_older_than_a_lease(case: str) -> None:
    """Two stores have groups of version 0, of which two fit into the next batch."""
    how = {"groups": 2, "max_lag": 2, "order": "completion", "late": "wait", "lease_s": 1.0}
    stores = [Store(index, 2, **how) for index in range(2)]
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
    known = np.stack([store.ledger.progress() for store in stores])
    for store in stores:
        store.ledger.take_progress(known)
        assert case != "begun" or not store.ledger.lease(1)  # before the second exchange
    exchange(
        stores,
        lambda call: [call(store) for store in stores],
        lambda store: store.ledger.progress(),
        False,
    )
    for store in stores:
        if case == "an exchange":
            store.ledger.progress()
        elif case == "more are trained":
            store.ledger.note_trained(2)
        store.ledger.update()
        assert len(store.slots_in(SlotState.COMMITTED)) == (case == "shares")
        assert len(store.ledger.lease(1)) == 1  # by a worker: never waits

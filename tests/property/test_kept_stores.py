"""Stores of several nodes that outlive their jobs: batches in one order, within the lag, and one account."""

from __future__ import annotations

import random
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
from deepspeed_gear.store.prompt_books import books_of
from deepspeed_gear.store.prompt_ledger import Entry, LeasedPrompt, Left, PromptCount, PromptSpec, merge
from deepspeed_gear.store.records import Control, Head, SlotRetention

LEASE_S, WORKERS = 6.0, (1, 2, 3)  # peer 0 is the rank
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")
STREAM = ("stream/train/position", "stream/train/consumed")


class Extents:
    """The slots of a store whose trajectories have no rows."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots, self.control = slots, np.zeros(Control.NUM_WORDS, np.int64)

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


class Store:
    """A node's ledger, and the groups of its table: one trajectory each, half of them with a late column."""

    def __init__(self, index: int, count: int, groups: int, max_lag: int) -> None:
        how = {"lease_s": LEASE_S, "attempts": 2, "max_lag": max_lag, "seed": 0, "key": 0, "needs": True}
        how |= {"num_stores": count, "store": index, "members": 1}
        self.spec = PromptSpec("", "", 99, groups=groups, size=1, **how)  # type: ignore[arg-type]
        room = max(-(-(max_lag + 5) * groups // count), groups)
        self.alive = set(WORKERS)
        self.memory: Any = SimpleNamespace(peer=0, is_alive=lambda peer: peer in self.alive)
        views = {one.name: np.zeros(one.shape, one.dtype) for one in self.spec.regions()}
        self.position, self.consumed = np.zeros(Head.NUM_WORDS, np.int64), np.zeros(1, np.int64)
        self.slots, self.drawn = np.zeros((room, Slot.NUM_WORDS), np.int64), np.full(room, -1)
        views |= {"slots": self.slots, "stream/train/last_drawn": self.drawn}
        views |= dict(zip(STREAM, (self.position, self.consumed), strict=True))
        words = {"groups": SlotGroup, "retention": SlotRetention}
        views |= {name: np.zeros((room, one.NUM_WORDS), np.int64) for name, one in words.items()}
        views |= {"group_counts": np.zeros(16, np.int64), "fill_claims": np.zeros((1, room + 1, 3), np.int64)}
        self.leaders, self.retention = views["groups"][:, SlotGroup.LEADER], views["retention"]
        self.numbers, self.extents = np.zeros(room, np.int64), Extents(self.slots)
        extents: Any = self.extents
        self.ledger = KeptLedger(self.spec, views, self.numbers, self.memory, extents)

    def slots_in(self, state: int) -> np.ndarray:
        return np.nonzero(self.slots[:, Slot.STATE] == state)[0]

    def write(self, slot: int, number: int, state: int, drawn: int, present: int, version: int) -> None:
        control, spec = self.extents.control, self.spec
        self.slots[slot, Slot.ID] = control[Control.NEXT_ID] * spec.num_stores + spec.store
        self.slots[slot, Slot.STATE] = state
        control[Control.NEXT_ID] += 1
        self.numbers[slot], self.drawn[slot], self.leaders[slot] = number, drawn, 0
        self.retention[slot, [SlotRetention.PRESENT, SlotRetention.POLICY_VERSION]] = present, version

    def rows(self) -> list[tuple[int, ...]]:
        """Return what a checkpoint has of the groups: those that wait, and those in training."""
        slots = [*self.slots_in(SlotState.COMMITTED), *self.slots_in(SlotState.EVICTED)]
        words = np.column_stack([self.numbers, self.slots[:, Slot.STATE], self.drawn, self.retention[:, 1:3]])
        found = [tuple(words[slot].tolist()) for slot in slots]
        return [row for row in found if row[1] == SlotState.COMMITTED or row[2] >= self.consumed[0]]

    def update(self) -> None:
        """Form the groups that have their late column."""
        slots = self.slots_in(SlotState.COMMITTED)
        slots = slots[self.retention[slots, SlotRetention.PRESENT] > 0]
        self.leaders[slots] = slots + 1

    @property
    def complete(self) -> np.ndarray:
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] > 0]

    def leave(self, number: int, counter: int) -> None:
        (slot,) = (slot for slot in self.slots_in(SlotState.COMMITTED) if self.numbers[slot] == number)
        self.drawn[slot] = self.position[Head.KEY] - 1 if counter == Left.DRAWN else -1
        self.slots[slot, Slot.STATE] = SlotState.EVICTED if counter == Left.DRAWN else SlotState.FREE
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

    def __init__(self, seed: int, groups: int, max_lag: int, count: int) -> None:
        self.words, self.groups, self.max_lag, self.now = random.Random(seed), groups, max_lag, 0.0
        self.stores = [Store(index, count, groups, max_lag) for index in range(count)]
        self.held: list[tuple[float, Store, LeasedPrompt, int]] = []  # end, store, lease, worker
        self.trained, self.gone, self.saved = list[int](), set[int](), None
        self.counts = dict.fromkeys(("found", "from before", "lost", "loads"), 0)
        self.agree()

    @property
    def selected(self) -> int:
        return int(self.stores[0].position[Head.KEY])

    @property
    def num_trained(self) -> int:
        return min(int(store.consumed[0]) for store in self.stores)

    # ---- workers -------------------------------------------------------------------------------

    def lease(self, store: Store | None = None, count: int = 0) -> list[LeasedPrompt]:
        store = store or self.words.choice(self.stores)
        self.note_dropped(store)
        store.memory.peer = worker = self.words.choice(WORKERS)
        store.alive.add(worker)
        held, number = self.num_held(store), count or self.words.randint(1, 4)
        leases = store.ledger.lease(number)
        self.counts["found"] += self.num_held(store) - held
        for lease in leases:
            assert lease.number % len(self.stores) == store.spec.store
            assert lease.number not in self.gone
            assert 0 <= lease.version <= self.num_trained
            batch = (lease.number - sum(gone < lease.number for gone in self.gone)) // self.groups
            assert batch <= lease.version + self.max_lag
            length = min(self.words.lognormvariate(1.0, 1.2), 200.0)
            self.held.append((self.now + length, store, lease, worker))
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

    def commit(self, store: Store, lease: LeasedPrompt) -> None:
        if store.make_room():
            committed, words = self.num_held(store), (-1, self.words.randint(0, 1), lease.version)
            slot = int(store.slots_in(SlotState.FREE)[0])
            store.ledger.commit(
                lease, lambda: store.write(slot, lease.number, SlotState.COMMITTED, *words), 1
            )
            self.counts["from before"] += self.num_held(store) == committed

    def fill(self) -> None:
        store = self.words.choice(self.stores)
        lacking = np.setdiff1d(store.slots_in(SlotState.COMMITTED), store.complete)
        if len(lacking):
            store.retention[self.words.choice(lacking.tolist()), SlotRetention.PRESENT] = 1

    def die(self) -> None:
        store, worker = self.words.choice(self.stores), self.words.choice(WORKERS)
        store.alive.discard(worker)
        self.held = [one for one in self.held if one[1] is not store or one[3] != worker]
        store.ledger.recover(store.extents.retire)
        self.note_dropped(store)

    def note_dropped(self, store: Store) -> None:
        """Note the numbers that a store has issued and lost, which are neither open nor trained."""
        store.ledger.reclaim()
        spec, issued = store.spec, int(store.ledger.counts[PromptCount.ISSUED])
        issued_numbers = {n * spec.num_stores + spec.store for n in range(issued)}
        open_numbers = store.ledger.export()["prompt_entries"][:, Entry.NUMBER].tolist()
        self.gone |= issued_numbers - {*open_numbers} - {*self.trained}

    # ---- ranks -----------------------------------------------------------------------------------

    def agree(self) -> list[int]:
        """Exchange what the stores agree on; return the numbers that a batch may have, in order."""
        for store in self.stores:
            store.update()
            self.ask(store)
            store.update()
        known = np.stack([store.ledger.progress() for store in self.stores])
        for store in self.stores:
            store.ledger.agree(known)
            if self.words.random() < 0.3:  # between the two exchanges
                self.lease(store)
        held = [store.ledger.num_held for store in self.stores]
        for store, own in zip(self.stores, held, strict=True):
            store.ledger.note_others(sum(held) - own)
        slots = [store.ledger.in_order(store.complete) for store in self.stores]
        return sorted(int(n) for store, at in zip(self.stores, slots, strict=True) for n in store.numbers[at])

    def ask(self, store: Store) -> None:
        """Hold what is found, as a rank does that waits for a batch."""
        held, store.memory.peer = self.num_held(store), 0
        store.ledger.lease(0)
        self.counts["found"] += self.num_held(store) - held

    def select(self) -> bool:
        """Select the next batch if its groups are there; a rank may be late with the one before."""
        numbers, batch = self.agree()[: self.groups], self.selected
        if len(numbers) < self.groups or self.num_trained < batch - self.words.randint(0, 1):
            return False
        for store in self.stores:
            store.position[Head.KEY] += 1
            for number in (n for n in numbers if n % len(self.stores) == store.spec.store):
                slot = store.complete[store.numbers[store.complete] == number][0]
                assert batch - store.retention[slot, SlotRetention.POLICY_VERSION] <= self.max_lag
                store.leave(number, Left.DRAWN)
        self.trained += numbers
        assert set(range(numbers[-1] + 1)) == {*self.trained} | {n for n in self.gone if n <= numbers[-1]}
        return True

    def train(self) -> None:
        store = self.words.choice(self.stores)
        if store.consumed[0] < self.selected and store.consumed[0] <= self.num_trained:
            store.consumed += 1

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
            if self.words.random() < 0.2:
                lost = self.stores[index]
                self.held = [one for one in self.held if one[1] is not lost]
                self.stores[index] = Store(index, len(self.stores), self.groups, self.max_lag)
                self.counts["lost"] += 1
            store = self.stores[index]
            store.drawn[:] = -1
            store.ledger.begin(STREAM)
        self.trained, self.gone = [], set()
        self.begin()

    def begin(self) -> None:
        """Agree for the first time; nothing is leased before."""
        for store in self.stores:
            self.ask(store)
            assert len(self.stores) == 1 or not self.lease(store)
        if self.words.random() < 0.5:
            self.work()  # of the job before
        self.agree()

    def save(self) -> None:
        ledger = merge([store.ledger.export() for store in self.stores])
        rows = [store.rows() for store in self.stores]
        self.saved = ledger, rows, list(self.trained), set(self.gone), (self.selected, self.num_trained)

    def load(self) -> None:
        if self.saved is not None:
            ledger, rows, self.trained, self.gone, at = self.saved
            self.trained, self.gone = list(self.trained), set(self.gone)
            drawn = np.array([sum(row[1] == SlotState.EVICTED for row in own) for own in rows])
            for store, own in zip(self.stores, rows, strict=True):
                store.position[Head.KEY], store.consumed[:] = at
                store.drawn[:] = -1
                store.ledger.begin()
                placed, _ = store.ledger.place(np.zeros((len(own), Slot.NUM_WORDS), np.int64), ledger)
                for slot, row in zip(placed.tolist(), own, strict=True):
                    store.write(slot, *row)
                store.ledger.restore(ledger, drawn)
                store.position[Head.KEY], store.consumed[:] = at
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


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("groups", "max_lag"), [(1, 0), (4, 1), (5, 3)])
def test_jobs_go_on_in_the_stores_of_those_before(
    count: int, groups: int, max_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("found", "from before", "lost", "loads"), 0)
    for seed in range(4):
        run = Run(100 * count + seed, groups, max_lag, count)
        clock = SimpleNamespace(monotonic_ns=lambda run=run: int(run.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        for turn in range(500):
            works = [run.work] * 12 + [run.fill] * 8
            run.words.choice([run.lease] * 6 + works + [run.select] * 2 + [run.train] * 4)()
            if turn % 20 == 19:
                run.words.choice([run.die, run.save, run.load, run.restart])()
            if turn % 5 == 0:
                run.check()
        run.finish(4)
        run.check()
        assert run.trained == sorted(set(run.trained))
        counts = {name: counts[name] + run.counts[name] for name in counts}
    assert min(counts.values()) > 0 or groups == 1, counts

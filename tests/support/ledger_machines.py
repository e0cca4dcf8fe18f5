"""Machines that drive the prompt ledgers of several stores through faults, without processes.

A `Machine` lets the workers and ranks of some nodes act in a random order: leases of any length,
failures, deaths, groups that are dropped, saves. `Resharding` loads its saves on other numbers of
stores; the stores of `Successors` outlive their jobs (`KeptLedger`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ledger_stores import GATEWAY, STREAM, WORKERS, NodeStore, exchange
from ledger_support import check_epochs

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.prompt_ledger import LeaseRecord, merge
from deepspeed_gear.store.prompt_spec import Entry, EntryState, Left, PromptCount
from deepspeed_gear.store.records import Head, SlotRetention

PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


@dataclass(frozen=True)
class Saved:
    """A checkpoint: what `merge` returned, and the groups of all stores, as of `NodeStore.rows`."""

    ledger: dict[str, np.ndarray]
    rows: list[tuple[Any, ...]]
    trained: list[int]
    gone: set[int]
    selected: int
    num_trained: int
    prompts: dict[int, int]

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
    SIZE = 3  # most trajectories of a group

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        self.seed = seed
        self.words = random.Random(seed)
        self.how = how
        self.groups: int = how["groups"]
        self.max_lag: int = how["max_lag"]
        self.by_lease = how["order"] == "lease"
        self.drops = how["late"] == "drop"
        self.num_commits = 0
        self.dies = True  # whether workers die in commits
        self.races = False  # whether workers and ranks go on between the steps of an exchange
        self.now = 0.0
        self.held: list[tuple[float, NodeStore, LeaseRecord, int]] = []  # end, store, lease, worker
        self.trained: list[int] = []  # numbers of all batches
        self.gone: set[int] = set()  # dropped numbers
        self.saved: Saved | None = None
        self.prompts: dict[int, int] = {}  # drawn prompts, by number
        self.counts = Counter[str]()  # of what has happened
        self.make(count)

    def make(self, count: int) -> None:
        self.stores = [self.store_of(index, count) for index in range(count)]

    def store_of(self, index: int, count: int) -> NodeStore:
        return NodeStore(index, count, self.BATCHES, self.OUTLIVES, self.SIZE, **self.how)

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
            self.check_prompt(store, lease)
            assert not self.by_lease or self.batch(lease.number) <= lease.version + self.max_lag
            if self.words.random() < 0.15:  # the next lease of the number will have this version
                store.ledger.keep(lease, b"k")
            length = self.words.lognormvariate(1.0, 1.2 if self.by_lease else 2.0)
            self.held.append((self.now + min(length, 200.0), store, lease, worker))
        return leases

    def check_prompt(self, store: NodeStore, lease: LeaseRecord) -> None:
        """Check that a number keeps its prompt, and that an epoch has each prompt once."""
        if store.ledger.masses is None:
            return
        prompt = store.ledger.drawn(lease)
        assert self.prompts.setdefault(lease.number, prompt) == prompt
        epoch = lease.number // store.spec.num_prompts
        if store.spec.draws_once:
            first = epoch * store.spec.num_prompts
            numbers = set(range(first, first + store.spec.num_prompts)) & self.prompts.keys()
            assert len({self.prompts[number] for number in numbers}) == len(numbers)

    def reprioritise(self) -> None:
        """Set the masses of some prompts on all nodes, as a collective call does."""
        size = self.stores[0].spec.num_prompts
        chosen = np.array(self.words.sample(range(size), self.words.randint(1, size)))
        masses = np.array([self.words.randint(1, 1 << 30) for _ in chosen])
        for store in self.stores:
            if store.ledger.masses is not None:
                store.ledger.masses.set(chosen, masses)

    def take(self, store: NodeStore, count: int) -> list[LeaseRecord]:
        """Lease; sometimes a worker dies before it has counted the last number, or its prompt."""
        issued = int(store.ledger.counts[PromptCount.ISSUED])
        leases = store.ledger.lease(count)
        if store.ledger.counts[PromptCount.ISSUED] > issued and self.words.random() < 0.1:
            store.ledger.counts[PromptCount.ISSUED] -= 1
            if store.spec.draws_once and self.words.random() < 0.5:
                prompt = store.ledger.drawn(leases[-1])
                store.views["prompt_drawn"][prompt] = 0
                self.counts["drawn again"] += 1
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

    def commit(self, store: NodeStore, lease: LeaseRecord) -> bool:
        """Commit a group of any size, unless there is no room for it or its worker dies."""
        size = self.words.randint(1, self.SIZE)
        if not self.has_room(store, size):
            return False
        worker = store.memory.peer
        slots = store.slots_in(SlotState.FREE)[:size].tolist()
        ends_after = size
        if self.dies and worker in WORKERS and self.words.random() < 0.05:
            ends_after = self.words.randint(0, size)
        self.num_commits += 1
        commit = (self.num_commits, size)
        try:
            with store.ledger.committing(lease, slots):
                for slot in slots[:ends_after]:
                    present = self.has_column()
                    words = -1, present, lease.version, commit
                    store.write(slot, lease.number, SlotState.COMMITTED, *words)
                if ends_after < size:
                    raise InterruptedError
        except InterruptedError:
            self.end(store, worker)
            self.counts["torn"] += 1
            return False
        self.completed(store)
        return True

    def has_room(self, store: NodeStore, size: int) -> bool:
        """Make room for a group; without any, its worker goes on until its lease has expired."""
        return store.make_room(size)

    def has_column(self) -> bool:
        """Return whether a group comes with its late column."""
        return not self.how["needs"]

    def completed(self, store: NodeStore) -> None:
        """See what groups have become complete."""

    def fill(self) -> None:
        """Fill the late column of a group, in any order: of one trajectory, or of all."""
        lacking = [(store, slot) for store in self.stores for slot in store.lacking.tolist()]
        if lacking:
            store, slot = self.words.choice(lacking)
            slots = [slot]
            if self.words.random() < 0.7:
                slots = store.lacking[store.numbers[store.lacking] == store.numbers[slot]].tolist()
            store.retention[slots, SlotRetention.PRESENT] = 1
            self.completed(store)

    def die(self) -> None:
        self.end(self.words.choice(self.stores), self.words.choice(WORKERS))

    def end(self, store: NodeStore, worker: int) -> None:
        """End a worker, as the next owner of the lock finds it."""
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
        books = [store.ledger.account.report() for store in self.stores]
        dropped = sum(sum(one["dropped"].values()) for one in books)
        sums = {name: sum(one[name] for one in books) for name in ("issued", *PARTS)}
        assert sums["issued"] == sum(sums[name] for name in PARTS) + dropped
        assert dropped == len(self.gone)
        assert sums["trained"] + sums["training"] == len(self.trained)
        lacking = [len(np.unique(store.numbers[store.lacking])) for store in self.stores]
        assert [one["incomplete"] for one in books] == lacking
        if len(self.stores) > 1:  # they count the groups in training by their rows
            rows = [store.rows() for store in self.stores]
            in_training = [{row[0] for row in of if row[1] == SlotState.EVICTED} for of in rows]
            assert [one["training"] for one in books] == [len(numbers) for numbers in in_training]
        assert min(one[name] for one in books for name in PARTS) >= 0
        assert max(one["largest_lag"] for one in books) <= self.max_lag
        check_epochs(books)
        if not (self.by_lease or self.drops):
            self.check_due()
        for store in self.stores:  # a number has one group, and a trajectory an id of its store
            store.check_whole()
            used = store.slots[:, Slot.STATE] != SlotState.FREE
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
        rows = list[tuple[Any, ...]]()
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
        # Of what a store issued after its part of the save, the prompts are drawn again.
        issued = {
            number
            for number in self.prompts
            if number < parts[number % len(parts)]["prompt_counts"][PromptCount.ISSUED] * len(parts)
        }
        prompts = {number: self.prompts[number] for number in issued}
        self.saved = Saved(ledger, rows, list(self.trained), gone, *at, prompts)

    def load(self) -> None:
        """Go on with the latest save."""
        before = self.prompts
        if self.saved is not None:
            self.prompts = dict(self.saved.prompts)
            if self.restore(self.saved):
                self.counts["loads"] += 1
            else:
                self.prompts = before

    def restore(self, saved: Saved) -> bool:
        raise NotImplementedError

    def finish(self, batches: int) -> None:
        """Generate without failures: the learner is never stuck."""
        self.dies = False
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
        usual += [self.reprioritise] * 2 * (self.stores[0].ledger.masses is not None)
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

    def commit(self, store: NodeStore, lease: LeaseRecord) -> bool:
        store.ledger.own(lease)  # before there is room for it
        return super().commit(store, lease)

    def has_room(self, store: NodeStore, size: int) -> bool:
        while not store.make_room(size) and not len(store.slots_in(SlotState.COMMITTED)):
            self.train()  # all rows of the store are in training
        while not store.make_room(size):  # of other stores: more than this one would issue
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
        # None is evicted in a selection.
        has_room = all(store.make_room(self.SIZE) for store in self.stores)
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
        complete = set[int]()
        for at, (store, slot) in enumerate(groups):
            number = int(store.numbers[slot])
            whole.write(at, number, SlotState.COMMITTED, -1, 0, 0)
            if store.leaders[slot]:
                complete.add(number)
        for slot in whole.slots_in(SlotState.COMMITTED).tolist():
            number = int(whole.numbers[slot])
            if number in complete:
                whole.complete_as(slot, self.places[number] * 100_000 + number)
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
            used = store.ledger.account.num_in_training + len(store.open_numbers)
            if is_known and used < len(store.slots) // self.SIZE:
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
            for slot, row in enumerate(own):
                store.write(slot, *row[:-1])
            for slot, row in enumerate(own):
                if row[-1]:
                    store.complete_as(slot, row[-1])
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

    BATCHES = 3
    OUTLIVES = True

    def __init__(self, seed: int, count: int, **how: Any) -> None:
        super().__init__(seed, count, **{**how, "needs": True})
        self.races = count > 1
        self.agree(draws=False)

    def take(self, store: NodeStore, count: int) -> list[LeaseRecord]:
        """Lease, and count what is held instead; some of it is older than a lease would be."""
        before = store.slots_in(SlotState.COMMITTED)
        version = store.ledger.account.version
        leases = super().take(store, count)
        found = np.setdiff1d(store.slots_in(SlotState.COMMITTED), before)
        self.counts["found"] += len(found)
        versions = store.retention[found, SlotRetention.POLICY_VERSION]
        self.counts["older"] += int((versions < version).sum())
        return leases

    def commit(self, store: NodeStore, lease: LeaseRecord) -> bool:
        committed = len(store.slots_in(SlotState.COMMITTED))
        if not super().commit(store, lease):
            return False
        self.counts["from before"] += len(store.slots_in(SlotState.COMMITTED)) == committed
        if self.words.random() < 0.2:  # the answer was lost
            with pytest.raises(LeaseExpiredError), store.ledger.committing(lease, []):
                pass
        return True

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
            retired = store.slots_in(SlotState.EVICTED)
            retired = retired[store.drawn[retired] < 0]
            for number in np.unique(store.numbers[retired]).tolist():
                if self.words.random() < 0.5:
                    oldest = self.selected - self.max_lag - 1
                    version = max(self.words.randint(oldest, self.selected + 1), 0)
                    slots = retired[store.numbers[retired] == number]
                    store.retention[slots, SlotRetention.POLICY_VERSION] = version
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
            store.numbers[placed] = [row[0] for row in own]
            store.ledger.note_sizes(placed)
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

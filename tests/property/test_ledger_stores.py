"""Prompt ledgers of several stores: batches in one order, within the lag, and one account."""

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
from deepspeed_gear.store.prompt_ledger import (
    Entry,
    LeasedPrompt,
    Left,
    PromptCount,
    PromptLedger,
    PromptSpec,
    merge,
)
from deepspeed_gear.store.records import Head

LEASE_S, ATTEMPTS, WORKERS = 6.0, 2, 3
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


class Store:
    """A node's ledger, and the groups of its table, of one trajectory each."""

    def __init__(self, index: int, count: int, groups: int, max_lag: int, needs: bool) -> None:
        how = {"lease_s": LEASE_S, "attempts": ATTEMPTS, "max_lag": max_lag, "seed": 0, "key": 0}
        how["needs"] = needs
        self.spec = PromptSpec("", "", 99, groups=groups, size=1, **how, num_stores=count, store=index)  # type: ignore[arg-type]
        room = max(-(-(max_lag + 2) * groups // count), groups)  # as little as a config may give
        self.alive = set(range(WORKERS))
        self.memory: Any = SimpleNamespace(peer=0, is_alive=lambda peer: peer in self.alive)
        views = {one.name: np.zeros(one.shape, one.dtype) for one in self.spec.regions()}
        self.position, self.consumed = np.zeros(Head.NUM_WORDS, np.int64), np.zeros(1, np.int64)
        self.slots, self.drawn = np.zeros((room, Slot.NUM_WORDS), np.int64), np.full(room, -1)
        views |= {"slots": self.slots, "stream/train/last_drawn": self.drawn}
        views["groups"] = np.zeros((room, SlotGroup.NUM_WORDS), np.int64)
        self.leaders: np.ndarray = views["groups"][:, SlotGroup.LEADER]
        views |= {"stream/train/position": self.position, "stream/train/consumed": self.consumed}
        self.numbers = np.zeros(room, np.int64)
        self.ledger = PromptLedger(self.spec, views, self.numbers, self.memory)

    def owns(self, number: int) -> bool:
        return number % self.spec.num_stores == self.spec.store

    def slots_in(self, state: int) -> np.ndarray:
        return np.nonzero(self.slots[:, Slot.STATE] == state)[0]

    @property
    def open_numbers(self) -> set[int]:
        """The numbers that are issued and have not left."""
        return set(self.ledger.export()["prompt_entries"][:, Entry.NUMBER].tolist())

    def put(self, number: int, state: int, key: int, is_filled: bool) -> None:
        slot = self.slots_in(SlotState.FREE)[0]
        self.numbers[slot], self.slots[slot, Slot.STATE], self.drawn[slot] = number, state, key
        self.leaders[slot] = (slot + 1) * is_filled

    @property
    def lacking(self) -> np.ndarray:
        """The slots of groups that lack a late column."""
        return np.setdiff1d(self.slots_in(SlotState.COMMITTED), self.complete)

    @property
    def complete(self) -> np.ndarray:
        """The slots of groups with a leader."""
        slots = self.slots_in(SlotState.COMMITTED)
        return slots[self.leaders[slots] > 0]

    def fill(self, slot: int) -> int:
        """Fill the late column of a group; return its number."""
        self.leaders[slot] = slot + 1
        return int(self.numbers[slot])

    def leave(self, number: int, counter: int) -> None:
        """Let a held group leave the table."""
        slot = [slot for slot in self.slots_in(SlotState.COMMITTED) if self.numbers[slot] == number]
        is_drawn = counter == Left.DRAWN
        self.slots[slot, Slot.STATE] = SlotState.EVICTED if is_drawn else SlotState.FREE
        self.drawn[slot] = self.position[Head.KEY] - 1
        self.ledger.leave(np.array([number]), counter)

    def train(self) -> None:
        """End the next batch on this node."""
        self.consumed += 1
        slots = self.slots_in(SlotState.EVICTED)
        self.slots[slots[self.drawn[slots] < self.consumed[0]], Slot.STATE] = SlotState.FREE


class Run:
    """Nodes, their workers, and what must be true of them."""

    def __init__(self, seed: int, groups: int, max_lag: int, count: int, needs: bool) -> None:
        self.words, self.seed, self.groups, self.max_lag = random.Random(seed), seed, groups, max_lag
        self.needs = needs  # whether groups have a late column
        self.now, self.saved = 0.0, None
        self.held: list[tuple[float, Store, LeasedPrompt, int]] = []  # end, store, lease, worker
        self.versions: dict[int, int] = {}  # of the latest lease of each number
        self.trained: list[int] = []  # numbers of all batches
        self.gone: set[int] = set()  # dropped numbers
        self.counts = dict.fromkeys(("expired", "loads", "exact", "evicted", "open"), 0)
        self.make(count)

    def make(self, count: int) -> None:
        sizes = count, self.groups, self.max_lag, self.needs
        self.stores = [Store(index, *sizes) for index in range(count)]

    @property
    def selected(self) -> int:
        return int(self.stores[0].position[Head.KEY])

    @property
    def num_trained(self) -> int:
        return min(int(store.consumed[0]) for store in self.stores)

    def batch(self, number: int) -> int:
        """Return the batch of a number, if no further one is dropped."""
        return (number - sum(gone < number for gone in self.gone)) // self.groups

    # ---- workers -------------------------------------------------------------------------------

    def lease(self, store: Store | None = None, count: int = 0) -> list[LeasedPrompt]:
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
            assert self.batch(lease.number) <= lease.version + self.max_lag
            self.versions[lease.number] = lease.version
            length = min(self.words.lognormvariate(1.0, 1.2), 200.0)
            self.held.append((self.now + length, store, lease, worker))
        return leases

    def work(self) -> None:
        """Go on to the end of a lease."""
        if not self.held:
            return
        end = min(self.held, key=lambda one: one[0])
        self.held.remove(end)
        self.now, (_, store, lease, worker) = max(self.now, end[0]), end
        chance, number, store.memory.peer = self.words.random(), lease.number, worker
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
        """Let the conditions of groups reject a complete one; one node rejects more than the others do."""
        if self.words.random() < 0.1 + 0.8 * (store.spec.store == self.seed % 2):
            store.leave(number, Left.REJECTED)
            self.gone.add(number)

    def commit(self, store: Store, lease: LeasedPrompt) -> None:
        store.ledger.own(lease)
        if not len(store.slots_in(SlotState.FREE)):  # of other stores: more than this one would issue
            assert self.counts["loads"]
            self.counts["evicted"] += 1
            oldest = int(store.numbers[store.slots_in(SlotState.COMMITTED)].min())
            store.leave(oldest, Left.EVICTED)
            self.gone.add(oldest)
        store.put(lease.number, SlotState.COMMITTED, -1, not self.needs)
        store.ledger.commit(lease, lambda: None, 1)

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

    def agree(self) -> list[int]:
        """Exchange what the stores agree on; return the numbers that a batch may have, in order."""
        known = np.stack([store.ledger.progress() for store in self.stores])
        for store in self.stores:
            store.ledger.agree(known)
        held = [store.ledger.num_held for store in self.stores]
        for store, own in zip(self.stores, held, strict=True):
            store.ledger.note_others(sum(held) - own)
        slots = [store.ledger.in_order(store.complete) for store in self.stores]
        return sorted(int(n) for store, at in zip(self.stores, slots, strict=True) for n in store.numbers[at])

    def select(self) -> bool:
        """Select the next batch if its groups are there; a rank may be late with the one before."""
        known, batch = self.agree(), self.selected
        lacking = [number for store in self.stores for number in store.numbers[store.lacking].tolist()]
        assert max(known, default=-1) < min(lacking, default=1 << 40)
        complete = max(int(store.numbers[store.complete].max(initial=-1)) for store in self.stores)
        self.counts["open"] += min(lacking, default=complete) < complete
        numbers = known[: self.groups]
        if len(numbers) < self.groups or self.num_trained < batch - self.words.randint(0, 1):
            return False
        for store in self.stores:
            store.position[Head.KEY] += 1
            for number in filter(store.owns, numbers):
                store.leave(number, Left.DRAWN)
        self.trained += numbers
        assert max(batch - self.versions[number] for number in numbers) <= self.max_lag
        assert set(range(numbers[-1] + 1)) == {*self.trained} | {n for n in self.gone if n <= numbers[-1]}
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
        books = [store.ledger.books() for store in self.stores]
        dropped = sum(sum(one["dropped"].values()) for one in books)
        sums = {name: sum(one[name] for one in books) for name in ("issued", *PARTS)}
        assert sums["issued"] == sum(sums[name] for name in PARTS) + dropped
        assert dropped == len(self.gone)
        assert [one["incomplete"] for one in books] == [len(store.lacking) for store in self.stores]
        assert min(one[name] for one in books for name in PARTS) >= 0
        assert sums["trained"] + sums["training"] == len(self.trained)
        assert max(one["largest_lag"] for one in books) <= self.max_lag
        check_epochs(books)

    def check_admission(self) -> None:
        """Lease all that is admitted; drops of others after the first open number are not known."""
        self.agree()
        first = min(int(store.ledger.progress()[0]) for store in self.stores)
        for store in self.stores:
            while self.lease(store, 9):
                pass
            following = int(store.ledger.counts[PromptCount.ISSUED]) * len(self.stores) + store.spec.store
            is_known = all(store.owns(n) for n in self.gone if first <= n < following)
            used = len(store.slots_in(SlotState.EVICTED)) + len(store.open_numbers)
            if is_known and used < len(store.slots):
                assert self.batch(following) > self.num_trained + self.max_lag
                self.counts["exact"] += 1

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Save the stores one after the other, while workers go on."""
        parts, rows, gone, count = (
            dict[int, Any](),
            list[tuple[int, int, int, bool]](),
            set[int](),
            len(self.stores),
        )
        for store in self.words.sample(self.stores, count):
            parts[store.spec.store] = store.ledger.export()
            for state in (SlotState.COMMITTED, SlotState.EVICTED):
                for at in store.slots_in(state):
                    words = int(store.numbers[at]), state, int(store.drawn[at]), bool(store.leaders[at])
                    rows.append(words)
            gone |= set(filter(store.owns, self.gone))
            for _ in range(self.words.randint(0, 4)):
                self.words.choice([self.lease, self.work])()
        at = self.selected, self.num_trained
        rows = [row for row in rows if row[1] == SlotState.COMMITTED or row[2] >= at[1]]
        self.saved = merge([parts[index] for index in range(count)]), rows, list(self.trained), gone, at

    def load(self) -> None:
        """Go on with a save on any number of stores, unless their tables are too small."""
        if self.saved is None:
            return
        (ledger, rows, trained, gone, at), before = self.saved, self.stores
        self.make(self.words.randint(1, 3))
        owned = [[row for row in rows if store.owns(row[0])] for store in self.stores]
        if any(len(own) > len(store.slots) for own, store in zip(owned, self.stores, strict=True)):
            self.stores = before
            return
        self.held, self.trained, self.gone = [], list(trained), set(gone)
        drawn = np.array([sum(state == SlotState.EVICTED for _, state, *_ in own) for own in owned])
        for store, own in zip(self.stores, owned, strict=True):
            for row in own:
                store.put(*row)
            store.ledger.restore(ledger, drawn)
            assert len(self.stores) == 1 or not store.ledger.lease(9)  # before the stores have agreed
            store.position[Head.KEY], store.consumed[:] = at
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
@pytest.mark.parametrize(("groups", "max_lag"), [(1, 0), (4, 1), (7, 0), (5, 3)])
def test_stores_share_an_order_a_lag_and_an_account(
    count: int, groups: int, max_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, waits = 0, 0
    for seed in range(4):
        run = Run(100 * count + seed, groups, max_lag, count, needs=seed % 2 > 0)
        clock = SimpleNamespace(monotonic_ns=lambda run=run: int(run.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        for turn in range(600):
            works = [run.work] * 12 + [run.fill] * (8 * run.needs)
            run.words.choice([run.lease] * 6 + works + [run.select] * 2 + [run.train] * 4)()
            if turn % 15 == 14:
                loads = [run.load] if seed > 1 else []  # without one, a table never evicts what waits
                run.words.choice([run.die, run.save, run.save, run.check_admission, *loads])()
            if turn % 5 == 0:
                run.check()
        run.finish(5)
        run.check()
        assert run.trained == sorted(set(run.trained))
        exact += run.counts["exact"]
        waits += run.counts["open"] * run.needs
    assert exact > 0
    assert waits > 0 or groups == 1

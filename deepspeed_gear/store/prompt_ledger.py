"""Prompt ledger: the account of every prompt of a table of groups, from its lease to its training.

A prompt has a number, epoch * prompts + place in the epoch's order, which is also that of its
group. Numbers are issued in their order, to rollout workers that lease them. An entry holds a
number until its group leaves the table: leased, returned, or held (committed and not drawn yet).
Then a counter has it: drawn, or dropped for a reason. So at every moment under the lock

    issued = entries + drawn + dropped, by reason

and likewise for each of the latest epochs, and for all earlier ones together.

Of K stores, one on each node, store k issues the numbers n with n % K == k. Batches are in the
order of all numbers; what a store needs of the others comes with their selections (`progress`,
`take_progress`, `note_others`). Or they are in one order of completion, by stamps that follow from
these rounds (`due`, `merged`).

Order of writes, so that a process may die at any instruction: an entry's words before its state,
the state before the number of issued ones. An entry that leaves is marked with its counter; new
counters are written and marked as complete, replace the old ones, and the marked entries are free.
A commit writes the number of its trajectories, publishes them, and then the state, before which
`recover` evicts those that are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.leases import LeaseRecord, ended
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.shared_memory import SharedMemory

MOST_REASONS = (
    32  # counters of numbers that have left, the drawn ones first; the last is of other names
)
REASON_BYTES = 32
_HEARTBEAT = "call heartbeat() more often, or raise prompts.lease_s"
FIRST_STAMP = -(1 << 62)  # of `Entry.STAMP`, which has one while it is below 0
# that have counters of their own: epoch e those of row e % EPOCHS, until a later one needs them
EPOCHS = 4


class Entry:
    """Words of an entry."""

    STATE: Final = 0  # an EntryState, or EntryState.LEFT plus a counter
    NUMBER: Final = 1
    OWNER: Final = 2  # index of the process that holds the lease
    DEADLINE: Final = 3  # monotonic nanoseconds at which the lease returns
    STAMP: Final = (
        DEADLINE  # once its group is complete: its place among those of all stores, below 0
    )
    VERSION: Final = 4  # rollout batches that were trained when it was leased
    ATTEMPT: Final = 5  # leases of the number, with this one
    TOKEN: Final = 6  # number of the lease among all leases
    MEMBERS: Final = 7  # trajectories that a commit under way publishes; 0: there is none
    KEPT: Final = (
        8  # twice the bytes of what leases of the number have kept, plus which of two copies it is
    )
    NUM_WORDS: Final = 9


class EntryState:
    """States of an entry."""

    FREE, LEASED, RETURNED, HELD, LEFT = range(5)  # LEFT: plus the counter


class PromptCount:
    """Words of a ledger."""

    ISSUED: Final = 0  # numbers ever leased, of those of the store
    LEASES: Final = 1  # leases ever
    RETURNS: Final = 2  # leases ever that came back
    REFUSED: Final = 3  # commits and heartbeats ever of leases that had expired
    LARGEST_LAG: Final = 4  # of the groups that were drawn
    SWEEPING: Final = 5  # 1: new counters are complete and replace the old ones
    WAITED_NS: Final = 6  # nanoseconds ever in which workers waited for a lease
    TRAINED: Final = (
        7  # of several stores: batches that all ranks have trained; -1: not known after a load
    )
    OTHERS: Final = 8  # of several stores: what the other ones add to `_before`
    NUM_WORDS: Final = 9


class Progress:
    """Words that stores send to each other before a selection."""

    FIRST_OPEN: Final = 0  # the first number of the store that is open
    BATCHES: Final = 1  # that the ranks of its node have trained
    STORE: Final = 2
    TRAINED: Final = (
        3  # batches that all ranks of all nodes have trained, as far as it is known here
    )
    DROPPED: Final = (
        4  # numbers ever that have left and were not drawn; after a load their sum counts
    )
    STAMP: Final = 5  # the largest `Entry.STAMP` known here
    NUM_WORDS: Final = 6


class Left:
    """Counters of numbers that have left; names of programs follow."""

    DRAWN, REJECTED, EVICTED, REMOVED, ENDED, EXPIRED, TOO_OLD = range(7)


FIXED_REASONS = (
    "drawn",
    "rejected",
    "evicted",
    "removed",
    "worker ended",
    "lease expired",
    "too old",
)
OTHER_REASON: Final = MOST_REASONS - 1


@dataclass(frozen=True)
class PromptSpec:
    """The prompts of a table."""

    data: str  # folder of the data set, absolute; each of its trajectories is a prompt
    fingerprint: str
    num_prompts: int
    groups: int  # of a rollout batch
    size: int  # trajectories of a group
    lease_s: float
    attempts: int
    max_lag: int
    seed: int  # with `random_key` of the order of each epoch
    random_key: int
    order: str = "lease"  # or "completion"
    late: str = "wait"  # or "drop"
    keep_bytes: int = 0  # that a lease may keep
    members: int = (
        0  # trajectories of a group, if the store outlives its job (`KeptLedger`); else 0
    )
    needs: bool = False  # whether a committed group waits for late columns
    num_stores: int = 1
    store: int = 0  # index of this one

    @property
    def is_joint(self) -> bool:
        """Whether the groups of several stores are in one order of completion."""
        return self.num_stores > 1 and self.order == "completion"

    def issued_below(self, number: int) -> int:
        """Return how many numbers of this store are below a number."""
        return max(-(-(number - self.store) // self.num_stores), 0)

    @property
    def num_entries(self) -> int:
        """Most numbers that are leased, returned or held at once, by admission."""
        return (self.max_lag + 1) * self.groups

    def regions(self) -> list[Region]:
        """Return the regions of the ledger in a store."""
        return [
            *([Region("life_words", "int64", (4 + self.max_lag,))] if self.members else []),
            Region("prompt_entries", "int64", (self.num_entries, Entry.NUM_WORDS)),
            Region("prompt_counts", "int64", (PromptCount.NUM_WORDS,)),
            Region("prompt_left", "int64", (2, MOST_REASONS)),  # the counters, and as they will be
            Region(
                "prompt_epochs", "int64", (2, EPOCHS, 1 + MOST_REASONS)
            ),  # epoch + 1, its counters
            Region("prompt_reasons", f"S{REASON_BYTES}", (MOST_REASONS,)),
            Region("prompt_kept", "uint8", (self.num_entries, 2, self.keep_bytes)),
        ]


def may_lease(before: int, trained: int, groups: int, max_lag: int) -> bool:
    """Return whether the next number may be leased.

    The numbers before it, from that of the first batch on, are consumed first, unless they are
    dropped. So its batch is at most `before // groups`; less the `trained` ones, that is its
    largest lag.
    """
    return before // groups <= trained + max_lag


class PromptLedger:
    """The ledger of a table. Every method requires the table's lock.

    `numbers` is the column of group numbers, by slot.
    """

    def __init__(
        self,
        spec: PromptSpec,
        views: Mapping[str, np.ndarray],
        numbers: np.ndarray,
        memory: SharedMemory,
        now_ns: Callable[[], int] = lambda: time.monotonic_ns(),  # read late: tests replace it
    ) -> None:
        self.spec = spec
        self.views = views
        self._memory = memory
        self._now_ns = now_ns
        self.entries = views["prompt_entries"]
        self.counts = views["prompt_counts"]
        self._left, self._reasons, self._kept = (
            views[f"prompt_{n}"] for n in ("left", "reasons", "kept")
        )
        self._epochs = views["prompt_epochs"]
        self._slots = views["slots"]
        self.numbers = numbers
        self._lease_ns = int(spec.lease_s * 1e9)
        self._position: np.ndarray = views["stream/train/position"]
        self._completed: np.ndarray = views["groups"][:, SlotGroup.NUMBER]  # of leaders, in order
        self._states: np.ndarray = self.entries[:, Entry.STATE]
        self._of_entries: np.ndarray = self.entries[:, Entry.NUMBER]
        # Of several stores, as of the latest round: the first open number, the largest
        # stamp, the trained batches, and how many entries are due by each batch from the next one
        # on.
        self._first = 0
        self._stamp = FIRST_STAMP
        self._trained = 0
        self._num_due = np.zeros(spec.max_lag + 1, np.int64)

    def in_order(self, slots: np.ndarray) -> np.ndarray:
        """Return the leaders of groups that the next batch may have, in order. [n] -> [m], int64.

        In the order of leases those that no open number precedes, by number.
        """
        if self.spec.is_joint:
            return self._by_stamp(slots)
        if self.spec.order == "completion":
            return self._by_completion(slots)
        first = self._first_open if self.spec.num_stores == 1 else self._first
        slots = slots[self.numbers[slots] < first]
        return np.asarray(slots[np.argsort(self.numbers[slots], kind="stable")])

    @property
    def num_selected(self) -> int:
        """Rollout batches that were selected: the number of the next one."""
        return int(self._position[Head.NUMBER])

    @property
    def _next(self) -> int:
        """The number that is issued next."""
        return int(self.counts[PromptCount.ISSUED]) * self.spec.num_stores + self.spec.store

    @property
    def _first_open(self) -> int:
        """The first number of this store that is leased, returned, incomplete, or not
        issued yet.
        """
        is_open = (self._states == EntryState.LEASED) | (self._states == EntryState.RETURNED)
        is_open |= incomplete(self.spec, self.views, self.numbers)
        return int(self._of_entries[is_open].min(initial=self._next))

    def _by_completion(self, slots: np.ndarray) -> np.ndarray:
        """Return leaders as they were completed, but first those without which others would become
        too old.

        Of the prompts that are due by a batch, complete or not, those that do not fit into the
        batches after the next one come now. None is returned while one of these is not complete and
        `late` is "wait".
        """
        spec = self.spec
        selected = self.num_selected
        slots = slots[np.argsort(self._completed[slots])]
        due = self._versions(slots) + spec.max_lag
        is_open = self._has_version() & ~np.isin(self._of_entries, self.numbers[slots])
        every = np.concatenate([due, self.entries[is_open, Entry.VERSION] + spec.max_lag])
        batches = np.arange(selected, selected + spec.max_lag + 1)
        num_due = np.searchsorted(np.sort(every), batches, side="right")
        return np.asarray(slots[self._due_first(due, num_due)])

    def _due_first(self, due: np.ndarray, num_due: np.ndarray) -> np.ndarray:
        """Return the order of groups: those that must come now, and the others; none if the batch
        waits.

        `due` of complete groups, as they were completed, [n]; `num_due` of the entries of all
        stores by each batch from the next one on, [max_lag + 1], int64.
        """
        spec = self.spec
        is_first = np.zeros(len(due), bool)
        for after, num in enumerate(num_due.tolist()):
            missing = num - after * spec.groups - np.count_nonzero(is_first)
            is_due = due <= self.num_selected + after
            chosen = np.nonzero(is_due & ~is_first)[0][: max(missing, 0)]
            if len(chosen) < missing and spec.late == "wait":
                return np.empty(0, np.int64)
            is_first[chosen] = True
        return np.asarray(np.argsort(~is_first, kind="stable"))

    def _by_stamp(self, slots: np.ndarray) -> np.ndarray:
        """Return the leaders that the next batch of all stores may have, in the order of
        completion.
        """
        at = self._held(self.numbers[slots])
        stamps = self.entries[at, Entry.STAMP]
        may = (at >= 0) & (stamps < 0)
        return np.asarray(slots[may][np.argsort(stamps[may])])

    def due(self, slots: np.ndarray) -> np.ndarray:
        """Return by when this store's entries, and the groups of `in_order`, are due, for `admits`.

        How many by each batch from the next one on, one after the other: [2 * (max_lag + 1)],
        int64.
        """
        versions = self.entries[self._has_version(), Entry.VERSION], self._versions(slots)
        first = self.num_selected - self.spec.max_lag
        most = self.spec.max_lag + 1
        counts = [np.bincount(v[v >= first] - first, minlength=most)[:most] for v in versions]
        return np.concatenate([count.cumsum() for count in counts])  # kept groups may be due later

    def admits(self, due: np.ndarray) -> bool:
        """Take `due` of all stores, [S, words]; return whether no group that must come now is
        missing.
        """
        if not self.spec.is_joint:
            return True
        self._num_due, num_complete = np.split(due.sum(0), 2)
        must = self._num_due - np.arange(self.spec.max_lag + 1) * self.spec.groups
        return self.spec.late == "drop" or bool((num_complete >= must).all())

    def marks(self, numbers: np.ndarray) -> np.ndarray:
        """Return the stamp of each held number, and the batch by which it is due. [n] -> [n, 2],
        int64.
        """
        words = self.entries[self._held(numbers)]
        return np.stack(
            [words[:, Entry.STAMP], words[:, Entry.VERSION] + self.spec.max_lag], axis=1
        )

    def merged(self, numbers: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Return the order of the complete groups of all stores, as of `admits`. [n], [n, 2] ->
        [n].
        """
        order = np.lexsort((numbers, marks[:, 0]))
        return np.asarray(order[self._due_first(marks[order, 1], self._num_due)])

    def _has_version(self) -> np.ndarray:
        """Return which entries have been generated for: leased, held, or returned with what was
        kept.
        """
        is_kept = (self._states == EntryState.RETURNED) & (self.entries[:, Entry.KEPT] > 1)
        return np.asarray(is_kept | np.isin(self._states, (EntryState.LEASED, EntryState.HELD)))

    def _held(self, numbers: np.ndarray) -> np.ndarray:
        """Return the entry of each number that is held; -1: it is not. [n] -> [n]."""
        held = np.nonzero(self._states == EntryState.HELD)[0]
        if not len(held):
            return np.full(len(numbers), -1)
        held = held[np.argsort(self._of_entries[held])]
        at = np.searchsorted(self._of_entries[held], numbers)
        at[at == len(held)] = 0
        return np.where(self._of_entries[held[at]] == numbers, held[at], -1)

    def _versions(self, slots: np.ndarray) -> np.ndarray:
        """Return the version at the lease of each slot's group; -1: its number was dropped. [n] ->
        [n].
        """
        at = self._held(self.numbers[slots])
        return np.where(at < 0, -1, self.entries[at, Entry.VERSION])

    def too_old(self, slots: np.ndarray, number: int) -> np.ndarray:
        """Return which slots are of groups that rollout batch `number` must not have.

        They are counted as dropped.

        Leases that are too old end. A death before these slots are evicted is repaired by the next
        call, as their numbers have no entry. [n] -> [n], bool.
        """
        is_old = self._has_version() & (self.entries[:, Entry.VERSION] + self.spec.max_lag < number)
        if is_old.any():
            self.counts[PromptCount.RETURNS] += np.count_nonzero(
                is_old & (self._states == EntryState.LEASED)
            )
            self._states[is_old] = EntryState.LEFT + Left.TOO_OLD
            self._sweep()
        return self._versions(slots) < 0

    def lease(self, count: int) -> list[LeaseRecord]:
        """Lease up to `count` numbers: those that came back, the smallest first, then admitted new
        ones.
        """
        self.reclaim()
        return self._take(count)

    def update(self) -> None:
        """Bring the entries up to date, as ranks do now and then: leases that have ended return."""
        self.reclaim()

    def _take(self, count: int) -> list[LeaseRecord]:
        words = self.counts
        spec = self.spec
        version = version_of(self.spec, self.views)
        if version < 0:
            return []
        returned = np.nonzero(self._states == EntryState.RETURNED)[0]
        returned = returned[np.argsort(self._of_entries[returned])][:count]
        found = [self._give(entry, version) for entry in returned.tolist()]
        free = np.nonzero(self._states == EntryState.FREE)[0].tolist()
        busy = len(self.entries) - len(free)
        before = self._before(busy)
        wanted = count - len(found)
        if (
            spec.num_stores > 1
        ):  # where the others drop theirs, more than its share of a window are its own
            room = len(self._slots) // spec.size - num_in_training(spec, self.views) - busy
            wanted = max(min(wanted, room), 0)
        for entry in free[:wanted]:
            if not may_lease(before, version, spec.groups, spec.max_lag):
                break
            self.entries[entry, [Entry.NUMBER, Entry.ATTEMPT, Entry.KEPT]] = self._next, 0, 0
            found.append(self._give(entry, version))
            words[PromptCount.ISSUED] += 1
            before += spec.num_stores
        return found

    def _before(self, busy: int) -> int:
        """Return how many numbers, counted from that of the first batch, come before the next one.

        Those that are known to be dropped are left out; `busy` ones of this store have not left.
        """
        if self.spec.num_stores == 1:
            return self.num_selected * self.spec.groups + busy
        others = (
            self._next - int(self.counts[PromptCount.ISSUED]) + int(self.counts[PromptCount.OTHERS])
        )
        return others + int(self._left[0, Left.DRAWN]) + busy

    def _give(self, entry: int, version: int) -> LeaseRecord:
        words = self.entries[entry]
        token = int(self.counts[PromptCount.LEASES]) + 1
        attempt = int(words[Entry.ATTEMPT]) + 1
        until = self._now_ns() + self._lease_ns
        self.counts[PromptCount.LEASES] = token
        kept = self.kept(entry)
        version = int(words[Entry.VERSION]) if kept else version  # of the oldest token
        words[Entry.OWNER : Entry.KEPT] = self._memory.peer, until, version, attempt, token, 0
        words[Entry.STATE] = EntryState.LEASED
        return LeaseRecord(entry, token, int(words[Entry.NUMBER]), version, attempt, kept)

    def kept(self, entry: int) -> bytes:
        """Return what the leases of an entry have kept."""
        length, copy = divmod(int(self.entries[entry, Entry.KEPT]), 2)
        return self._kept[entry, copy, :length].tobytes()

    def keep(self, lease: LeaseRecord, data: bytes) -> None:
        """Keep at most `keep_bytes` for the next lease of the number, and renew this one; raises as
        `own`.
        """
        copy = 1 - int(self.own(lease)[Entry.KEPT]) % 2
        self._kept[lease.entry, copy, : len(data)] = np.frombuffer(data, np.uint8)
        self.entries[lease.entry, Entry.KEPT] = 2 * len(data) + copy
        self.renew(lease)

    def own(self, lease: LeaseRecord) -> np.ndarray:
        """Return the words of a lease's entry.

        Raises:
            LeaseExpiredError: It has ended, and how; counted.
        """
        words: np.ndarray = self.entries[lease.entry]
        known = words[[Entry.STATE, Entry.TOKEN, Entry.NUMBER, Entry.VERSION]].tolist()
        if known != [EntryState.LEASED, lease.token, lease.number, lease.version]:
            self.counts[PromptCount.REFUSED] += 1
            ending, remedy = self._ending(lease)
            rule = f"must be held by this worker: {ending}"
            raise LeaseExpiredError(f"the lease of prompt {lease.number}", rule, None, remedy)
        return words

    def _ending(self, lease: LeaseRecord) -> tuple[str, str]:
        """Return how a lease has ended, as far as the ledger records it, and the remedy."""
        at = np.nonzero((self._of_entries == lease.number) & (self._states != EntryState.FREE))[0]
        if not len(at):
            return self._left_as(lease)
        words = self.entries[at[0]]
        state, attempt = words[[Entry.STATE, Entry.ATTEMPT]].tolist()
        is_own = bool(words[Entry.TOKEN] == lease.token)
        if state == EntryState.HELD:
            return (
                f"{'it' if is_own else f'attempt {attempt}'} was committed",
                "commit a group once",
            )
        if state == EntryState.LEASED:
            return f"it came back, and attempt {attempt} has its prompt", _HEARTBEAT
        if words[Entry.DEADLINE] < self._now_ns():
            lease_s = f"prompts.lease_s = {self.spec.lease_s:g} s"
            return (
                f"{lease_s} passed without a heartbeat, and its prompt waits for another lease",
                _HEARTBEAT,
            )
        given = (
            "it was given back, by fail(), the end of its worker or its gateway's session, "
            "or a load"
        )
        return f"{given}, and its prompt waits for another lease", "lease again"

    def _left_as(self, lease: LeaseRecord) -> tuple[str, str]:
        """Return as `_ending`, of a prompt that is not in the ledger: never again, or not yet."""
        spec = self.spec
        selected = self.num_selected
        if lease.number >= self._next:
            return "a checkpoint was loaded in which its prompt had not been leased", "lease again"
        if lease.version + spec.max_lag < selected:
            rule = (
                f"its prompt left, at the latest as too old: {selected} batches are selected, its "
                "version is "
            )
            return (
                f"{rule}{lease.version} and prompts.max_lag {spec.max_lag}",
                "raise max_lag, or be faster",
            )
        is_last = (
            f", as the last of {spec.attempts} attempts" if lease.attempt >= spec.attempts else ""
        )
        return f"its prompt was trained or dropped{is_last}", _HEARTBEAT

    def renew(self, lease: LeaseRecord) -> None:
        """Begin the time of a lease anew; raises as `own`, like the next ones."""
        self.own(lease)[Entry.DEADLINE] = self._now_ns() + self._lease_ns

    @contextmanager
    def committing(self, lease: LeaseRecord, members: int) -> Iterator[None]:
        """End a lease by a block that commits the `members` trajectories of its group, all or none.

        Where the process dies in the block, the entry has a number of members but is still leased:
        `recover` evicts what is committed. Raises as `own`, before the block.
        """
        words = self.own(lease)
        words[Entry.MEMBERS] = members
        yield
        words[Entry.STATE] = EntryState.HELD

    def fail(self, lease: LeaseRecord, reason: str, retry: bool) -> None:
        """End a lease without a group: it returns, or is dropped for the reason."""
        self.own(lease)
        self._return(lease.entry, _counter_of(self._reasons, reason.encode()), retry)

    def reclaim(self) -> None:
        """Return the leases whose worker has died or whose time has passed.

        Cost: a pass over the entries, and a system call for each process that holds some.
        """
        leased = np.nonzero(self._states == EntryState.LEASED)[0]
        owners, deadlines = self.entries[leased][:, [Entry.OWNER, Entry.DEADLINE]].T
        is_dead, is_late = ended(owners, deadlines, self._memory, self._now_ns())
        for entry in leased[is_dead].tolist():
            self._return(entry, Left.ENDED)
        for entry in leased[is_late & ~is_dead].tolist():
            self._return(entry, Left.EXPIRED)

    def note_waited(self, duration_ns: int) -> None:
        """Add to the time in which workers have waited for a lease."""
        self.counts[PromptCount.WAITED_NS] += duration_ns

    def release(self, peer: int, tokens: list[int] | None = None) -> None:
        """Return the leases of a process that ends, or whose index another one has now; or some of
        them.
        """
        is_own = (self._states == EntryState.LEASED) & (self.entries[:, Entry.OWNER] == peer)
        is_own &= tokens is None or np.isin(self.entries[:, Entry.TOKEN], tokens)
        for entry in np.nonzero(is_own)[0].tolist():
            self._return(entry, Left.ENDED)

    def _return(self, entry: int, counter: int, retry: bool = True) -> None:
        self.counts[PromptCount.RETURNS] += 1
        if retry and self.entries[entry, Entry.ATTEMPT] < self.spec.attempts:
            self._states[entry] = EntryState.RETURNED
        else:
            self._states[entry] = EntryState.LEFT + counter
            self._sweep()

    def progress(self) -> np.ndarray:
        """Return what the other stores need, once complete groups have stamps.

        [Progress.NUM_WORDS].
        """
        if self.spec.is_joint:
            slots = leaders(self.views)
            at = self._held(self.numbers[slots[np.argsort(self._completed[slots], kind="stable")]])
            new = at[(at >= 0) & (self.entries[at, Entry.STAMP] >= 0)]
            stamps = self.entries[at[at >= 0], Entry.STAMP]
            self._stamp = int(stamps[stamps < 0].max(initial=self._stamp)) + len(new)
            self.entries[new, Entry.STAMP] = self._stamp - len(new) + 1 + np.arange(len(new))
        known = self.counts[PromptCount.TRAINED]
        busy = np.count_nonzero(self._states)
        dropped = self.counts[PromptCount.ISSUED] - self._left[0, Left.DRAWN] - busy
        batches = trained_batches(self.views)
        store = self.spec.store
        return np.array([self._first_open, batches, store, known, dropped, self._stamp])

    def take_progress(self, stores: np.ndarray) -> None:
        """Take `progress` of all stores. [S, Progress.NUM_WORDS], int64.

        Every number before the first open one is held and complete, or has left, in each store, and
        stays so. Of an order of completion, drops of the others count from here on.
        """
        self._first = int(stores[:, Progress.FIRST_OPEN].min())
        self._stamp = int(stores[:, Progress.STAMP].max())
        known = stores[:, Progress.BATCHES].min(), stores[:, Progress.TRAINED].max()
        self._trained = int(max(known))
        self.note_trained(self._trained)
        if self.spec.is_joint:
            others = stores[stores[:, Progress.STORE] != self.spec.store]
            self.counts[PromptCount.OTHERS] = -others[:, Progress.DROPPED].sum()

    def note_trained(self, batches: int) -> None:
        """Note how many batches all ranks of all nodes have trained, at least."""
        self.counts[PromptCount.TRAINED] = max(int(self.counts[PromptCount.TRAINED]), batches)

    @property
    def num_held(self) -> int:
        """Groups of this store that are held, of numbers before the first open one of
        all stores.
        """
        return int(((self._states == EntryState.HELD) & (self._of_entries < self._first)).sum())

    def note_others(self, num_held: int, is_drawn: bool = False) -> None:
        """Take the `num_held` of the other stores, since which no batch was selected; `is_drawn`:
        one is.
        """
        selected = self.num_selected * self.spec.groups
        spec = self.spec
        if spec.is_joint:  # `take_progress` has taken what counts
            return
        before = self._first - spec.issued_below(self._first)
        drawn = int(self._left[0, Left.DRAWN])
        self.counts[PromptCount.OTHERS] = selected + num_held - before - drawn

    def leave(self, numbers: np.ndarray, counter: int) -> None:
        """Count held numbers whose groups leave the table; others are ignored. [n], int64."""
        entries = np.nonzero(
            (self._states == EntryState.HELD) & np.isin(self._of_entries, numbers)
        )[0]
        if not len(entries):
            return
        if counter == Left.DRAWN:
            lag = self.num_selected - 1 - int(self.entries[entries, Entry.VERSION].min())
            self.counts[PromptCount.LARGEST_LAG] = max(
                int(self.counts[PromptCount.LARGEST_LAG]), lag
            )
        self._states[entries] = EntryState.LEFT + counter
        self._sweep()

    def _sweep(self) -> None:
        """Count the entries that are marked as left, and free them."""
        leaving = self._states >= EntryState.LEFT
        left = self._states[leaving] - EntryState.LEFT
        numbers = self._of_entries[leaving]
        self._left[1] = self._left[0]
        self._epochs[1] = self._epochs[0]
        for number, counter in zip(numbers.tolist(), left.tolist(), strict=True):
            self._count(1, number, counter)
        self.counts[PromptCount.SWEEPING] = 1
        self._finish_sweep()

    def _count(self, copy: int, number: int, counter: int, by: int = 1) -> None:
        """Add to the counter of a number that has left, and to its epoch's unless a later one has
        it.
        """
        self._left[copy, counter] += by
        epoch = number // self.spec.num_prompts
        row = self._epochs[copy, epoch % EPOCHS]
        if row[0] <= epoch:  # of an earlier one
            row[:] = 0
            row[0] = epoch + 1
        row[1 + counter] += by * (row[0] == epoch + 1)

    def _finish_sweep(self) -> None:
        self._left[0] = self._left[1]
        self._epochs[0] = self._epochs[1]
        self._states[self._states >= EntryState.LEFT] = EntryState.FREE
        self.counts[PromptCount.SWEEPING] = 0

    def recover(self, retire: Callable[[int], None]) -> None:
        """Finish what a dead process has begun, before groups are formed of it; `retire` evicts a
        slot.
        """
        if self.counts[PromptCount.SWEEPING]:
            self._finish_sweep()
        self._sweep()
        used = self._states != EntryState.FREE
        issued = self.spec.issued_below(int(self._of_entries[used].max(initial=-1)) + 1)
        self.counts[PromptCount.ISSUED] = max(int(self.counts[PromptCount.ISSUED]), issued)
        begun = (self._states == EntryState.LEASED) & (self.entries[:, Entry.MEMBERS] > 0)
        is_begun = np.isin(self.numbers[: len(self._slots)], self._of_entries[begun])
        for slot in np.nonzero(is_begun & (self._slots[:, Slot.STATE] == SlotState.COMMITTED))[
            0
        ].tolist():
            retire(slot)
        self.entries[begun, Entry.MEMBERS] = 0

    def export(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds: entries, words, counters and names of reasons."""
        words = {"prompt_counts": self.counts.copy(), "prompt_left": self._left[0].copy()}
        words["prompt_epochs"] = self._epochs[0].copy()
        used = np.nonzero(self._states != EntryState.FREE)[0]
        kept = self._kept[used, self.entries[used, Entry.KEPT] % 2]
        kept = kept[:, : int((self.entries[used, Entry.KEPT] // 2).max(initial=0))]
        names = {"prompt_entries": self.entries[used], "prompt_reasons": self._reasons.copy()}
        return {**words, **names, "prompt_kept": kept}

    def restore(self, saved: Mapping[str, np.ndarray], in_training: Sequence[int]) -> None:
        """Restore this store's part of what `merge` returned: leases are returned, and none counts
        any more.

        The first store has the counters of all, except of drawn groups whose rows others hold:
        `in_training` are the numbers of all that have some, ascending, where there are several
        stores.
        """
        spec = self.spec
        leases = int(self.counts[PromptCount.LEASES])
        every = saved["prompt_entries"]
        is_own = every[:, Entry.NUMBER] % spec.num_stores == spec.store
        entries = every[is_own]
        self._states[:] = EntryState.FREE
        self.entries[: len(entries)] = entries
        self.entries[:, Entry.KEPT] &= ~1
        self._kept[: len(entries), 0, : saved["prompt_kept"].shape[1]] = saved["prompt_kept"][
            is_own
        ]
        leased = self._states == EntryState.LEASED
        self.entries[leased, Entry.ATTEMPT] -= 1  # a load is no attempt
        self._states[leased] = EntryState.RETURNED
        stamps = every[every[:, Entry.STAMP] < 0, Entry.STAMP]
        self._stamp = int(stamps.max(initial=FIRST_STAMP))
        self.counts[:] = saved["prompt_counts"] * (spec.store == 0)
        self.counts[PromptCount.ISSUED] = spec.issued_below(
            int(saved["prompt_counts"][PromptCount.ISSUED])
        )
        self.counts[PromptCount.LEASES] = max(leases, int(self.counts[PromptCount.LEASES]))
        # Nothing is leased until the next round of the stores, nor between `take_progress` and
        # `note_others`.
        self.counts[[PromptCount.TRAINED, PromptCount.OTHERS]] = -1, 1 << 40
        self._epochs[0] = saved["prompt_epochs"] * (spec.store == 0)
        self._left[0] = saved["prompt_left"] * (spec.store == 0)
        self._reasons[:] = saved["prompt_reasons"]
        for number in in_training:
            self._count(
                0, number, Left.DRAWN, (number % spec.num_stores == spec.store) - (spec.store == 0)
            )


def merge(stores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merge what the ledgers of all stores have exported into what a ledger of one store exports.

    Numbers that a store has not issued, though another one has issued a later one, are returned
    ones.
    """
    every = np.array([one["prompt_counts"] for one in stores])
    following = every[:, PromptCount.ISSUED] * len(stores) + np.arange(len(stores))
    counts = every.sum(0)
    counts[PromptCount.ISSUED] = issued = max(int(following.max()) - len(stores) + 1, 0)
    counts[PromptCount.LARGEST_LAG] = every[:, PromptCount.LARGEST_LAG].max()
    skipped = np.concatenate(
        [np.arange(first, issued, len(stores)) for first in following.tolist()]
    )
    returned = np.zeros((len(skipped), Entry.NUM_WORDS), np.int64)
    returned[:, Entry.STATE] = EntryState.RETURNED
    returned[:, Entry.NUMBER] = skipped
    left = np.zeros(MOST_REASONS, np.int64)
    reasons = np.zeros(MOST_REASONS, f"S{REASON_BYTES}")
    epochs = dict[int, np.ndarray]()
    for one in stores:
        names = enumerate(one["prompt_reasons"].tolist())
        to = [_counter_of(reasons, name) if name else counter for counter, name in names]
        np.add.at(left, to, one["prompt_left"])
        for epoch, *counters in one["prompt_epochs"].tolist():
            np.add.at(epochs.setdefault(epoch, np.zeros(MOST_REASONS, np.int64)), to, counters)
    of_epochs = np.zeros((EPOCHS, 1 + MOST_REASONS), np.int64)
    for epoch in sorted(epochs.keys() - {0}):
        of_epochs[(epoch - 1) % EPOCHS] = epoch, *epochs[epoch]
    entries = np.concatenate([*(one["prompt_entries"] for one in stores), returned])
    kept = np.zeros((len(entries), max(one["prompt_kept"].shape[1] for one in stores)), np.uint8)
    first = 0
    for one in stores:
        rows, most = one["prompt_kept"].shape
        kept[first : first + rows, :most] = one["prompt_kept"]
        first += rows
    words = {
        "prompt_counts": counts,
        "prompt_left": left,
        "prompt_epochs": of_epochs,
        "prompt_kept": kept,
    }
    return {**words, "prompt_entries": entries, "prompt_reasons": reasons}


def _counter_of(reasons: np.ndarray, name: bytes) -> int:
    """Return the counter of a reason, which gets one if there is room."""
    for counter in range(len(FIXED_REASONS), OTHER_REASON):
        if reasons[counter] in (b"", name):
            reasons[counter] = name
            return counter
    return OTHER_REASON


def trained_batches(views: Mapping[str, np.ndarray]) -> int:
    """Return the rollout batches that all ranks of this node have trained, by a store's regions."""
    return int(
        min(views["stream/train/consumed"].min(), views["stream/train/position"][Head.NUMBER])
    )


def version_of(spec: PromptSpec, views: Mapping[str, np.ndarray]) -> int:
    """Return the rollout batches that all ranks have trained, of all nodes; -1: not known since a
    load.
    """
    known = int(views["prompt_counts"][PromptCount.TRAINED])
    return trained_batches(views) if spec.num_stores == 1 else known


def num_in_training(spec: PromptSpec, views: Mapping[str, np.ndarray]) -> int:
    """Return how many groups of this store are in untrained batches. Cost: of several, a pass over
    slots.
    """
    if spec.num_stores == 1:
        return (
            int(views["stream/train/position"][Head.NUMBER]) - trained_batches(views)
        ) * spec.groups
    is_drawn = views["slots"][:, Slot.STATE] == SlotState.EVICTED
    is_drawn &= views["stream/train/last_drawn"] >= trained_batches(views)
    return int(is_drawn.sum()) // spec.size


def incomplete(
    spec: PromptSpec, views: Mapping[str, np.ndarray], numbers: np.ndarray
) -> np.ndarray:
    """Return which entries hold a group that has no leader yet: it lacks late columns. [entries],
    bool.
    """
    words = views["prompt_entries"]
    is_held: np.ndarray = words[:, Entry.STATE] == EntryState.HELD
    if not (spec.needs and is_held.any()):
        return np.zeros(len(words), bool)
    return is_held & ~np.isin(words[:, Entry.NUMBER], numbers[leaders(views)])


def leaders(views: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the leaders of a store's complete groups. [n], int64."""
    slots = views["slots"]
    is_led = views["groups"][:, SlotGroup.LEADER] == np.arange(1, len(slots) + 1)
    return np.nonzero(is_led & (slots[:, Slot.STATE] == SlotState.COMMITTED))[0]

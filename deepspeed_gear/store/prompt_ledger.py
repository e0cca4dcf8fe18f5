"""Prompt ledger: leases of a table's prompts, and the order in which batches take their groups.

Its parts: the options and the words of its records (`prompt_spec`), how many numbers are in each
state (`prompt_account`), draws of prompts by their priorities (`prompt_masses`), and the ledger of
a store that outlives its job (`kept_ledger`). Late columns are leased by the `fill_ledger`.

Numbers are issued in their order, to rollout workers that lease them. An entry holds a number until
its group leaves the table: leased, returned, or held (committed and not drawn yet). Then a counter
has it: drawn, or dropped for a reason. So at every moment under the lock

    issued = entries + drawn + dropped, by reason

and likewise for each of the latest epochs, and for all earlier ones together.

Batches take groups in the order of the numbers of all stores, which send each other their progress
in the rounds of a selection (`progress`, `take_progress`, `note_others`). Or they take them in one
order of completion, by stamps that are given in these rounds (`due`, `merged`).

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
from typing import NamedTuple

import numpy as np

from deepspeed_gear.errors import LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.prompt_account import PromptAccount
from deepspeed_gear.store.prompt_masses import PromptMasses, merge_masses
from deepspeed_gear.store.prompt_spec import (
    EPOCHS,
    FIRST_STAMP,
    MOST_REASONS,
    REASON_BYTES,
    Entry,
    EntryState,
    Left,
    Progress,
    PromptCount,
    PromptSpec,
    counter_of,
)
from deepspeed_gear.store.row_allocator import have_ended, look_up
from deepspeed_gear.store.shared_memory import SharedMemory

_HEARTBEAT = "call heartbeat() more often, or raise prompts.lease_s"


class LeaseRecord(NamedTuple):
    """A lease as its ledger has issued it: of a prompt, or of a trajectory without a late column.

    A process holds it until it commits it, gives it back or dies, or until its time has passed.
    A death or a passed deadline changes nothing by itself: the ledger checks for both before it
    leases the work again.
    """

    entry: int  # where the ledger keeps it: the entry of a prompt, the slot of a trajectory
    token: int  # differs for each lease of the entry: its number among the leases of all prompts
    number: int  # what is leased: the number of a prompt, the id of a trajectory
    version: int = 0  # of a prompt: rollout batches that were trained when it was leased
    attempt: int = 1  # of a prompt: leases of it, with this one
    kept: bytes = b""  # of a prompt: what the leases before have kept
    origin: str = ""  # where it counts: run and table if remote, `Table.lineage` of a trajectory
    num_steps: int = 0  # of a trajectory
    place: int = -1  # of a prompt: its place in the data set, which `LocalLedger` looks up


class PromptLedger:
    """The ledger of a table. Every method requires the table's lock.

    Args:
        views: The store's regions.
        numbers: Column of group numbers, by slot.
        memory: The store's; its locks show which processes are alive.
        now_ns: Monotonic nanoseconds.
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
        self.numbers = numbers
        self.account = PromptAccount(spec, views, numbers)
        self._memory = memory
        self._now_ns = now_ns
        self.entries = views["prompt_entries"]
        self.counts = views["prompt_counts"]
        self._left = views["prompt_left"]
        self._reasons = views["prompt_reasons"]
        self._kept = views["prompt_kept"]
        self._epochs = views["prompt_epochs"]
        self._slots = views["slots"]
        #: Masses by which the prompts of numbers are drawn; None: numbers determine their prompts.
        self.masses = PromptMasses(spec, views) if spec.draws else None
        self._lease_ns = int(spec.lease_s * 1e9)
        self._completed: np.ndarray = views["groups"][:, SlotGroup.NUMBER]  # of leaders, in order
        self._states: np.ndarray = self.entries[:, Entry.STATE]
        self._of_entries: np.ndarray = self.entries[:, Entry.NUMBER]
        # Of several stores, as of the latest round: the first open number, the largest stamp, the
        # trained batches, and how many entries are due by each batch from the next one on.
        self._first = 0
        self._stamp = FIRST_STAMP
        self._trained = 0
        self._num_due = np.zeros(spec.max_lag + 1, np.int64)

    @property
    def num_selected(self) -> int:
        """Rollout batches that were selected: the number of the next one."""
        return self.account.num_selected

    @property
    def _next(self) -> int:
        """The number that is issued next."""
        return int(self.counts[PromptCount.ISSUED]) * self.spec.num_stores + self.spec.store

    @property
    def _first_open(self) -> int:
        """This store's first number that is leased, returned, incomplete, or not issued yet."""
        is_open = (self._states == EntryState.LEASED) | (self._states == EntryState.RETURNED)
        is_open |= self.account.incomplete()
        return int(self._of_entries[is_open].min(initial=self._next))

    # ---- leases ----------------------------------------------------------------------------------

    def lease(self, count: int) -> list[LeaseRecord]:
        """Lease up to `count` numbers: those that came back, the smallest first, then new ones."""
        self.reclaim()
        return self._issue(count)

    def update(self) -> None:
        """Bring the entries up to date, as ranks do now and then: leases that have ended return."""
        self.reclaim()
        self._issue(0)

    def reclaim(self) -> None:
        """Return the leases whose worker has died or whose time has passed.

        Cost: a pass over the entries, and a system call for each process that holds some.
        """
        leased = np.nonzero(self._states == EntryState.LEASED)[0]
        is_dead = have_ended(self.entries[leased, Entry.OWNER], self._memory)
        is_late = self.entries[leased, Entry.DEADLINE] < self._now_ns()
        for entry in leased[is_dead].tolist():
            self._return(entry, Left.ENDED)
        for entry in leased[is_late & ~is_dead].tolist():
            self._return(entry, Left.EXPIRED)

    def _issue(self, count: int) -> list[LeaseRecord]:
        spec = self.spec
        version = self.account.version
        if version < 0 or not count:
            return []
        returned = np.nonzero(self._states == EntryState.RETURNED)[0]
        returned = returned[np.argsort(self._of_entries[returned])][:count]
        leases = [self._give(entry, version) for entry in returned.tolist()]
        free = np.nonzero(self._states == EntryState.FREE)[0].tolist()
        busy = len(self.entries) - len(free)
        before = self._before(busy)
        wanted = count - len(leases)
        if spec.num_stores > 1:
            # The others may drop numbers of theirs: then more than this store's share of a window
            # is admitted, and its table must have room for the groups.
            room = len(self._slots) // spec.size - self.account.num_in_training - busy
            wanted = max(min(wanted, room), 0)
        for entry in free[:wanted]:
            if not spec.may_lease(before, version):
                break
            new = [Entry.NUMBER, Entry.ATTEMPT, Entry.KEPT, Entry.PROMPT]
            self.entries[entry, new] = self._next, 0, 0, -1
            leases.append(self._give(entry, version))
            self.counts[PromptCount.ISSUED] += 1
            before += spec.num_stores
        return leases

    def _before(self, busy: int) -> int:
        """Return how many numbers, counted from that of the first batch, come before the next one.

        Those that are known to be dropped are left out; `busy` ones of this store have not left.
        """
        if self.spec.num_stores == 1:
            return self.num_selected * self.spec.groups + busy
        others = self._next - int(self.counts[PromptCount.ISSUED])
        others += int(self.counts[PromptCount.OTHERS])
        return others + int(self._left[0, Left.DRAWN]) + busy

    def _give(self, entry: int, version: int) -> LeaseRecord:
        words = self.entries[entry]
        token = int(self.counts[PromptCount.LEASES]) + 1
        attempt = int(words[Entry.ATTEMPT]) + 1
        until = self._now_ns() + self._lease_ns
        self.counts[PromptCount.LEASES] = token
        length, copy = divmod(int(words[Entry.KEPT]), 2)
        kept = self._kept[entry, copy, :length].tobytes()
        version = int(words[Entry.VERSION]) if kept else version  # of the oldest token
        draws = self.masses is not None and words[Entry.PROMPT] < 0
        if self.masses is not None and draws:
            words[Entry.PROMPT] = self.masses.draw(int(words[Entry.NUMBER]))
        words[Entry.OWNER : Entry.KEPT] = self._memory.peer, until, version, attempt, token, 0
        words[Entry.STATE] = EntryState.LEASED  # last: a death before leaves no lease
        if self.masses is not None and draws:
            self.masses.note(int(words[Entry.PROMPT]), int(words[Entry.NUMBER]))
        return LeaseRecord(entry, token, int(words[Entry.NUMBER]), version, attempt, kept)

    def drawn(self, lease: LeaseRecord) -> int:
        """Return which of the prompts that `where` admits a lease has, where they are drawn."""
        return int(self.own(lease)[Entry.PROMPT])

    def renew(self, lease: LeaseRecord) -> None:
        """Begin the time of a lease anew; raises as `own`, like the next ones."""
        self.own(lease)[Entry.DEADLINE] = self._now_ns() + self._lease_ns

    def keep(self, lease: LeaseRecord, data: bytes) -> None:
        """Keep at most `keep_bytes` for the next lease of the number, and renew this one."""
        # Written to the copy that does not count; then one word names its length and the copy.
        copy = 1 - int(self.own(lease)[Entry.KEPT]) % 2
        self._kept[lease.entry, copy, : len(data)] = np.frombuffer(data, np.uint8)
        self.entries[lease.entry, Entry.KEPT] = 2 * len(data) + copy
        self.renew(lease)

    @contextmanager
    def committing(self, lease: LeaseRecord, slots: Sequence[int] | np.ndarray) -> Iterator[None]:
        """End a lease by a block that commits the slots of its group, all or none.

        Where the process dies in the block, the entry has a number of trajectories but is still
        leased: `recover` evicts what is committed.
        """
        words = self.own(lease)
        words[Entry.MEMBERS] = len(slots)
        yield
        words[Entry.STATE] = EntryState.HELD

    def fail(self, lease: LeaseRecord, reason: str, retry: bool) -> None:
        """End a lease without a group: it returns, or is dropped for the reason."""
        self.own(lease)
        self._return(lease.entry, counter_of(self._reasons, reason.encode()), retry)

    def release(self, peer: int, tokens: list[int] | None = None) -> None:
        """Return the leases of a process that ends or that had the index of another; or some."""
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

    def note_waited(self, duration_ns: int) -> None:
        """Add to the time in which workers have waited for a lease."""
        self.counts[PromptCount.WAITED_NS] += duration_ns

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
        """Return how a lease has ended, as far as the ledger has it, and the remedy."""
        at = np.nonzero((self._of_entries == lease.number) & (self._states != EntryState.FREE))[0]
        if not len(at):
            return self._left_as(lease)
        words = self.entries[at[0]]
        state, attempt = words[[Entry.STATE, Entry.ATTEMPT]].tolist()
        if state == EntryState.HELD:
            which = "it" if words[Entry.TOKEN] == lease.token else f"attempt {attempt}"
            return f"{which} was committed", "commit a group once"
        if state == EntryState.LEASED:
            return f"it came back, and attempt {attempt} has its prompt", _HEARTBEAT
        waits = "and its prompt waits for another lease"
        if words[Entry.DEADLINE] < self._now_ns():
            lease_s = f"prompts.lease_s = {self.spec.lease_s:g} s"
            return f"{lease_s} passed without a heartbeat, {waits}", _HEARTBEAT
        by = "by fail(), the end of its worker or its gateway's session, or a load"
        return f"it was given back, {by}, {waits}", "lease again"

    def _left_as(self, lease: LeaseRecord) -> tuple[str, str]:
        """Return as `_ending`, of a prompt that has no entry: not any more, or not yet."""
        spec = self.spec
        selected = self.num_selected
        if lease.number >= self._next:
            return "a checkpoint was loaded in which its prompt had not been leased", "lease again"
        if lease.version + spec.max_lag < selected:
            rule = f"its prompt left, at the latest as too old: {selected} batches are selected"
            lag = f"its version is {lease.version} and prompts.max_lag {spec.max_lag}"
            return f"{rule}, {lag}", "raise max_lag, or be faster"
        is_last = lease.attempt >= spec.attempts
        last = f", as the last of {spec.attempts} attempts" if is_last else ""
        return f"its prompt was trained or dropped{last}", _HEARTBEAT

    # ---- the order in which groups are drawn -----------------------------------------------------

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

    def _by_completion(self, slots: np.ndarray) -> np.ndarray:
        """Return leaders as they were completed, but first those that must come now.

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
        """Return the order of groups: those that must come now, and the others.

        With 2 groups a batch and num_due [1, 4], one entry is due by the next batch, and 4 by the
        batch after it, which has 2 groups: so 2 must come now, the first of which is that one.

        Args:
            due: Batch by which each complete group is due, in the order of completion. [n], int64.
            num_due: Entries of all stores that are due by each batch, from the next one on.
                [max_lag + 1], int64.
        Returns:
            Indices into `due`; none if the batch waits for groups that are not complete.
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

    def _has_version(self) -> np.ndarray:
        """Return which entries were generated for: leased, held, or returned with what was kept."""
        is_kept = (self._states == EntryState.RETURNED) & (self.entries[:, Entry.KEPT] > 1)
        return np.asarray(is_kept | np.isin(self._states, (EntryState.LEASED, EntryState.HELD)))

    def _held(self, numbers: np.ndarray) -> np.ndarray:
        """Return the entry of each number that is held; -1: it is not. [n] -> [n]."""
        held = np.nonzero(self._states == EntryState.HELD)[0]
        held = held[np.argsort(self._of_entries[held])]
        return look_up(self._of_entries[held], numbers, held)

    def _versions(self, slots: np.ndarray) -> np.ndarray:
        """Return each slot's version at the lease; -1: its number was dropped. [n] -> [n]."""
        at = self._held(self.numbers[slots])
        return np.where(at < 0, -1, self.entries[at, Entry.VERSION])

    # ---- groups leave ----------------------------------------------------------------------------

    def too_old(self, slots: np.ndarray, number: int) -> np.ndarray:
        """Return which slots are of groups that rollout batch `number` must not have; count them.

        Leases that are too old end. A death before these slots are evicted is repaired by the next
        call, as their numbers have no entry. [n] -> [n], bool.
        """
        is_old = self._has_version() & (self.entries[:, Entry.VERSION] + self.spec.max_lag < number)
        if is_old.any():
            num_leased = np.count_nonzero(is_old & (self._states == EntryState.LEASED))
            self.counts[PromptCount.RETURNS] += num_leased
            self._states[is_old] = EntryState.LEFT + Left.TOO_OLD
            self._sweep()
        return self._versions(slots) < 0

    def leave(self, numbers: np.ndarray, counter: int) -> None:
        """Count held numbers whose groups leave the table; others are ignored. [n], int64."""
        is_held = self._states == EntryState.HELD
        entries = np.nonzero(is_held & np.isin(self._of_entries, numbers))[0]
        if not len(entries):
            return
        if counter == Left.DRAWN:
            lag = self.num_selected - 1 - int(self.entries[entries, Entry.VERSION].min())
            largest = int(self.counts[PromptCount.LARGEST_LAG])
            self.counts[PromptCount.LARGEST_LAG] = max(largest, lag)
        self._states[entries] = EntryState.LEFT + counter
        self._sweep()

    def _sweep(self) -> None:
        """Count the entries that are marked as left, and free them.

        A death before SWEEPING is set leaves the old counters and the marks, which the next sweep
        counts; after it the new counters, which `_finish_sweep` puts in place. So each is counted
        once.
        """
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
        """Add to a counter of numbers that have left, and to its epoch's, if it still has one."""
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

    # ---- several stores --------------------------------------------------------------------------

    def progress(self) -> np.ndarray:
        """Return this store's words of `Progress`; stamp the groups that are newly complete."""
        if self.spec.is_joint:
            # With a largest stamp of -90, two newly complete groups get -89 and -88.
            slots = self.account.leaders()
            at = self._held(self.numbers[slots[np.argsort(self._completed[slots], kind="stable")]])
            new = at[(at >= 0) & (self.entries[at, Entry.STAMP] >= 0)]
            stamps = self.entries[at[at >= 0], Entry.STAMP]
            largest = int(stamps[stamps < 0].max(initial=self._stamp))
            self.entries[new, Entry.STAMP] = largest + 1 + np.arange(len(new))
            self._stamp = largest + len(new)
        known = self.counts[PromptCount.TRAINED]
        busy = np.count_nonzero(self._states)
        dropped = self.counts[PromptCount.ISSUED] - self._left[0, Left.DRAWN] - busy
        batches = self.account.trained_here
        return np.array([self._first_open, batches, self.spec.store, known, dropped, self._stamp])

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
        """Held groups of this store with numbers before the first open one of all stores."""
        return int(((self._states == EntryState.HELD) & (self._of_entries < self._first)).sum())

    def note_others(self, num_held: int, is_drawn: bool = False) -> None:
        """Take the `num_held` of the other stores, as of a round in which no batch is selected.

        `is_drawn`: the round is followed by the selection of one.
        """
        if self.spec.is_joint:  # `take_progress` has taken what counts
            return
        selected = self.num_selected * self.spec.groups
        before = self._first - self.spec.issued_below(self._first)
        drawn = int(self._left[0, Left.DRAWN])
        self.counts[PromptCount.OTHERS] = selected + num_held - before - drawn

    def _by_stamp(self, slots: np.ndarray) -> np.ndarray:
        """Return the leaders that the next batch of all stores may have, by completion."""
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
        """Return whether no group that must come now is missing, by `due` of all stores: [S, n]."""
        if not self.spec.is_joint:
            return True
        self._num_due, num_complete = np.split(due.sum(0), 2)
        must = self._num_due - np.arange(self.spec.max_lag + 1) * self.spec.groups
        return self.spec.late == "drop" or bool((num_complete >= must).all())

    def marks(self, numbers: np.ndarray) -> np.ndarray:
        """Return the stamp of each held number, and the batch by which it is due. [n] -> [n, 2]."""
        words = self.entries[self._held(numbers)]
        due = words[:, Entry.VERSION] + self.spec.max_lag
        return np.stack([words[:, Entry.STAMP], due], axis=1)

    def merged(self, numbers: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Return the order of the complete groups of all stores. [n] and [n, 2] -> [n]."""
        order = np.lexsort((numbers, marks[:, 0]))
        return np.asarray(order[self._due_first(marks[order, 1], self._num_due)])

    # ---- deaths and checkpoints ------------------------------------------------------------------

    def recover(self, retire: Callable[[int], None]) -> None:
        """Finish the writes of a dead process, before groups form; `retire` evicts a slot."""
        if self.counts[PromptCount.SWEEPING]:
            self._finish_sweep()
        self._sweep()
        used = self._states != EntryState.FREE
        issued = self.spec.issued_below(int(self._of_entries[used].max(initial=-1)) + 1)
        self.counts[PromptCount.ISSUED] = max(int(self.counts[PromptCount.ISSUED]), issued)
        if self.masses is not None:
            self.masses.recover(self.entries[used, Entry.PROMPT], self._of_entries[used])
        begun = (self._states == EntryState.LEASED) & (self.entries[:, Entry.MEMBERS] > 0)
        is_begun = np.isin(self.numbers[: len(self._slots)], self._of_entries[begun])
        is_committed = self._slots[:, Slot.STATE] == SlotState.COMMITTED
        for slot in np.nonzero(is_begun & is_committed)[0].tolist():
            retire(slot)
        self.entries[begun, Entry.MEMBERS] = 0

    def export(self) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint: entries, words, counters and names of reasons."""
        used = np.nonzero(self._states != EntryState.FREE)[0]
        kept = self._kept[used, self.entries[used, Entry.KEPT] % 2]
        most_kept = int((self.entries[used, Entry.KEPT] // 2).max(initial=0))
        return {
            "prompt_counts": self.counts.copy(),
            "prompt_left": self._left[0].copy(),
            "prompt_epochs": self._epochs[0].copy(),
            "prompt_entries": self.entries[used],
            "prompt_reasons": self._reasons.copy(),
            "prompt_kept": kept[:, :most_kept],
            **({} if self.masses is None else self.masses.export()),
        }

    def restore(self, saved: Mapping[str, np.ndarray], in_training: Sequence[int]) -> None:
        """Restore this store's part of what `merge` returned; leases become returned numbers.

        The first store has the counters of all, except of drawn groups whose rows others hold.

        Args:
            saved: Of all stores.
            in_training: Numbers of all drawn groups that some store has rows of, ascending, where
                there are several stores.
        """
        spec = self.spec
        counts = self.counts
        leases = int(counts[PromptCount.LEASES])
        every = saved["prompt_entries"]
        if self.masses is not None:
            every = every.copy()
            self.masses.restore(saved, every, int(saved["prompt_counts"][PromptCount.ISSUED]))
        is_own = every[:, Entry.NUMBER] % spec.num_stores == spec.store
        entries = every[is_own]
        kept = saved["prompt_kept"][is_own]
        self._states[:] = EntryState.FREE
        self.entries[: len(entries), : entries.shape[1]] = entries  # older saves have no PROMPT
        self.entries[:, Entry.KEPT] &= ~1  # in the first copy
        self._kept[: len(entries), 0, : kept.shape[1]] = kept
        leased = self._states == EntryState.LEASED
        self.entries[leased, Entry.ATTEMPT] -= 1  # a load is no attempt
        self._states[leased] = EntryState.RETURNED
        stamps = every[every[:, Entry.STAMP] < 0, Entry.STAMP]
        self._stamp = int(stamps.max(initial=FIRST_STAMP))
        is_first = int(spec.store == 0)
        counts[:] = saved["prompt_counts"] * is_first
        issued = int(saved["prompt_counts"][PromptCount.ISSUED])
        counts[PromptCount.ISSUED] = spec.issued_below(issued)
        # Tokens only grow: no lease from before the load equals one of those after it.
        counts[PromptCount.LEASES] = max(leases, int(counts[PromptCount.LEASES]))
        # Nothing is leased until the next round of the stores, nor between `take_progress` and
        # `note_others`.
        counts[[PromptCount.TRAINED, PromptCount.OTHERS]] = -1, 1 << 40
        self._epochs[0] = saved["prompt_epochs"] * is_first
        self._left[0] = saved["prompt_left"] * is_first
        self._reasons[:] = saved["prompt_reasons"]
        for number in in_training:
            is_here = int(number % spec.num_stores == spec.store)
            self._count(0, number, Left.DRAWN, is_here - is_first)


def merge(stores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merge the exported ledgers of all stores into the one that a single store would export.

    Numbers that a store has not issued, though another one has issued a later one, are returned
    ones: if store 0 of 2 has issued 0, 2 and 4, and store 1 only 1, 5 numbers are issued, and 3
    is returned.
    """
    every = np.array([one["prompt_counts"] for one in stores])
    following = every[:, PromptCount.ISSUED] * len(stores) + np.arange(len(stores))
    counts = every.sum(0)
    counts[PromptCount.ISSUED] = issued = max(int(following.max()) - len(stores) + 1, 0)
    counts[PromptCount.LARGEST_LAG] = every[:, PromptCount.LARGEST_LAG].max()
    skipped = np.concatenate(
        [np.arange(first, issued, len(stores)) for first in following.tolist()]
    )
    returned = np.zeros((len(skipped), stores[0]["prompt_entries"].shape[1]), np.int64)
    returned[:, Entry.STATE] = EntryState.RETURNED
    returned[:, Entry.NUMBER] = skipped
    returned[:, Entry.PROMPT :] = -1
    left = np.zeros(MOST_REASONS, np.int64)
    reasons = np.zeros(MOST_REASONS, f"S{REASON_BYTES}")
    epochs = dict[int, np.ndarray]()
    for one in stores:
        names = enumerate(one["prompt_reasons"].tolist())
        to = [counter_of(reasons, name) if name else counter for counter, name in names]
        np.add.at(left, to, one["prompt_left"])
        for epoch, *counters in one["prompt_epochs"].tolist():
            np.add.at(epochs.setdefault(epoch, np.zeros(MOST_REASONS, np.int64)), to, counters)
    of_epochs = np.zeros((EPOCHS, 1 + MOST_REASONS), np.int64)
    for epoch in sorted(epochs.keys() - {0}):  # a later epoch takes the row of an earlier one
        of_epochs[(epoch - 1) % EPOCHS] = epoch, *epochs[epoch]
    most_kept = max(one["prompt_kept"].shape[1] for one in stores)
    kept = [
        np.pad(rows, ((0, 0), (0, most_kept - rows.shape[1])))
        for rows in (*(one["prompt_kept"] for one in stores), np.zeros((len(skipped), 0), np.uint8))
    ]
    return {
        "prompt_counts": counts,
        "prompt_left": left,
        "prompt_epochs": of_epochs,
        "prompt_kept": np.concatenate(kept),
        "prompt_entries": np.concatenate([*(one["prompt_entries"] for one in stores), returned]),
        "prompt_reasons": reasons,
        **merge_masses(stores),
    }

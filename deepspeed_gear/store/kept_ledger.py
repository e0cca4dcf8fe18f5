"""Prompt ledger of a store that outlives its job: its groups are not generated again.

A group that was drawn, and one that is not in a loaded checkpoint, is retired: its rows stay until
writers need them. Where its number is to be leased, the group is committed again instead, with the
late columns that it has. So a new job and a load only retire what the store has (`begin`), and may
die at any instruction: whole groups are found again by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.fill_ledger import FillLedger
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.prompt_ledger import LeaseRecord, PromptLedger
from deepspeed_gear.store.prompt_spec import Entry, EntryState, PromptCount, PromptSpec
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.store.row_allocator import RowAllocator
from deepspeed_gear.store.shared_memory import SharedMemory

Views = Mapping[str, np.ndarray]
# Words of a store's life.
_IS_BEGUN = 0  # 1: no number is leased until a rank asks, and a death is followed by `begin`
_END = 1  # numbers below it may have retired groups
_TOKEN = 2  # the latest lease before the latest start or load
# Of several stores in the order of completion. The words from _SHARES on are how many more entries
# of this store may be due by each batch, from the next one on. They hold for so many trained
# batches; with _VOID not before the next round of the stores, with _UNKNOWN not before the first.
_SETTLED = 3
_SHARES = 4
_VOID = -1
_UNKNOWN = -2


class KeptLedger(PromptLedger):
    """The ledger of a store that outlives its job. Every method requires the table's lock."""

    def __init__(
        self,
        of: PromptSpec,
        views: Views,
        numbers: np.ndarray,
        memory: SharedMemory,
        extents: RowAllocator,
    ) -> None:
        super().__init__(of, views, numbers, memory)
        self._extents = extents
        self._life = views["life_words"]
        #: Trajectories of each slot's group, written before they are committed. Rows of a group are
        #: freed one trajectory at a time, so it is whole while so many have its number.
        self._sizes = views["group_sizes"]
        self._num_ranks = len(views["stream/train/consumed"])

    def _issue(self, count: int) -> list[LeaseRecord]:
        """Hold each next number that has a whole group in time, and lease up to `count` others.

        Numbers are taken in their order, up to the one that would be lease `count + 1`. A group
        that is not whole, or too old for its number, is freed.
        """
        if self._life[_IS_BEGUN] and self._memory.peer >= self._num_ranks:
            return []  # until a rank asks
        self._life[_IS_BEGUN] = 0
        if self._life[_SETTLED] == _UNKNOWN:
            return []
        leases = list[LeaseRecord]()
        revived = list[int]()
        while (number := self._following) < self._life[_END]:
            slots = self.retired(number)
            versions = self.views["retention"][slots, SlotRetention.POLICY_VERSION]
            version = int(versions.min(initial=1 << 62))
            is_kept = self._is_whole(slots) and self.is_in_time(number, version)
            taken = super()._issue(1) if is_kept or len(leases) < count else []
            if not taken:
                break
            if is_kept:
                self._hold(taken[0], slots, version)
                revived += slots.tolist()
            else:
                self._free(slots)
                leases += taken
        if self._following >= self._life[_END]:  # no later number has a group
            leases += super()._issue(count - len(leases))
        if revived:
            self._extents.rebuild()
        for slot in revived:
            self._extents.note(slot)
        return leases

    def _hold(self, lease: LeaseRecord, slots: np.ndarray, version: int) -> None:
        """Commit the retired group of a lease, which was generated with weights of a version."""
        self._shares(version)[:] -= 1
        self.own(lease)[Entry.VERSION] = version
        with super().committing(lease._replace(version=version), slots):
            self._revive(slots)

    def _is_whole(self, slots: np.ndarray) -> bool:
        """Return whether the retired slots of a number are all of its group."""
        return len(slots) > 0 and bool((self._sizes[slots] == len(slots)).all())

    def note_sizes(self, slots: np.ndarray) -> None:
        """Set the sizes of whole groups whose numbers are there, before they are committed."""
        _, index, counts = np.unique(self.numbers[slots], return_inverse=True, return_counts=True)
        self._sizes[slots] = counts[index]

    def is_in_time(self, number: int, version: int) -> bool:
        """Return whether a group of a version may hold a number, so that none becomes too old."""
        spec = self.spec
        selected = self.num_selected
        others = (self._states != EntryState.FREE) & (self._of_entries != number)
        if spec.order == "lease":
            before = self._before(int((others & (self._of_entries < number)).sum()))
            before -= self._of_others(self._next) - self._of_others(number)
            return spec.may_lease(before, version)
        newest = self.account.version  # that of entries without a group, at least
        if spec.is_joint:
            may = self._life[_SETTLED] == newest and version + spec.max_lag >= selected
            return version >= newest or bool(may and (self._shares(version) > 0).all())
        versions = np.where(self._has_version(), self.entries[:, Entry.VERSION], newest)[others]
        due = np.arange(version, newest + 1)
        # With this one, by each batch that is max_lag after one of `due`.
        num_due = (versions <= due[:, None]).sum(1) + 1
        return bool((num_due <= (due + spec.max_lag - selected + 1) * spec.groups).all())

    def _shares(self, version: int) -> np.ndarray:
        """Return the shares that an older group needs: by each batch before that of a new lease.

        With a max_lag of 2, batch 5 next, a version of 3 and leases of version 5, these are due by
        batches 5 and 7: the group needs shares of the batches 5 and 6, [0:2].
        """
        spec = self.spec
        newest = self.account.version
        at, end = (max(one + spec.max_lag - self.num_selected, 0) for one in (version, newest))
        return np.asarray(self._life[_SHARES:][at : end if spec.is_joint else at])

    def progress(self) -> np.ndarray:
        """Return this store's words of `Progress`; until `note_others` it has no shares."""
        self._life[_SETTLED] = min(int(self._life[_SETTLED]), _VOID)
        return super().progress()

    def note_others(self, num_held: int, is_drawn: bool = False) -> None:
        """Take the numbers held elsewhere, and a share of the free ones unless a batch is drawn."""
        super().note_others(num_held, is_drawn)
        spec = self.spec
        selected = self.num_selected
        if spec.is_joint:
            free = np.arange(1, spec.max_lag + 1) * spec.groups - self._num_due[: spec.max_lag]
            turn = (spec.store + selected) % spec.num_stores  # the shares add up to what is free
            shares = np.maximum((free + turn) // spec.num_stores, 0)
            self._life[_SHARES:] = 0 if is_drawn else shares
            self._life[_SETTLED] = self._trained

    def _of_others(self, number: int) -> int:
        """Return how many numbers below one are of other stores."""
        return number - self.spec.issued_below(number)

    @property
    def has_groups(self) -> bool:
        """Whether the number that is leased next may have a retired group."""
        return bool(self._following < self._life[_END] or self._life[_IS_BEGUN])

    @property
    def _following(self) -> int:
        """The number that is leased next: one that came back, else the one that is issued next."""
        return int(self._of_entries[self._states == EntryState.RETURNED].min(initial=self._next))

    @contextmanager
    def committing(self, lease: LeaseRecord, slots: Sequence[int] | np.ndarray) -> Iterator[None]:
        """End a lease as in any ledger; where its number is open, its group is retired."""
        if not self._is_open(lease.number):
            with super().committing(lease, slots):
                self._sizes[slots] = len(slots)
                yield
            return
        self._sizes[slots] = len(slots)
        self._life[_END] = max(int(self._life[_END]), lease.number + 1)
        yield
        self._retire_others()

    def renew(self, lease: LeaseRecord) -> None:
        if not self._is_open(lease.number):
            super().renew(lease)

    def _is_open(self, number: int) -> bool:
        """Return whether a number is to be leased, at first or again, and has no group."""
        is_returned = self._of_entries[self._states == EntryState.RETURNED] == number
        return bool(number >= self._next or is_returned.any()) and not len(self.retired(number))

    def retired(self, number: int | None = None) -> np.ndarray:
        """Return the retired slots, or those of a number. [n], int64."""
        is_retired = self._slots[:, Slot.STATE] == SlotState.EVICTED
        is_own = True if number is None else self.numbers[: len(is_retired)] == number
        return np.nonzero(is_retired & is_own)[0]

    def _revive(self, slots: np.ndarray) -> None:
        """Commit retired trajectories again, as new ones; the caller rebuilds derived state."""
        control = self._extents.control
        slots = slots[np.argsort(self._slots[slots, Slot.ID])]  # members stay in their order
        ids = control[Control.NEXT_ID] + np.arange(len(slots))
        self._slots[slots, Slot.ID] = ids * self.spec.num_stores + self.spec.store
        control[Control.NEXT_ID] += len(slots)
        self.views["groups"][slots] = 0
        self.views["retention"][slots, SlotRetention.TIMES_SAMPLED] = 0
        self._slots[slots, Slot.STATE] = SlotState.COMMITTED

    def _retire_others(self) -> None:
        """Retire committed trajectories of numbers that are not held."""
        committed = np.nonzero(self._slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        held = self._of_entries[self._states == EntryState.HELD]
        leaving = self.views["groups"][committed, SlotGroup.LEAVING] != 0
        for slot in committed[~leaving & ~np.isin(self.numbers[committed], held)].tolist():
            self._extents.retire(slot)

    def _free(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self._extents.free(slot)

    def begin(self, cleared: Sequence[str] = ()) -> None:
        """Retire whole groups, free the rest, and begin at number 0; `cleared` regions become 0."""
        life = self._life
        counts = self.counts
        states = self._slots[:, Slot.STATE]
        life[_IS_BEGUN] = 1
        life[_SETTLED] = _UNKNOWN if self.spec.is_joint else 0
        life[_TOKEN] = leases = max(int(counts[PromptCount.LEASES]), int(life[_TOKEN]))
        states[states == SlotState.COMMITTED] = SlotState.EVICTED
        is_rank = self._slots[:, Slot.OWNER] < self._num_ranks
        states[(states == SlotState.RESERVED) & is_rank] = SlotState.FREE
        retired = self.retired()
        self.views["retention"][retired, SlotRetention.TIMES_SAMPLED] = 0  # in this job
        numbers, index, found = np.unique(
            self.numbers[retired], return_inverse=True, return_counts=True
        )
        is_torn = np.zeros(len(numbers), bool)
        np.logical_or.at(is_torn, index, self._sizes[retired] != found[index])
        states[retired[is_torn[index]]] = SlotState.FREE
        life[_END] = numbers.max(initial=-1) + 1
        self._states[:] = EntryState.FREE
        self._left[:] = 0
        self._reasons[:] = b""
        counts[:] = 0
        self._epochs[:] = 0
        counts[PromptCount.LEASES] = leases
        counts[PromptCount.TRAINED] = -1  # until the stores have had a round
        self._extents.control[Control.SELECTING] = 0
        for name in (*cleared, "groups", "group_counts"):
            self.views[name][:] = 0
        FillLedger(self.views["fill_claims"], self._memory).clear()
        self.views["stream/train/consumed"][:] = self.num_selected  # none is in training
        self._extents.rebuild()

    def place(self, records: np.ndarray, saved: Views) -> tuple[np.ndarray, np.ndarray]:
        """Reserve slots and rows for a checkpoint's trajectories, after `begin`.

        Frees retired groups that the saved ledger holds or has counted, and others where there is
        no room.

        Args:
            records: Of trajectories that fit into the store. [n, 8], int64.
            saved: The ledger's, as `export`.
        Returns:
            Their slots, and the records with the new rows. [n] and [n, 8], int64.
        """
        entries = saved["prompt_entries"]
        retired = self.retired()
        moved = records.copy()
        is_open = np.isin(entries[:, Entry.STATE], (EntryState.LEASED, EntryState.RETURNED))
        numbers = self.numbers[retired]
        issued = saved["prompt_counts"][PromptCount.ISSUED]
        self._free(retired[(numbers < issued) & ~np.isin(numbers, entries[is_open, Entry.NUMBER])])
        sizes = records[:, [Slot.NUM_ROWS, Slot.NUM_STEPS]].tolist()
        while True:
            placed = np.array([self._extents.reserve(*one) for one in sizes], np.int64)
            if (placed >= 0).all():
                moved[:, Slot.FIRST_ROW] = self._slots[placed, Slot.FIRST_ROW]
                return placed, moved
            retired = self.retired()
            assert len(retired), "no other process holds rows"
            last = retired[np.argsort(self.numbers[retired])][len(retired) // 2 :]
            self._free(np.concatenate([placed[placed >= 0], last]))

    def recover(self, retire: Callable[[int], None]) -> None:
        """Repair as any ledger does; a start or load that was not finished begins anew."""
        if self._life[_IS_BEGUN]:
            self.begin()
        else:
            super().recover(retire)
            self._retire_others()

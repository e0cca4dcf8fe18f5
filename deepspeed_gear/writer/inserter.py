"""Inserter: checks trajectories, and reserves, copies and commits them and groups of leases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.episode_split import split_episodes
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.stored_values import check_finite
from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import DataError, StoreError, undo_on_error
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.eviction import NO_LATEST, Evictor
from deepspeed_gear.store.native_store import trajectory_reader
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.records import Head, Refusal
from deepspeed_gear.store.store_lock import TURN_S
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.group_members import check_group_size, listed_trajectories
from deepspeed_gear.writer.prompt_sharing import warn_of_repeated_prompts

Check = Callable[[dict[str, np.ndarray]], None]
Committed = Callable[[int], None]


@dataclass(frozen=True)
class CheckedTrajectory:
    """A trajectory that fits the schema, in the stored form; its values may not be finite."""

    columns: dict[str, np.ndarray]  # all of the schema, in its order; late ones may be zeros
    num_steps: int
    present: int  # bits of the late columns that it has

    def lacks(self, schema: Schema) -> set[str]:
        """Return the late columns that it has not."""
        late = [column.name for column in schema.late_columns]
        return {name for name in late if not self.present & schema.late_bits([name])}


class Inserter:
    """Adds the trajectories of this process to a table with a capacity.

    A whole trajectory of arrays, numbers and lists is added by one native call, unless its commit
    needs Python (media, returns-to-go, `committed`, groups with a rate limiter); else in Python,
    with the same result. One thread at a time.

    Args:
        table: Table to add to.
        context: Time limit and failure check of waits.
        max_length: Steps of the longest trajectory; None: no limit.
        checks: Called with the columns before anything changes; they raise a DataError.
        committed: Called with a committed slot and the lock held; its error evicts the trajectory.
        samples: Whether this process also samples from the table. Then it raises where waiting
            could only be ended by a selection of its own.
    """

    def __init__(
        self,
        table: Table,
        context: Context,
        max_length: int | None = None,
        checks: tuple[Check, ...] = (),
        committed: Committed | None = None,
        samples: bool = False,
    ) -> None:
        self.table = table
        self.timeout_s = context.timeout_s
        self.max_length = max_length
        self._checks = checks
        self._committed = committed
        self._samples = samples
        self.evictor = Evictor(table, context, samples)
        self._names = table.spec.schema.names
        self._name = f"table {table.spec.name}"
        self._columns = frozenset(self._names)
        self._position = table.views.get("stream/train/position")
        retention = table.spec.retention
        #: Name of the column of policy versions where ranks wait for open trajectories; else "".
        self.version_column = (retention.version_column or "") if retention.waits else ""
        self._open: dict[int, int] = {}  # oldest open policy version by id() of the writer
        self.growing: set[Any] = set()  # each `GrowingTrajectory` that may have published steps
        #: Not empty once the owner of a growing trajectory was deleted. A garbage collection may
        #: run in any statement, with the lock held: its callback only appends to this deque.
        self.dropped = deque[object](maxlen=1)
        self._late = bool(table.spec.schema.late_columns)
        self._opaque = any(column.is_opaque for column in table.spec.schema)
        spec = table.spec
        self._native = table.ops.native
        self._store = table.extents.handle
        self._address = self._store.address
        self._reader = trajectory_reader(self._native, spec, self._store, max_length)
        self._reader_address = self._reader.address
        self._has_warned = False  # of repeated prompts
        # Whole trajectories are stored by the native store where it stores them as Python does.
        # Before rows are reserved, a rate limiter brings groups up to date.
        is_plain = committed is None and not spec.return_to_go and spec.media is None
        limits_groups = table.groups is not None and spec.retention.rate_limiter is not None
        self._adds_natively = is_plain and not limits_groups
        # Columns that a check or an encoding reads first are converted in Python.
        self._reads_natively = not (checks or self._opaque)

    def vector_options(self) -> dict[str, Any]:
        """Return the arguments of `VectorSteps.set_store` that concern this table."""
        return {
            "of_store": self._address,
            "most": self.max_length or 0,
            # Whether the native call may store whole trajectories.
            "whole": self._adds_natively and self.table.groups is None and not self._checks,
            # Whether it may publish first steps, where no eviction is needed.
            "begins": not (
                self._checks or self._committed or self.table.ledger or self.table.media
            ),
            "timeout": TURN_S,
        }

    def add(self, trajectory: Mapping[str, Any]) -> int:
        """Add a trajectory and return its id; waits for free rows and for the rate limiter.

        Raises:
            DataError: It does not fit the schema, has an end flag before its last step, a value is
                not finite and must be, or its group already has `max_trajectories`; nothing is
                added. Values are checked while they are copied: trajectories that were evicted
                to free the rows stay evicted, and the next trajectory uses the rows.
            StoreFullError: Too few rows are free, and the table evicts nothing.
            NotReadyError: The ranks do not sample in time.
        """
        is_free = self.table.ledger is None  # else trajectories come by leases, as whole groups
        adds_natively = self._adds_natively and is_free
        if adds_natively and self._reads_natively:
            added = self._add_natively(trajectory)
            if added is not None:
                return added
        items = dict[int, MediaItem]()
        checked = self.checked(trajectory, items)
        if adds_natively:
            lacks = checked.lacks(self.table.spec.schema)
            given = {name: rows for name, rows in checked.columns.items() if name not in lacks}
            added = self._add_natively(given)
            if added is not None:
                return added
        return self._add_plainly(checked, items)

    def checked(
        self, trajectory: Mapping[str, Any], items: dict[int, MediaItem]
    ) -> CheckedTrajectory:
        """Check a trajectory and convert its columns to the stored form.

        Args:
            trajectory: As `Replay.add`.
            items: Media items by content id, to which those of the trajectory are added.
        Raises:
            DataError: As `add`, except for values that are not finite.
        """
        spec = self.table.spec
        trajectory = flatten(f"{self._name}: trajectory", trajectory, self._columns)
        if spec.media is not None:
            trajectory = spec.media.take(self._name, spec.schema, trajectory, items)
        arrays, num_steps = check_trajectory(self._name, spec.schema, trajectory)
        self.check_length(num_steps)
        self.check(arrays)
        # Contiguous and aligned: rows of a message are not. Scalars stay without an axis.
        columns = {name: np.require(arrays[name], None, ["C", "A"]) for name in self._names}
        present = spec.schema.late_bits(trajectory) if self._late else 0
        return CheckedTrajectory(columns, num_steps, present)

    def add_group(self, lease: LeaseRecord, members: Sequence[Any]) -> list[int]:
        """Add all trajectories of a lease's group at once, and end the lease; return their ids.

        Args:
            lease: The lease of the group's prompt.
            members: The members of the group, as `Lease.commit`.
        Raises:
            LeaseExpiredError: The lease has ended; nothing is added.
            DataError, StoreFullError, NotReadyError: As `add`; nothing is added.
        """
        group = self.table.spec.group
        assert group is not None
        name = self._group_name(lease)
        trajectories, counts = listed_trajectories(name, members, group.member)
        check_group_size(name, group, len(counts), len(trajectories))
        trajectories = self._with_place(lease, trajectories)
        made = np.full((2, len(trajectories)), -1, np.int64)
        slots, present = made
        # Steps of equal prompts that are stored again, and how many trajectories differ by column.
        apart = np.zeros(1 + len(self._names), np.int64)
        # All rows are written before one call commits the group: a process that dies in between
        # leaves reserved slots only, which other processes free.
        with undo_on_error(partial(self.free, slots)):
            if not self._write_natively(lease, trajectories, made, apart):
                self._write_group(lease, trajectories, made, apart)
            num_rows = self.table.slots[slots, Slot.NUM_ROWS]
            with self.table.lock:
                ids = self.table.commit_group(lease, slots, present)
        if apart[0] and not self._has_warned:
            self._has_warned = True
            warn_of_repeated_prompts(self.table.spec, apart, num_rows)
        return ids

    def _with_place(
        self, lease: LeaseRecord, trajectories: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return trajectories with the place of their prompt in the column for it, if any."""
        prompts = self.table.spec.prompts
        if prompts is None or prompts.column is None or lease.place < 0:
            return trajectories
        column = prompts.column
        given = arguments.one_of("trajectories", trajectories, Sequence, "a list of trajectories")
        members = []
        for one in given:
            member = dict(arguments.mapping(f"{self._name}: trajectory", one, "column -> rows"))
            place = member.setdefault(column, np.int64(lease.place))
            if arguments.array(column, place).tolist() != lease.place:
                name = f"{self._name}: the group of prompt {lease.number}"
                rule = f"must have the prompt's place in its data set in {column}"
                raise DataError(name, rule, place, "leave the column out")
            members.append(member)
        return members

    def _write_natively(
        self,
        lease: LeaseRecord,
        trajectories: Sequence[Mapping[str, Any]],
        made: np.ndarray,
        apart: np.ndarray,
    ) -> bool:
        """Write the group of a lease by one native call; False, without effect, if it cannot.

        Args:
            lease: The lease.
            trajectories: Those of the group, as `add`; the group's column may be left out.
            made: Takes their slots, and the bits of their late columns. [2, n], int64.
            apart: Takes the steps of equal prompts that are stored again, and how many
                trajectories differ there by column. [1 + columns], int64.
        """
        if not (self._adds_natively and self._reads_natively):
            return False
        address = self._reader_address
        refusal: int = self._native.group_write(
            address, trajectories, lease.number, made, apart, TURN_S
        )
        return refusal == 0

    def _write_group(
        self,
        lease: LeaseRecord,
        trajectories: Sequence[Mapping[str, Any]],
        made: np.ndarray,
        apart: np.ndarray,
    ) -> None:
        """Write the group of a lease in Python; arguments as `_write_natively`."""
        table = self.table
        slots, present = made
        items = dict[int, MediaItem]()
        checked = self._checked_group(lease, trajectories, items)
        columns = [one.columns for one in checked]
        apart[:] = 0  # the native call may have counted before it gave up
        shared: list[int] = self._native.group_shared_steps(self._reader_address, columns, apart)
        for index, one in enumerate(checked):
            slots[index] = self.reserve(one.num_steps - shared[index], leased=True)
            present[index] = one.present
            table.write(int(slots[index]), one.columns, before=shared[index])
        table.share_prompt(slots, np.array(shared))
        self.add_media(columns, items)

    def _checked_group(
        self,
        lease: LeaseRecord,
        trajectories: Sequence[Mapping[str, Any]],
        items: dict[int, MediaItem],
    ) -> list[CheckedTrajectory]:
        """Check the group of a lease; as `checked` for each of its trajectories."""
        group = self.table.spec.group
        assert group is not None
        name = self._group_name(lease)
        number = {group.column: np.int64(lease.number)}
        checked = []
        for one in trajectories:
            given = arguments.mapping(f"{self._name}: trajectory", one, "column -> rows")
            checked.append(self.checked({**number, **given}, items))
        for member in checked:
            self.check_finite(member.columns)
            given_number = member.columns[group.column].item()
            if given_number != lease.number:
                rule = f"must have the prompt's number in {group.column}"
                raise DataError(name, rule, given_number, "leave the column out")
        return checked

    def _group_name(self, lease: LeaseRecord) -> str:
        return f"{self._name}: the group of prompt {lease.number}"

    def split(
        self, trajectory: Mapping[str, Any], final: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Divide rows of several episodes into trajectories; as `split_episodes`."""
        return split_episodes(
            self._name, self.table.spec.schema, trajectory, final, self.max_length
        )

    def check(self, columns: dict[str, np.ndarray]) -> None:
        """Raise a DataError unless columns of one value per trajectory, such as weights, are valid.

        The streams that use the columns define what is valid.
        """
        for check in self._checks:
            check(columns)

    def check_length(self, num_steps: int) -> None:
        """Raise a DataError if a trajectory is longer than `max_length`."""
        if self.max_length is not None and num_steps > self.max_length:
            rule = f"must have at most max_length = {self.max_length} steps"
            remedy = "divide it, or raise gear.tables.<name>.max_length"
            raise DataError(f"{self._name}: trajectory", rule, num_steps, remedy)

    def _add_natively(self, trajectory: Mapping[str, Any]) -> int | None:
        """Add a trajectory by one native call; complete in Python what the call refuses.

        Returns:
            Its id; None, without effect: it is left to Python, which adds or refuses it.
        """
        outcome: tuple[int, int, int] | None = self._native.store_add(
            self._reader_address, trajectory, TURN_S
        )
        if outcome is None:
            return None
        number, slot, present = outcome  # the id; or, if negative, a code of `Refusal`
        if number >= 0:
            return number
        if number == Refusal.NOT_FINITE and slot >= 0:
            self.free([slot])
        elif slot >= 0:  # already written: only the commit is missing
            with undo_on_error(partial(self.free, [slot])), self.table.lock:
                return self._commit(slot, present)
        if number in (Refusal.LOCK_TIMEOUT, Refusal.LOCK_BROKEN, Refusal.MUST_RECOVER):
            with self.table.lock:  # waits, raises with the holder's id, or recovers
                pass
        return None

    def check_finite(self, columns: Mapping[str, np.ndarray]) -> None:
        """Raise a DataError if a value that must be finite is not; columns in the stored form."""
        if not self._store.are_finite(list(columns.values())):
            check_finite(self._name, self.table.spec.schema, columns)

    def add_media(
        self, trajectories: Sequence[Mapping[str, np.ndarray]], items: Mapping[int, MediaItem]
    ) -> None:
        """Add the media items that reserved rows name; waits for free pages.

        Args:
            trajectories: Columns in the stored form of each trajectory, already written.
            items: Media items by content id.
        Raises:
            StoreFullError, NotReadyError: As `MediaPages.add`.
        """
        media = self.table.media
        if media is None:
            return
        every = [columns[name].reshape(-1) for columns in trajectories for name in media.spec.names]
        named = np.concatenate(every)
        self.evictor.add_items(items, named[named != 0])

    def _add_plainly(self, checked: CheckedTrajectory, items: Mapping[int, MediaItem]) -> int:
        """Add a checked trajectory in Python: reserve, write, commit. Return its id."""
        self.check_finite(checked.columns)
        slot = self.reserve(checked.num_steps)
        with undo_on_error(partial(self.free, [slot])):
            self.table.write(slot, checked.columns)
            self.add_media([checked.columns], items)
            with self.table.lock:
                return self._commit(slot, checked.present)

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        """Free the slots that this process has reserved and not committed; ignore others.

        A negative one is none.
        """
        own = [SlotState.RESERVED, self.table.memory.peer]
        with self.table.lock:
            for slot in slots:
                if slot >= 0 and self.table.slots[slot, [Slot.STATE, Slot.OWNER]].tolist() == own:
                    self.table.extents.free(slot)

    def report_versions(self, writer: object, versions: np.ndarray) -> None:
        """Show the ranks the oldest policy version of this process's open trajectories.

        Args:
            writer: Writer or open trajectory that reports; it replaces its report before.
            versions: Policy version of each of its open trajectories; negative: none. [n], int64.
        """
        given = versions[versions >= 0]
        if len(given):
            self._open[id(writer)] = int(given.min())
        else:
            self._open.pop(id(writer), None)
        self.table.note_oldest_open(min(self._open.values(), default=-1))

    def reserve(
        self,
        num_steps: int,
        inserts: int | None = None,
        leased: bool = False,
        latest: tuple[int, int] = NO_LATEST,
    ) -> int:
        """Reserve a slot as `Evictor.reserve`, waiting for free rows; raises as `add`."""
        if self.table.ledger is not None and not leased:
            rule = "has prompts: its trajectories must come by `lease.commit`"
            remedy = "use RolloutWorker.attach, or replay.rollout_worker()"
            raise StoreError(self._name, rule, None, remedy)
        until = time.monotonic() + self.timeout_s
        while True:
            with self.table.lock:
                slot = self.evictor.reserve(num_steps, inserts, latest)
            if slot >= 0:
                return slot
            if slot != Refusal.RATE_LIMITED:
                latest = NO_LATEST  # rows near it are made free once, by evictions too
            self.evictor.wait(slot, num_steps, until)

    def publish(self, slot: int, num_steps: int) -> int:
        """Commit the first steps of a reserved slot, which keeps its free rows to grow.

        The caller holds the lock. Returns the trajectory's id.
        """
        self.table.extents.open(slot, num_steps)
        return self._commit(slot)

    def _commit(self, slot: int, present: int = 0) -> int:
        """Commit a reserved slot with the late columns of `present`. The caller holds the lock."""
        if self.table.groups is not None:
            with undo_on_error(partial(self.table.extents.free, slot)):
                self.table.groups.check_room(slot)
        born = 0 if self._position is None else int(self._position[Head.NUMBER])
        number = self.table.commit(slot, born, present)
        if self._committed is not None:
            with undo_on_error(partial(self.table.extents.retire, slot)):
                self._committed(slot)
        return number


def refuse_read_only(table: Table) -> None:
    """Raise a StoreError if a table is a data set, which is read-only."""
    if table.spec.dataset is not None:
        rule = "must have a capacity to be added to or changed"
        remedy = "it holds a read-only data set"
        raise StoreError(f"table {table.spec.name}", rule, None, remedy)

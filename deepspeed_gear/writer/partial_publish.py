"""Publishing the beginning of trajectories that still grow, so that their steps can be sampled already."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_gear.data.trajectory_checks import no_values
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import Column
from deepspeed_gear.store.open_slots import OpenHandle
from deepspeed_gear.store.records import Refusal
from deepspeed_gear.writer.inserter import Inserter


@dataclass(eq=False)
class GrowingTrajectory:
    """A trajectory that grows in this process, and the part of it that is published.

    Args:
        owner: The object that appends to it; once that is gone, it has ended.
        first: The step with which what is stored begins: those before it are another trajectory's, which the
            table has let go.
        published: Steps of it that batches may hold.
        handle: Where it lies; None: nothing is published.
        trajectory_id: Set once something is published.
    """

    owner: weakref.ref[object]
    first: int = 0
    published: int = 0
    handle: OpenHandle | None = None
    trajectory_id: int | None = None

    @property
    def is_published(self) -> bool:
        return self.handle is not None

    def begin_anew(self) -> None:
        """Take note that what was published is gone; what follows is a trajectory of its own."""
        self.first, self.published, self.handle = self.first + self.published, 0, None


class PublishedPart(NamedTuple):
    """What there is of a trajectory that grows.

    Args:
        growing: The trajectory.
        end: Steps that it has, those included that are another trajectory's by now.
        rows: Returns rows [first, end) of a column of steps, as they are stored. [end - first, *shape].
        once: Returns the value of a column of one value per trajectory. [*shape].
    """

    growing: GrowingTrajectory
    end: int
    rows: Callable[[Column, int, int], np.ndarray]
    once: Callable[[Column], np.ndarray]

    @property
    def num_steps(self) -> int:
        """Steps of what is, or will be, stored as one trajectory."""
        return self.end - self.growing.first

    @property
    def num_new(self) -> int:
        """Steps that are not published yet."""
        return self.num_steps - self.growing.published


def no_publisher() -> DataError:
    """Return the error of a writer that cannot publish."""
    rule = "must be asked of a writer on a node that holds the table"
    return DataError("publish", rule, None, "add whole trajectories from elsewhere")


class Publisher:
    """Publishes what grows in this process. One thread at a time.

    Rows are reserved for the longest trajectory when its first steps are published. If the table lets go of
    these (by hand or by age; never to make room), the steps that follow are another trajectory.

    Args:
        inserter: The way of this process into the table.
        check: Called before anything is published; raises where writing has ended.
    """

    def __init__(self, inserter: Inserter, check: Callable[[], None] = lambda: None) -> None:
        self._inserter, self._table, self._check = inserter, inserter.table, check
        self._name = f"table {inserter.table.spec.name}"
        self._growing: set[GrowingTrajectory] = set()
        self.num_begun = 0  # trajectories of which something was published

    def check(self) -> None:
        """Refuse where nothing can be published.

        Raises:
            DataError: The table has no longest trajectory, or keeps what follows from whole ones.
            StoreError: The run has ended.
        """
        self._check()
        if self._inserter.max_length is None:
            rule = "must have max_length for steps of open trajectories to be published"
            raise DataError(self._name, rule, None, "set gear.tables.<name>.max_length")
        if self._table.spec.return_to_go:
            rule = "must not keep returns-to-go where steps of open trajectories are published"
            raise DataError(self._name, rule, None, "leave out the field return_to_go, or publish nothing")

    # ---- publishing ------------------------------------------------------------------------------

    def publish(self, parts: Sequence[PublishedPart]) -> None:
        """Let batches from the next selection on hold the first steps of trajectories.

        Raises:
            StoreFullError, NotReadyError: As `Inserter.add`; of those that are not published yet nothing is.
        """
        self._end_orphans()
        until = time.monotonic() + self._inserter.timeout_s
        longer = [part for part in parts if part.num_new > 0]
        for part in longer:
            self._check_length(part.num_steps)
        while longer:
            with self._table.lock:
                ahead = [part for part in longer if part.growing.is_published and not self._grow(part)]
            for part in longer:
                if not part.growing.is_published:
                    self._begin(part)
            longer = ahead
            if ahead:
                self._inserter.evictor.wait(Refusal.RATE_LIMITED, ahead[0].num_new, until)

    def _grow(self, part: PublishedPart) -> bool:
        """Publish new steps of what is published; return whether that is done with. Wants the lock.

        The rows are copied with the lock held: a checkpoint that is loaded puts others into their place.
        """
        growing, unfinished = part.growing, self._table.unfinished
        assert growing.handle is not None
        if not unfinished.stands(growing.handle):
            self._let_go(growing, truncated=False)
            growing.begin_anew()
            return True
        rate = self._table.spec.retention.rate_limiter
        if rate is not None and rate.unit == "step" and not self._inserter.evictor.may_insert(part.num_new):
            return False
        self._write(part, growing.handle.slot)
        growing.published = part.num_steps
        unfinished.grow(growing.handle.slot, growing.published)
        return True

    def _begin(self, part: PublishedPart) -> None:
        """Publish the first steps of a trajectory."""
        growing, limit, unfinished = part.growing, self._inserter.max_length, self._table.unfinished
        assert limit is not None
        once = [c for c in self._table.spec.schema if c.rows == "1" and not c.late]
        self._inserter.check({column.name: part.once(column) for column in once})
        while not growing.is_published:
            slot = self._inserter.reserve(limit, inserts=part.num_steps)
            growing.handle = unfinished.handle_of(slot)
            self._growing.add(growing)
            self._inserter.growing.add(growing)
            try:
                with self._table.lock:
                    if not unfinished.stands(growing.handle):  # a checkpoint was loaded meanwhile
                        growing.handle = None
                        continue
                    self._write(part, slot)
                    growing.trajectory_id = self._inserter.publish(slot, part.num_steps)
            except BaseException:
                self.end(growing)
                raise
        growing.published = part.num_steps
        self.num_begun += 1

    def _check_length(self, num_steps: int) -> None:
        limit = self._inserter.max_length
        if limit is not None and num_steps > limit:
            rule = f"must have at most max_length = {limit} steps"
            raise DataError(f"{self._name}: trajectory", rule, num_steps)

    def _write(self, part: PublishedPart, slot: int) -> None:
        """Write the steps that are not published yet, in rows that no process reads. Wants the lock."""
        table, known, before = self._table, part.growing.published, part.growing.first
        at = int(table.slots[slot, Slot.FIRST_ROW])
        for column in table.spec.schema:
            stored = table.columns[column.name]
            if column.rows == "1":
                if known == 0:
                    stored[slot] = no_values(column, 0) if column.late else part.once(column)
                continue
            more = int(column.rows == "T+1")
            first, last = known + (more if known else 0), part.num_steps + more
            stored[at + first : at + last] = (
                0 if column.late else part.rows(column, before + first, before + last)
            )

    # ---- ends ------------------------------------------------------------------------------------

    def end(self, growing: GrowingTrajectory, truncated: bool = False) -> None:
        """Say that a trajectory grows no more; what is published stays.

        Args:
            growing: It.
            truncated: Whether it is truncated: its last published step is marked so.
        """
        with self._table.lock:
            self._let_go(growing, truncated)
        growing.handle = None

    def _let_go(self, growing: GrowingTrajectory, truncated: bool) -> None:
        unfinished, handle = self._table.unfinished, growing.handle
        self._growing.discard(growing)
        self._inserter.growing.discard(growing)
        if handle is not None and unfinished.is_own(handle):
            unfinished.end(handle.slot, truncated)

    def _end_orphans(self) -> None:
        """End trajectories whose writer was dropped without being closed."""
        for growing in [growing for growing in self._inserter.growing if growing.owner() is None]:
            self.end(growing, truncated=True)

    def close(self) -> None:
        """End all that grows: what is published stays, marked as truncated."""
        for growing in list(self._growing):
            self.end(growing, truncated=True)

"""Publishing the beginning of trajectories that still grow, so that their steps can be sampled already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column
from deepspeed_gear.store.extents import AHEAD, FIRST_ROW
from deepspeed_gear.store.trajectory import no_values
from deepspeed_gear.store.unfinished import Handle
from deepspeed_gear.writer.inserter import Inserter

RowsOf = Callable[[Column, int, int], np.ndarray]


@dataclass(eq=False)
class Growing:
    """A trajectory that grows in this process, and the part of it that is published.

    Args:
        rows: Returns rows [first, end) of a column of steps, as they are stored. [end - first, *shape].
        once: Returns the value of a column of one value per trajectory. [*shape].
        first: The step with which what is stored begins: those before it are another trajectory's, which the
            table has let go.
        published: Steps of it that batches may hold.
        handle: Where it lies; None: nothing is published.
        id: Its id, once something is published.
    """

    rows: RowsOf
    once: Callable[[Column], np.ndarray]
    first: int = 0
    published: int = 0
    handle: Handle | None = None
    id: int | None = None

    @property
    def is_published(self) -> bool:
        return self.handle is not None

    def begin_anew(self) -> None:
        """Take note that what was published is gone; what follows is a trajectory of its own."""
        self.first, self.published, self.handle = self.first + self.published, 0, None


def no_publisher() -> DataError:
    """Return the error of a writer that cannot publish."""
    rule = "must be asked of a writer on a node that holds the table"
    return DataError("publish", rule, None, "add whole trajectories from elsewhere")


Part = tuple[Growing, int]  # a trajectory and how many steps it has now


class Publisher:
    """Publishes what grows in this process. One thread at a time.

    Rows are reserved for the longest trajectory when its first steps are published. If the table lets go of
    these (by hand or by age; never to make room), the steps that follow are another trajectory.

    Args:
        inserter: The way of this process into the table.
    """

    def __init__(self, inserter: Inserter) -> None:
        self._inserter, self._table = inserter, inserter.table
        self._name = f"table {inserter.table.spec.name}"
        self._growing: set[Growing] = set()

    def check(self) -> None:
        """Refuse where nothing can be published.

        Raises:
            DataError: The table has no longest trajectory, or keeps what follows from whole ones.
        """
        if self._inserter.max_length is None:
            rule = "must have max_length for steps of open trajectories to be published"
            raise DataError(self._name, rule, None, "set gear.tables.<name>.max_length")
        if self._table.spec.return_to_go:
            rule = "must not keep returns-to-go where steps of open trajectories are published"
            raise DataError(self._name, rule, None, "leave out the field return_to_go, or publish nothing")

    # ---- publishing ------------------------------------------------------------------------------

    def publish(self, parts: Sequence[Part]) -> None:
        """Let batches from the next cut on hold the first steps of trajectories.

        Raises:
            StoreFullError, NotReadyError: As `Inserter.add`; of those that are not published yet nothing is.
        """
        longer = [(growing, end) for growing, end in parts if end - growing.first > growing.published]
        known = [(growing, end) for growing, end in longer if growing.is_published]
        with self._table.lock:
            self._forget_gone(known)  # nobody may write where another trajectory lies
        known = [(growing, end) for growing, end in known if growing.is_published]
        for growing, end in known:
            self._write(growing, end)
        self._grow(known)
        for growing, end in longer:
            if not growing.is_published:
                self._begin(growing, end)

    def _begin(self, growing: Growing, end: int) -> None:
        """Publish the first steps of a trajectory."""
        limit, num_steps = self._inserter.max_length, end - growing.first
        assert limit is not None
        self._check_length(num_steps)
        once = [c for c in self._table.spec.schema if c.rows == "1" and not c.late]
        self._inserter.check({column.name: growing.once(column) for column in once})
        slot = self._inserter.reserve(limit, inserts=num_steps)
        growing.handle = self._table.unfinished.handle_of(slot)
        self._growing.add(growing)
        try:
            self._write(growing, end)
            with self._table.lock:
                growing.id = self._inserter.publish(slot, num_steps)
        except BaseException:
            self.end(growing)
            raise
        growing.published = num_steps

    def _grow(self, parts: Sequence[Part]) -> None:
        """Publish what is written of what still stands."""
        more = sum(end - growing.first - growing.published for growing, end in parts)
        until = time.monotonic() + self._inserter.timeout_s
        while parts:
            with self._table.lock:
                if self._may_publish(more):
                    self._forget_gone(parts)
                    for growing, end in parts:
                        if growing.handle is not None:
                            growing.published = end - growing.first
                            self._table.unfinished.grow(growing.handle.slot, growing.published)
                    return
            self._inserter.room.wait(AHEAD, more, until)

    def _may_publish(self, num_steps: int) -> bool:
        rate = self._table.spec.life.rate
        return rate is None or rate.unit != "step" or self._inserter.room.may_insert(num_steps)

    def _forget_gone(self, parts: Sequence[Part]) -> None:
        """Give back what the table has let go; what follows is another trajectory. Wants the lock."""
        for growing, _ in parts:
            if growing.handle is not None and not self._table.unfinished.stands(growing.handle):
                self._let_go(growing, truncated=False)
                growing.begin_anew()

    def _check_length(self, num_steps: int) -> None:
        limit = self._inserter.max_length
        if limit is not None and num_steps > limit:
            rule = f"must have at most max_length = {limit} steps"
            raise DataError(f"{self._name}: trajectory", rule, num_steps)

    def _write(self, growing: Growing, end: int) -> None:
        """Write the steps that are not published yet where nobody reads."""
        num_steps = end - growing.first
        self._check_length(num_steps)
        assert growing.handle is not None
        table, known, slot = self._table, growing.published, growing.handle.slot
        at = int(table.slots[slot, FIRST_ROW])
        for column in table.spec.schema:
            stored = table.columns[column.name]
            if column.rows == "1":
                if known == 0:
                    stored[slot] = no_values(column, 0) if column.late else growing.once(column)
                continue
            more = int(column.rows == "T+1")
            first, last = known + (more if known else 0), num_steps + more
            rows = 0 if column.late else growing.rows(column, growing.first + first, growing.first + last)
            stored[at + first : at + last] = rows

    # ---- ends ------------------------------------------------------------------------------------

    def end(self, growing: Growing, truncated: bool = False) -> None:
        """Say that a trajectory grows no more; what is published stays.

        Args:
            growing: It.
            truncated: Whether it was cut off: its last published step is marked so.
        """
        with self._table.lock:
            self._let_go(growing, truncated)
        growing.handle = None

    def _let_go(self, growing: Growing, truncated: bool) -> None:
        unfinished, handle = self._table.unfinished, growing.handle
        self._growing.discard(growing)
        if handle is not None and unfinished.is_own(handle):
            unfinished.end(handle.slot, truncated)

    def close(self) -> None:
        """End all that grows: what is published stays, marked as truncated."""
        for growing in list(self._growing):
            self.end(growing, truncated=True)

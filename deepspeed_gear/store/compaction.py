"""Compaction: moves extents where enough rows are free but no run of them is long enough.

Neighbouring extents slide towards each other until the gaps between them are one run (`extent_move.py`).
"""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, SlotLink, SlotRetention
from deepspeed_gear.store.table import Table

MOST_LOOKED_AT = 1024  # extents, from where rows were last found
CHEAP = 4  # so many rows may move for each one of the run


class Compactor:
    """Moves extents of a table with spare rows. Every method requires the table's lock.

    Trajectories that a selection has drawn and some process has still to read are not moved, nor open ones.

    Cost: of all sufficient neighbours, those with the fewest rows move. Where one of n rows is free, they
    have at most about n rows for each row of the run, and those whose gap is too short are copied twice. A
    table is compacted as long as more than one of 32 rows is free: 2.8 rows were copied for each row added,
    with uniform eviction and random lengths (docs/design/0003-data-and-store.md).
    """

    def __init__(self, table: Table, readers: SelectionPins) -> None:
        self._table, self._readers, self._extents = table, readers, table.extents
        self._end = table.spec.capacity_rows  # where the spare rows begin
        self.rows_copied = 0  # by this process

    def make_run(self, num_rows: int) -> bool:
        """Move extents until a run of `num_rows` rows is free, where the next search begins.

        Returns:
            Whether there is such a run now; if not, eviction is cheaper, or extents that cannot move separate
            the free rows.
        """
        control, spec = self._table.control, self._table.spec
        free = int(control[Control.FREE_ROWS]) - num_rows
        if spec.spare_rows == 0 or control[Control.SELECTING] or free < spec.least_free_rows:
            return False
        near = self._near()
        at = np.array(near)
        is_end = at == self._extents.ends
        at = np.where(is_end, 0, at)
        records = self._table.slots[at]
        # The sentinel begins after all rows, and ends at 0.
        begins = np.where(is_end, self._end, records[:, Slot.FIRST_ROW])
        ends = np.where(is_end, 0, records[:, Slot.FIRST_ROW] + records[:, Slot.NUM_ROWS])
        gaps = begins[1:] - ends[:-1]
        is_committed = records[:, Slot.STATE] == SlotState.COMMITTED
        is_closed = self._extents.retention[at, SlotRetention.OPEN] == 0
        can_move = is_committed & is_closed & ~is_end & ~self._readers.reading(at)
        found = cheapest_run(gaps, (ends - begins)[1:-1], can_move[1:-1], num_rows)
        if found is None:
            return False
        first, last = found
        self._readers.forget_ahead()
        to = int(ends[first])
        for slot in near[first + 1 : last + 1]:
            self._slide(slot, to)
            to += int(self._table.slots[slot, Slot.NUM_ROWS])
        self._table.control[Control.ROVER] = near[last]
        return True

    def _near(self) -> list[int]:
        """Return neighbouring slots from the end of the last search; if they are few, all from end to end."""
        links, start = self._extents.links, int(self._table.control[Control.ROVER])
        found = [start]
        while len(found) <= MOST_LOOKED_AT:
            found.append(int(links[found[-1], SlotLink.AFTER]))
            if found[-1] == start:
                end = found.index(self._extents.ends)
                return [*found[end:-1], *found[: end + 1]]
        return found

    def _slide(self, slot: int, to: int) -> None:
        """Move an extent to free rows before it; the order of the extents stays."""
        source, num_rows = self._table.slots[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
        if source != to:
            self.rows_copied += self._table.move.run(slot, to)
            self._readers.replace(source, to, num_rows, range(self._end, self._table.spec.num_rows))
            self._table.move.end()


def cheapest_run(
    gaps: np.ndarray, lengths: np.ndarray, can_move: np.ndarray, wanted: int
) -> tuple[int, int] | None:
    """Choose the gaps between extents to join: the first ones for which at most 4 * `wanted` rows move, else
    those for which the fewest do.

    Args:
        gaps: Free rows between neighbours. [n], int64.
        lengths: Rows of the extent between two gaps. [n - 1], int64.
        can_move: Which extents can move. [n - 1], bool.
        wanted: Rows that the joined gap must have.
    Returns:
        The first and the last of the gaps; None: no gaps suffice.
    """
    free = np.concatenate([[0], np.cumsum(gaps)])
    rows, fixed = (np.concatenate([[0], np.cumsum(values)]) for values in (lengths, ~can_move))
    first = np.arange(len(gaps))
    last = np.maximum(np.searchsorted(free, free[:-1] + wanted) - 1, first)
    enough = last < len(gaps)
    first, last = first[enough], last[enough]
    possible = fixed[last] == fixed[first]
    first, last = first[possible], last[possible]
    if not len(first):
        return None
    moved = rows[last] - rows[first]
    cheap = np.flatnonzero(moved <= CHEAP * wanted)
    best = int(cheap[0] if len(cheap) else np.argmin(moved))
    return int(first[best]), int(last[best])

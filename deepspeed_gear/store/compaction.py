"""Compaction: moves extents where enough rows are free but no run of them is long enough.

Neighbouring extents slide towards each other until the gaps between them are one run
(`RowAllocator.move`).

Cost: of all sufficient neighbours, those with the fewest rows move. Where one of n rows is free,
they have at most about n rows for each row of the run, and those whose gap is too short are copied
twice. A table is compacted as long as more than one of 32 rows is free: 2.8 rows were copied for
each row added, with uniform eviction and random lengths (docs/design/0003-data-and-store.md).
"""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, SlotLink, SlotRetention
from deepspeed_gear.store.table import Table

MOST_LOOKED_AT = 1024  # extents, from where rows were last found
CHEAP = 4  # so many rows may move for each one of the run


def make_run(table: Table, readers: SelectionPins, num_rows: int) -> bool:
    """Move extents until a run of `num_rows` is free, where the next search begins. Requires the
    lock.

    Open trajectories, or those that a process still reads, stay; without spare rows all do. False:
    there is no such run; eviction is cheaper, or extents that cannot move separate the free rows.
    """
    control = table.control
    spec = table.spec
    extents = table.extents
    free = int(control[Control.FREE_ROWS]) - num_rows
    if spec.spare_rows == 0 or control[Control.SELECTING] or free < spec.least_free_rows:
        return False
    # Neighbouring slots from the end of the last search; if they are few, all from end to end.
    near = [int(control[Control.ROVER])]
    while len(near) <= MOST_LOOKED_AT:
        near.append(int(extents.links[near[-1], SlotLink.AFTER]))
        if near[-1] == near[0]:
            end = near.index(extents.ends)
            near = [*near[end:-1], *near[: end + 1]]
            break
    at = np.array(near)
    is_end = at == extents.ends
    at = np.where(is_end, 0, at)
    records = table.slots[at]
    # The sentinel begins after all rows, and ends at 0.
    begins = np.where(is_end, spec.capacity_rows, records[:, Slot.FIRST_ROW])
    ends = np.where(is_end, 0, records[:, Slot.FIRST_ROW] + records[:, Slot.NUM_ROWS])
    gaps = begins[1:] - ends[:-1]
    is_committed = records[:, Slot.STATE] == SlotState.COMMITTED
    is_closed = extents.retention[at, SlotRetention.OPEN] == 0
    can_move = is_committed & is_closed & ~is_end & ~readers.reading(at)
    found = cheapest_run(gaps, (ends - begins)[1:-1], can_move[1:-1], num_rows)
    if found is None:
        return False
    first, last = found
    readers.forget_ahead()
    to = int(ends[first])
    for slot in near[first + 1 : last + 1]:
        slide(table, readers, slot, to)
        to += int(table.slots[slot, Slot.NUM_ROWS])
    control[Control.ROVER] = near[last]
    return True


def slide(table: Table, readers: SelectionPins, slot: int, to: int) -> None:
    """Move an extent to free rows before it; the order of the extents stays."""
    source, num_rows = table.slots[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
    if source != to:
        table.extents.move(slot, to)
        readers.replace(source, to, num_rows, table.extents.spare_rows)
        table.extents.end_move()


def cheapest_run(
    gaps: np.ndarray, lengths: np.ndarray, can_move: np.ndarray, wanted: int
) -> tuple[int, int] | None:
    """Choose the first and last gap to join: the first for which at most 4 * `wanted` rows move,
    else those for which the fewest do; None: none suffice. gaps [n], int64; lengths, can_move
    between them [n - 1].
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

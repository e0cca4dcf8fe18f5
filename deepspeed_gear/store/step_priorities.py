"""Repair of step priorities, which move with their rows, after the death of a process."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.row_allocator import is_among, rows_of
from deepspeed_gear.store.table import Table


def repair_step_priorities(table: Table, stream: str) -> None:
    """Repair priorities and slots of rows from the slot table, where items are steps.

    Writers move and clear them natively (store/step_priorities.cpp). A death in between leaves
    priorities in rows that hold no trajectory, or slots of rows that have moved. Requires the lock.

    Args:
        table: The table.
        stream: The prefix of the stream's regions. The caller derives the masses of rows anew.
    """
    row_slots = table.views.get(f"{stream}/row_slots")
    if row_slots is None:
        return
    priorities = table.views[f"{stream}/priorities"]
    is_used = is_among(table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
    used = np.nonzero(is_used)[0]
    rows, _, owner = rows_of(table.slots[used])
    row_slots[rows] = used[owner]
    free = np.ones(len(priorities), bool)
    free[rows] = False
    priorities[free] = 0

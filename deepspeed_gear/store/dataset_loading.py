"""A table that holds a data set: its slots, columns and returns-to-go, before it gets its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.column_arrays import part_of
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.table_spec import RETURN_TO_GO

if TYPE_CHECKING:
    from deepspeed_gear.store.table import Table


def fill(table: Table, dataset: Dataset) -> None:
    """Fill a table's slots from its part of a data set and, in memory, its columns, in one pass.

    Raises:
        DataError: A file has changed since the data set was opened.
    """
    spec, slots, held = table.spec, table.slots, table.spec.held
    first_rows, lengths = dataset.first_rows[held] - dataset.row_of(held.start), dataset.lengths[held]
    slots[:, Slot.GENERATION] = 1
    slots[:, Slot.ID] = np.arange(held.start, held.stop) + dataset.first_id
    slots[:, Slot.FIRST_ROW], slots[:, Slot.NUM_STEPS] = first_rows, lengths
    slots[:, Slot.NUM_ROWS] = lengths + int(dataset.schema.has_final_row)
    if spec.in_memory:
        for column in dataset.schema:
            np.copyto(table.columns[column.name], part_of(spec, column))
        dataset.files.check()  # the copy is of the files that were opened, and of no later state of them
    slots[:, Slot.STATE] = SlotState.COMMITTED
    table.control[Control.NEXT_ID] = dataset.num_trajectories_of_whole
    table.count()
    derive_returns(table, np.stack([first_rows, lengths], axis=1))


def derive_returns(table: Table, extents: np.ndarray) -> None:
    """Compute the returns-to-go of extents. [n, 2]: first row, steps. Cost: one pass over their rewards."""
    reward = table.spec.schema.role("reward")
    if table.spec.return_to_go and reward is not None:
        returns = torch.from_numpy(table.held(RETURN_TO_GO))
        table.ops.suffix_sum_(returns, table.tensor(reward.name), torch.from_numpy(extents))

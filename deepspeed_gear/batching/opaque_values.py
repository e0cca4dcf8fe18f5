"""Reading opaque values of the samples of a batch."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.schema import Column
from deepspeed_gear.store.table import Table


def read_opaque(table: Table, column: Column, records: torch.Tensor) -> list[Any]:
    """Return the values of an opaque column of the trajectories that records describe.

    The selection of the records must be pinned: call it where the samples' rows are gathered.

    Args:
        table: The table. Rows of other nodes must have arrived: their exchange plan must contain the column,
            as it does where a field of the config names it.
        column: Of its schema, opaque.
        records: Resolutions. [n, 8], int64, in host memory.
    Returns:
        n values: bytes, or JSON values; new objects.
    Raises:
        DataError: A row is none of this column.
    Cost: a copy and, of JSON, a parse for each record, in Python.
    """
    rows, name = table.gather_source(column.name).numpy(), f"table {table.spec.name}: column {column.name}"
    return [decode(rows[slot], column, name) for slot in records[:, Resolution.SLOT].tolist()]

"""Rows of a field: source, dtype, conversion and padding of what is read, and opaque values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed_gear.batching.normalisation import shift_and_gain
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Resolution, Source
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

#: Source of a column's rows, by the column's `rows`.
SOURCES = {"T": Source.STEPS, "T+1": Source.STEPS_PLUS_ONE, "1": Source.TRAJECTORY}
COMPUTED = {"timestep": Source.TIMESTEP, "position": Source.POSITION}


class Rows(Protocol):
    """Source of batches: a Table, or a RingTable on a device."""

    @property
    def ops(self) -> Ops: ...

    @property
    def schema(self) -> Schema: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def compressed(self) -> Mapping[str, CompressedRows]: ...

    def gather_source(self, name: str) -> torch.Tensor:
        """Return the rows of a column, [rows or slots, *shape]; of a compressed column no rows."""
        ...


@dataclass(frozen=True)
class FieldRows:
    """Rows that a field reads, and their conversion to `dtype`: (x - shift) * gain."""

    source: int  # the op's code for the rows
    column: torch.Tensor  # [rows or slots, *shape]; empty where the op computes the field
    shape: tuple[int, ...]
    dtype: torch.dtype
    # As `shift_and_gain` returns them, on the device of the column.
    shift: torch.Tensor
    gain: torch.Tensor
    pad: float  # value of the rows outside of the trajectory
    stored: CompressedRows | None = None  # compressed rows; None: they are in `column`

    @classmethod
    def of(
        cls,
        field: ResolvedField,
        table: Rows,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> FieldRows:
        """Return the rows of a field in a table.

        Args:
            statistics: Statistics of the columns that fields are normalised by.
            engine_dtype: Type of fields whose dtype is "engine".
        """
        shape: tuple[int, ...] = ()
        stored = None if field.column is None else table.compressed.get(field.column.name)
        if field.derived in COMPUTED:
            source = COMPUTED[field.derived]
            column = torch.empty(0, dtype=torch.int64, device=table.device)
        elif field.derived == "return_to_go":
            source = SOURCES["T"]
            column = table.gather_source(RETURN_TO_GO)
        else:
            assert field.column is not None
            source = SOURCES[field.column.rows]
            column = table.gather_source(field.column.name)
            shape = field.column.shape
        dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
        if field.mask_only and field.derived not in COMPUTED:
            column = byte_rows(stored or column, table)
            stored = None
            shape = (1,)
            dtype = torch.uint8
        shift, gain = (part.to(table.device) for part in shift_and_gain(field, statistics, shape))
        pad = float(field.pad_value) if field.pad_kind == "value" else 0.0
        return cls(source, column, shape, dtype, shift, gain, pad, stored)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def byte_rows(rows: Sized, table: Rows) -> torch.Tensor:
    """Return a byte per row, in place of a column of which only the mask is read. [rows, 1]."""
    return torch.zeros(len(rows), 1, dtype=torch.uint8, device=table.device)


def read_opaque(table: Table, column: Column, resolutions: torch.Tensor) -> list[Any]:
    """Return the values of an opaque column for trajectories: bytes, or JSON values.

    The selection of the resolutions must be pinned: call it where the samples' rows are gathered.
    Rows of other nodes must have arrived, as they do where a field of the config names the column.

    Args:
        resolutions: Resolutions. [n, 8], int64, in host memory.
    Cost: a copy and, of JSON, a parse for each record, in Python.
    """
    rows = table.gather_source(column.name).numpy()
    name = f"table {table.spec.name}: column {column.name}"
    return [decode(rows[slot], column, name) for slot in resolutions[:, Resolution.SLOT].tolist()]

"""Rows that a field of a batch reads: where they lie, and how they are converted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.statistics.dataset_statistics import LEAST_SPREAD, ColumnStatistics
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Resolution, Source
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

#: Source of a column's rows, by the column's `rows`.
SOURCES = {"T": Source.STEPS, "T+1": Source.STEPS_PLUS_ONE, "1": Source.TRAJECTORY}
COMPUTED = {"timestep": Source.TIMESTEP, "position": Source.POSITION}
#: Shift and gain are repeated up to this many elements, so that inner loops are long.
PERIOD_ELEMENTS = 4096


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
    # As `affine` returns them, on the device of the column.
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
        shift, gain = (part.to(table.device) for part in affine(field, statistics, shape))
        pad = float(field.pad_value) if field.pad_kind == "value" else 0.0
        return cls(source, column, shape, dtype, shift, gain, pad, stored)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def byte_rows(rows: Sized, table: Rows) -> torch.Tensor:
    """Return a byte per row, in place of a column of which only the mask is read. [rows, 1]."""
    return torch.zeros(len(rows), 1, dtype=torch.uint8, device=table.device)


def affine(
    field: ResolvedField, statistics: Mapping[str, ColumnStatistics], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shift and gain of (x - shift) * gain, repeated along the window. [elements], float64.

    Both are empty for the identity.

    Raises:
        ConfigError: The field is normalised without statistics, or float64 cannot hold them.
    """
    if not field.is_converted:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    if field.normalize is None:
        return torch.zeros(1, dtype=torch.float64), torch.full(
            (1,), field.scale, dtype=torch.float64
        )
    assert field.column is not None
    at = f"gear.fields.{field.name}.normalize"
    if field.column.name not in statistics:
        remedy = "use a data set made by `gear ingest`, or leave it out"
        raise ConfigError(at, "must be of a column with statistics", field.column.name, remedy)
    known = statistics[field.column.name]
    ends = (known.min, known.max)
    if field.normalize == "quantile":
        ends = (known.quantiles["0.01"], known.quantiles["0.99"])
    numbers = (*ends, known.mean, known.std)
    low, high, mean, spread = (np.broadcast_to(x, field.column.shape) for x in numbers)
    # A constant element is shifted and not scaled. One without a finite value is NaN: it is not
    # below itself, so it counts as constant.
    varies = low < high
    if field.column.dtype == "int64":
        varies = varies | (np.abs(low) > 2.0**53)  # float64 has rounded differences away
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if field.normalize in ("min_max", "quantile"):
            mean = low + (high - low) / 2
            spread = (high - low) / 2
        gain = field.scale / np.where(varies, spread, 1.0)
        holds = (spread >= LEAST_SPREAD * np.spacing(np.abs(mean))) & np.isfinite(gain)
        holds &= np.isfinite(1 / spread) & (1 / spread >= np.finfo(np.float64).tiny)
    wrong = np.argwhere(varies & ~holds)
    if len(wrong):
        element = tuple(wrong[0].tolist())
        rule = "must have values with a spread from 1e-307 to 1e307 and above 2^-43 of their offset"
        place = f"in element {list(element)} of {field.column.name}"
        value = f"{low[element]} to {high[element]} {place}"
        remedy = "store the column less an offset or in other units, or use scale"
        raise ConfigError(at, rule, value, remedy)
    elements = math.prod(shape)
    # A window of 3 steps of the shape [2] has shifts [a, b, a, b, a, b].
    repeats = 1
    if elements > 1:
        repeats = max(1, min(field.gathered_length or 1, PERIOD_ELEMENTS // elements))

    def tiled(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.tile(values.reshape(-1), repeats))

    return tiled(mean), tiled(gain)


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

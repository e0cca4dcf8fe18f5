"""Gathers packs: the rows of whole trajectories of a table, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from deepspeed_gear.batching.gather import COMPUTED, SOURCES, affine
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.ops.reference.convert import convert
from deepspeed_gear.schema import DTYPES
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO


def is_per_step(field: ResolvedField) -> bool:
    """Return whether a pack holds a row of a field for each step; else one for each trajectory."""
    return field.column is None or field.column.rows != "1"


class PackGatherer:
    """Gathers packs from one table. Not thread-safe.

    Args:
        table: The source of the rows.
        statistics: Of the table's columns, where a field is normalised.
        engine_dtype: The dtype of `"as": "engine"`.
    """

    def __init__(
        self,
        fields: Sequence[ResolvedField],
        table: Table,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> None:
        self._ops, self._table = table.ops, table
        self.fields = [field for field in fields if is_per_step(field)]
        self._columns: list[torch.Tensor] = []
        self._shifts: list[torch.Tensor] = []
        self._gains: list[torch.Tensor] = []
        self._pads: list[float] = []
        #: Shape of a row and dtype of each per-step field.
        self.shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        specs = []
        for field in self.fields:
            specs.append(self._add(field, statistics, engine_dtype))
        self._words = lower(specs)
        self._per_trajectory: dict[str, tuple[torch.Tensor, torch.dtype, torch.Tensor, torch.Tensor]] = {}
        for field in fields:
            if is_per_step(field):
                continue
            assert field.column is not None
            column, dtype = table.gather_source(field.column.name), _dtype_of(field, engine_dtype)
            numbers = affine(field, statistics, field.column.shape)
            self._per_trajectory[field.name] = column, dtype, *numbers

    def _add(
        self, field: ResolvedField, statistics: Mapping[str, ColumnStatistics], engine_dtype: torch.dtype
    ) -> GatherSpec:
        shape: tuple[int, ...] = ()
        if field.derived in COMPUTED:
            source, column = COMPUTED[field.derived], torch.empty(0, dtype=torch.int64)
        elif field.derived == "return_to_go":
            source, column = SOURCES["T"], self._table.gather_source(RETURN_TO_GO)
        else:
            assert field.column is not None
            source, column = SOURCES[field.column.rows], self._table.gather_source(field.column.name)
            shape = field.column.shape
        dtype = _dtype_of(field, engine_dtype)
        shift, gain = affine(field, statistics, shape)
        self._columns.append(column)
        self._shifts.append(shift)
        self._gains.append(gain)
        self._pads.append(float(field.pad_value) if field.pad_kind == "value" else 0.0)
        self.shapes.append((shape, dtype))
        return GatherSpec(source, int(field.offset), elements=int(np.prod(shape, dtype=np.int64)))

    def outputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Return new tensors of every per-step field. [rows, *shape]; undefined contents."""
        return {
            field.name: torch.empty(rows, *shape, dtype=dtype)
            for field, (shape, dtype) in zip(self.fields, self.shapes, strict=True)
        }

    def finish(self, outs: Mapping[str, torch.Tensor], end: int) -> None:
        """Pad the places from `end` on."""
        for field, pad in zip(self.fields, self._pads, strict=True):
            outs[field.name][end:].fill_(pad)

    def gather(
        self, outs: Mapping[str, torch.Tensor], records: torch.Tensor, places: torch.Tensor, first: int
    ) -> None:
        """Write the places [first, first + rows) of a pack.

        Args:
            outs: Of every per-step field. [rows, *shape].
            records: Resolutions of this table's trajectories in the pack. [S, 8], int64, contiguous.
            places: Where each begins in the pack. [S], int64.
        Cost: every row is read once and written once.
        """
        if not self.fields or not records.size(0):
            return
        rows = next(iter(outs.values())).size(0)
        self._ops.pack_(
            [outs[field.name] for field in self.fields],
            self._columns,
            self._shifts,
            self._gains,
            records,
            places,
            self._words,
            self._pads,
            first,
            rows,
        )

    def per_trajectory(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-trajectory fields. [S, *shape] each.

        Args:
            records: Resolutions of this table's trajectories. [S, 8], int64.
        """
        slots = records[:, Resolution.SLOT]
        found = {}
        for name, (column, dtype, shift, gain) in self._per_trajectory.items():
            values = column[slots]
            flat = values.reshape(values.size(0), column[0].numel())
            made = convert(flat, dtype, shift, gain) if len(gain) else convert(flat, dtype)
            found[name] = made.view(values.shape)
        return found


def _dtype_of(field: ResolvedField, engine_dtype: torch.dtype) -> torch.dtype:
    return engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]


def flags_of(ops: Ops, column: torch.Tensor, records: torch.Tensor, offset: int) -> np.ndarray:
    """Return which steps of trajectories have a flag that is not 0, one trajectory after the other.

    Args:
        column: Of bool or uint8. [rows].
        records: Resolutions of the trajectories. [n, 8], int64, contiguous.
        offset: A place holds the flag of the step that is so much later, or False.
    Returns:
        [sum of their steps], bool.
    Cost: one pass over the flags.
    """
    lengths = records[:, Resolution.NUM_STEPS]
    out = torch.zeros(int(lengths.sum()), dtype=column.dtype)
    places, none = torch.cumsum(lengths, 0) - lengths, torch.empty(0)
    spec = lower([GatherSpec(SOURCES["T"], offset)])
    if out.numel():
        ops.pack_([out], [column], [none], [none], records, places, spec, [0.0], 0, out.numel())
    flags = out.numpy()
    return np.asarray(flags if flags.dtype == bool else flags != 0)

"""Gathers packs, the rows of whole trajectories one after the other, and values that are no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.gather import SOURCES, FieldGroup, FieldRows
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.ops.reference.convert import convert
from deepspeed_gear.schema import Column
from deepspeed_gear.store.table import Table


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
        self._ops = table.ops
        self.fields = [field for field in fields if is_per_step(field)]
        rows = [FieldRows.of(field, table, statistics, engine_dtype) for field in self.fields]
        specs = [
            GatherSpec(row.source, int(field.offset), elements=row.elements)
            for field, row in zip(self.fields, rows, strict=True)
        ]
        self._group = FieldGroup(list(range(len(rows))), specs, rows)
        self._shapes = [(row.shape, row.dtype) for row in rows]
        self._per_trajectory = {
            field.name: FieldRows.of(field, table, statistics, engine_dtype)
            for field in fields
            if not is_per_step(field)
        }

    def outputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Return new tensors of every per-step field. [rows, *shape]; undefined contents."""
        return {
            field.name: torch.empty(rows, *shape, dtype=dtype)
            for field, (shape, dtype) in zip(self.fields, self._shapes, strict=True)
        }

    def finish(self, outs: Mapping[str, torch.Tensor], end: int) -> None:
        """Pad the places from `end` on."""
        for field, pad in zip(self.fields, self._group.pads, strict=True):
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
        group, into = self._group, [outs[field.name] for field in self.fields]
        converted = group.columns, group.shifts, group.gains
        self._ops.pack_(into, *converted, records, places, group.spec, group.pads, first, into[0].size(0))

    def per_trajectory(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-trajectory fields of this table's records, [S, 8], int64. [S, *shape] each."""
        slots = records[:, Resolution.SLOT]
        found = {}
        for name, rows in self._per_trajectory.items():
            values = rows.column[slots]
            flat = values.reshape(values.size(0), rows.elements)
            numbers = (rows.shift, rows.gain) if len(rows.gain) else ()
            found[name] = convert(flat, rows.dtype, *numbers).view(values.shape)
        return found


def flags_of(ops: Ops, column: torch.Tensor, records: torch.Tensor, offset: int) -> np.ndarray:
    """Return which steps of trajectories have a flag that is not 0, one trajectory after the other.

    Args:
        column: Of bool or uint8. [rows].
        records: Resolutions of the trajectories. [n, 8], int64, contiguous.
        offset: A place holds the flag of the step that is so much later, or False.
    """
    lengths = records[:, Resolution.NUM_STEPS]
    out = torch.zeros(int(lengths.sum()), dtype=column.dtype)
    places, none = torch.cumsum(lengths, 0) - lengths, torch.empty(0)
    spec = lower([GatherSpec(SOURCES["T"], offset)])
    if out.numel():
        ops.pack_([out], [column], [none], [none], records, places, spec, [0.0], 0, out.numel())
    flags = out.numpy()
    return np.asarray(flags if flags.dtype == bool else flags != 0)


def read_opaque(table: Table, column: Column, records: torch.Tensor) -> list[Any]:
    """Return the values of an opaque column of the trajectories that records describe: bytes, or JSON values.

    The selection of the records must be pinned: call it where the samples' rows are gathered. Rows of other
    nodes must have arrived, as they do where a field of the config names the column.

    Args:
        records: Resolutions. [n, 8], int64, in host memory.
    Raises:
        DataError: A row is none of this column.
    Cost: a copy and, of JSON, a parse for each record, in Python.
    """
    rows, name = table.gather_source(column.name).numpy(), f"table {table.spec.name}: column {column.name}"
    return [decode(rows[slot], column, name) for slot in records[:, Resolution.SLOT].tolist()]

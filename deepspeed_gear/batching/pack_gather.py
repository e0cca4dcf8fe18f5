"""Packs gathered from one table: rows of whole trajectories, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_gear.batching.field_rows import SOURCES, FieldRows
from deepspeed_gear.batching.gather import FieldGroup
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.store.table import Table


class PackGatherer:
    """Gathers packs from one table. Not thread-safe."""

    def __init__(
        self,
        fields: Sequence[ResolvedField],
        table: Table,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> None:
        self._ops = table.ops
        every = {
            field.name: FieldRows.of(field, table, statistics, engine_dtype) for field in fields
        }
        self.per_trajectory = {
            name: row for name, row in every.items() if row.source == Source.TRAJECTORY
        }
        self.fields = [field for field in fields if field.name not in self.per_trajectory]
        rows = [every[field.name] for field in self.fields]
        specs = [
            GatherSpec(row.source, int(field.offset), elements=row.elements)
            for field, row in zip(self.fields, rows, strict=True)
        ]
        self._group = FieldGroup(list(range(len(rows))), specs, rows)
        self._outputs: list[tuple[str, tuple[int, ...], np.ndarray, bool]] = []  # with its padding
        for field, row in zip(self.fields, rows, strict=True):
            pad = torch.full((1,), row.pad, dtype=row.dtype)
            are_bits = row.dtype == torch.bfloat16
            pad = pad.view(torch.uint16) if are_bits else pad  # as NumPy has it
            self._outputs.append((field.name, row.shape, pad.numpy(), are_bits))

    def outputs(self, rows: int, end: int) -> dict[str, torch.Tensor]:
        """Return new tensors of every per-step field, padded from `end` on, else undefined. [1,
        rows].
        """
        outs = {}
        for name, shape, pad, are_bits in self._outputs:
            array = np.empty((1, rows, *shape), pad.dtype)  # torch takes three times as long
            array[:, end:] = pad
            out = torch.from_numpy(array)
            outs[name] = out.view(torch.bfloat16) if are_bits else out
        return outs

    def gather(
        self,
        outs: Mapping[str, torch.Tensor],
        records: torch.Tensor,
        places: torch.Tensor,
        first: int,
    ) -> None:
        """Write the places [first, first + rows) of a pack.

        Args:
            outs: Of every per-step field. [1, rows, *shape].
            records: Resolutions of this table's trajectories in the pack. [S, 8], int64,
                contiguous.
            places: Where each begins in the pack. [S], int64.
        Cost: every row is read once and written once.
        """
        if not self.fields or not records.size(0):
            return
        group = self._group
        into = [outs[field.name] for field in self.fields]
        converted = group.columns, group.shifts, group.gains
        self._ops.pack_(
            into, *converted, records, places, group.spec, group.pads, first, into[0].size(1)
        )


class SharedRows(NamedTuple):
    """Where the first steps of trajectories are that others of their groups hold."""

    steps: np.ndarray  # so many; 0: it holds all of its steps. [n], int64
    first_row: np.ndarray  # of the one that holds them. [n], int64

    @classmethod
    def none(cls, count: int) -> SharedRows:
        return cls(np.zeros(count, np.int64), np.zeros(count, np.int64))

    def of(self, which: Any) -> SharedRows:
        """Return those of some trajectories."""
        return SharedRows(self.steps[which], self.first_row[which])

    def runs(
        self, records: torch.Tensor, places: torch.Tensor, skipped: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the records of all runs of rows, [m, 8], and where each begins, [m], of
        trajectories with NUM_STEPS places, [n, 8], at `places`, [n], whose first row is that of
        their own rows.

        The first `skipped` steps, [n], have no places. A prompt's run has one row more, at a place
        that the own run writes after it: so a place at its end reads the step after its own.
        """
        own = records.numpy().copy()
        at = places.numpy()
        front = np.flatnonzero(self.steps > skipped)
        # places of the prompt
        before = own[front]
        left = np.maximum(self.steps - skipped, 0)
        before[:, Resolution.FIRST_ROW] = self.first_row[front] + skipped[front]
        before[:, Resolution.NUM_STEPS] = np.minimum(
            left[front] + 1, own[front, Resolution.NUM_STEPS]
        )
        own[:, Resolution.FIRST_ROW] += np.maximum(skipped - self.steps, 0)
        own[:, Resolution.NUM_STEPS] -= left
        rest = (
            own[:, Resolution.NUM_STEPS] > 0
        )  # none of a trajectory that is cut within its prompt
        runs = np.concatenate([before, own[rest]]), np.concatenate([at[front], (at + left)[rest]])
        return torch.from_numpy(runs[0]), torch.from_numpy(runs[1])


def steps_of(
    ops: Ops,
    column: torch.Tensor,
    records: torch.Tensor,
    offset: int,
    rows: str,
    dtype: torch.dtype,
    shared: SharedRows | None = None,
) -> np.ndarray:
    """Return a column's values at the steps of trajectories, one after the other. [steps], of a
    `dtype`.

    A place holds the value of the row that is `offset` later, or 0; `rows` of the column is "T" or
    "T+1".
    """
    lengths = records[:, Resolution.NUM_STEPS]
    out = torch.empty(int(lengths.sum()), dtype=dtype)
    places = torch.cumsum(lengths, 0) - lengths
    none = torch.empty(0)
    if shared is not None:
        records, places = shared.runs(records, places, np.zeros(len(records), np.int64))
    spec = lower([GatherSpec(SOURCES[rows], offset)])
    if out.numel():
        ops.pack_([out], [column], [none], [none], records, places, spec, [0.0], 0, out.numel())
    return out.numpy()

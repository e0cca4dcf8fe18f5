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
        # Name, shape, padding, and whether the bits of bfloat16 stand in uint16, which NumPy has.
        self._outputs: list[tuple[str, tuple[int, ...], np.ndarray, bool]] = []
        for field, row in zip(self.fields, rows, strict=True):
            pad = torch.full((1,), row.pad, dtype=row.dtype)
            are_bits = row.dtype == torch.bfloat16
            bits = pad.view(torch.uint16) if are_bits else pad
            self._outputs.append((field.name, row.shape, bits.numpy(), are_bits))

    def outputs(self, rows: int, end: int) -> dict[str, torch.Tensor]:
        """Return new tensors for every per-step field, [1, rows]; only padding is filled in."""
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
        resolutions: torch.Tensor,
        places: torch.Tensor,
        first: int,
    ) -> None:
        """Write the places [first, first + rows) of a pack.

        Args:
            outs: The pack's tensor of every per-step field. [1, rows, *shape].
            resolutions: Resolutions of this table's trajectories in the pack. [S, 8], int64,
                contiguous.
            places: First place of each trajectory in the pack. [S], int64.
        Cost: every row is read once and written once.
        """
        if not self.fields or not resolutions.size(0):
            return
        group = self._group
        into = [outs[field.name] for field in self.fields]
        converted = group.columns, group.shifts, group.gains
        self._ops.pack_(
            into, *converted, resolutions, places, group.spec, group.pads, first, into[0].size(1)
        )


class SharedRows(NamedTuple):
    """First steps of trajectories whose rows another trajectory of the group holds (prompts)."""

    steps: np.ndarray  # number of them; 0: the trajectory holds all of its steps. [n], int64
    first_row: np.ndarray  # first row of the trajectory that holds them. [n], int64

    @classmethod
    def none(cls, count: int) -> SharedRows:
        return cls(np.zeros(count, np.int64), np.zeros(count, np.int64))

    def of(self, which: Any) -> SharedRows:
        """Return the shared rows of some trajectories."""
        return SharedRows(self.steps[which], self.first_row[which])

    def runs(
        self, resolutions: torch.Tensor, places: torch.Tensor, skipped: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the runs of rows that trajectories consist of.

        A trajectory with a shared prompt has two runs: the prompt's rows, held by another
        trajectory, and its own, which begin with the prompt's last token. The prompt's run has one
        row more, of that token, so that a field of offset 1 finds its value at the last place of
        the run. The own run, gathered later, writes the extra place.

        Args:
            resolutions: Those of trajectories with NUM_STEPS places; the first row is that of the
                own rows. [n, 8].
            places: First place of each trajectory. [n], int64.
            skipped: Number of first steps that have no places. [n], int64.
        Returns:
            Resolutions of the runs, [m, 8], and the place where each begins, [m].
        """
        own = resolutions.numpy().copy()
        begins = places.numpy()
        # A trajectory of 9 steps at place 20, of which 5 are shared and 2 of these skipped, has 7
        # places. The prompt's run has the places [20, 24), one more than the 3 left of the prompt;
        # its own run the places [23, 27).
        left = np.maximum(self.steps - skipped, 0)
        front = np.flatnonzero(left)
        prompts = own[front]
        prompts[:, Resolution.FIRST_ROW] = self.first_row[front] + skipped[front]
        prompts[:, Resolution.NUM_STEPS] = np.minimum(
            left[front] + 1, own[front, Resolution.NUM_STEPS]
        )
        own[:, Resolution.FIRST_ROW] += np.maximum(skipped - self.steps, 0)
        own[:, Resolution.NUM_STEPS] -= left
        rest = own[:, Resolution.NUM_STEPS] > 0  # False where a trajectory is cut in its prompt
        runs = np.concatenate([prompts, own[rest]])
        places_of_runs = np.concatenate([begins[front], (begins + left)[rest]])
        return torch.from_numpy(runs), torch.from_numpy(places_of_runs)


def steps_of(
    ops: Ops,
    column: torch.Tensor,
    resolutions: torch.Tensor,
    offset: int,
    rows: str,
    dtype: torch.dtype,
    shared: SharedRows | None = None,
) -> np.ndarray:
    """Return a column's values at the steps of trajectories, one trajectory after the other.

    Args:
        ops: Ops of the column's device.
        column: The rows of the column.
        resolutions: Resolutions. [n, 8], int64.
        offset: A step has the value of the row that is so many rows later, or 0 after the last one.
        rows: Rows of the column per trajectory: "T" or "T+1".
        dtype: Type of the result.
        shared: Rows of shared prompts; None: every trajectory has all of its rows.
    Returns:
        [steps of all], of `dtype`.
    """
    lengths = resolutions[:, Resolution.NUM_STEPS]
    out = torch.empty(int(lengths.sum()), dtype=dtype)
    places = torch.cumsum(lengths, 0) - lengths
    none = torch.empty(0)
    if shared is not None:
        resolutions, places = shared.runs(resolutions, places, np.zeros(len(resolutions), np.int64))
    spec = lower([GatherSpec(SOURCES[rows], offset)])
    if out.numel():
        ops.pack_([out], [column], [none], [none], resolutions, places, spec, [0.0], 0, out.numel())
    return out.numpy()

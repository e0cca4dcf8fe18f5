"""A table on a device with all that samples it, and several of them in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from deepspeed_gear.batching.gather import Buffers, Gatherer
from deepspeed_gear.device.host_rows import AddFilter
from deepspeed_gear.device.open_steps import OpenSteps
from deepspeed_gear.device.ring_selection import RingSelection
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import RingState
from deepspeed_gear.sampling.mixture import TOLERANCE, Mixture


@dataclass
class DeviceTable:
    """A table that is sampled.

    Args:
        selection: Its masses and draws.
        steps: Its open trajectories; None: whole trajectories are added.
        has_data: Whether it holds a data set, which does not change.
        filter: Which added trajectories are stored.
    """

    name: str
    selection: RingSelection
    gatherer: Gatherer
    steps: OpenSteps | None
    has_data: bool
    filter: AddFilter
    _is_filled: bool = False  # a plain attribute: a trace that sets it has no guard on what it was

    @property
    def is_filled(self) -> bool:
        """Whether anything was ever added since it was empty, or it holds a data set."""
        return self.has_data or self._is_filled

    def mark_filled(self, is_filled: bool = True) -> None:
        """Note that something was added, or that all was removed."""
        self._is_filled = is_filled

    @property
    def table(self) -> RingTable:
        return self.selection.table


class TableMixture:
    """The tables that a global batch is drawn from, one after the other, in fixed numbers of samples.

    With one table it is that table. Every method mutates fixed tensors and waits for nothing.

    Args:
        tables: In the order of the shares.
        mixture: Numbers of samples; None: there is one table.
        num_samples: Of a global batch that this rank draws.
        num_parts: Micro batches that they are divided into: every num_parts-th sample belongs to one.
    Raises:
        ConfigError: A share gives no whole number of samples.
    """

    def __init__(
        self, tables: Sequence[DeviceTable], mixture: Mixture | None, num_samples: int, num_parts: int
    ) -> None:
        self.tables, self._num_parts = tuple(tables), num_parts
        self.shares = [1.0] if mixture is None else mixture.shares(0)
        counts = [round(share * num_samples) for share in self.shares]
        for each, share, count in zip(tables, self.shares, counts, strict=True):
            if count == 0 or abs(share - count / num_samples) > TOLERANCE:
                rule = f"must be a whole number of {num_samples} samples where tables lie on devices"
                least = max(count, 1)
                remedy = (
                    f"a captured step has fixed numbers: use {least / num_samples} ({least} samples), "
                    "another batch size, or leave the table out"
                )
                raise ConfigError(f"gear.sampler.shares.{each.name}", rule, share, remedy)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        self._slices = [slice(*pair) for pair in pairwise(ends)]
        first = tables[0].selection
        self.is_prioritized, self.has_step_items = first.is_prioritized, first.has_step_items
        self.device = first.table.device
        self._sources = [
            torch.repeat_interleave(torch.tensor(self.sizes(part))).to(self.device)
            for part in range(num_parts)
        ]

    def sizes(self, part: int) -> list[int]:
        """Return the samples of each table in a micro batch."""
        parts = range(part, self._slices[-1].stop, self._num_parts)
        return [sum(s.start <= i < s.stop for i in parts) for s in self._slices]

    def source(self, part: int) -> Tensor | None:
        """Return the table of each sample of a micro batch; None: there is one. [B], int64."""
        return self._sources[part] if len(self.tables) > 1 else None

    def select_(self, records: Tensor, weights: Tensor) -> None:
        """Draw the next global batch, table by table; arguments as `RingSelection.select_`."""
        if len(self.tables) == 1:
            self.tables[0].selection.select_(records, weights)
            return
        for each, part in zip(self.tables, self._slices, strict=True):
            each.selection.select_(records[part], weights[part] if len(weights) else weights)

    def update_(self, records: Tensor, values: Tensor, parts: Sequence[int]) -> None:
        """Set the priorities of samples of a global batch.

        Args:
            records: Those of some micro batches, in the order of their sample numbers. [n, 8], int64.
            values: Their priorities. [n], float32.
        """
        if len(self.tables) == 1:
            self.tables[0].selection.update_(records, values)
            return
        of_parts = [self.sizes(part) for part in parts]
        first = 0
        for each, sizes in zip(self.tables, zip(*of_parts, strict=True), strict=True):
            end = first + sum(sizes)
            if end > first:
                each.selection.update_(records[first:end], values[first:end])
            first = end

    def buffers(self, num_samples: int) -> Buffers:
        """Allocate the tensors of a batch."""
        return self.tables[0].gatherer.buffers(num_samples)

    def fill(self, buffers: Buffers, records: Tensor, part: int) -> None:
        """Gather the samples of a micro batch into a batch of `buffers`."""
        if len(self.tables) == 1:
            self.tables[0].gatherer.fill(buffers, records)
            return
        first = 0
        for each, size in zip(self.tables, self.sizes(part), strict=True):
            if size:
                each.gatherer.fill(buffers.part(first, first + size), records[first : first + size])
            first += size

    def totals(self) -> list[Tensor]:
        """Return the total mass of each table's latest selection. [] each, int64."""
        return [each.table.state[RingState.TOTAL] for each in self.tables]

    def probability(self, masses: Tensor, source: Tensor) -> Tensor:
        """Return the probability of each sample's item in one draw, times the share of its table.

        Args:
            masses: Of the items. [B], float64.
            source: Table of each sample. [B], int64.
        """
        if self.has_step_items:
            masses = torch.ones_like(masses)
        totals = torch.stack(self.totals()).clamp(min=1).double()[source]
        shares = torch.stack([torch.full_like(totals[0], share) for share in self.shares])[source]
        return masses / totals * shares

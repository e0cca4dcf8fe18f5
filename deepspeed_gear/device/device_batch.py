"""A batch of fixed tensors on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_gear.batching.batch import Batch, BatchSamples
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Buffers
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import public_names

# Names that other modules of this package use, and no program.
INTERNAL = frozenset(
    (
        *("again", "buffers", "importance", "micro", "of_mixture", "of_pass"),
        *("owner", "place", "records", "written"),
    )
)


class DeviceBatch(Batch):
    """A batch of fixed tensors on a device, which `DeviceReplay.sample_` fills.

    Args:
        buffers: Fields, masks and n-step returns.
        records: What the samples resolved to. [B, 8], int64.
        weight: PER weights; None: all 1. [B], float32.
        step_items: Whether an item is a step of mass 1.
        total: Total mass of the latest selection. [], int64.
        burn_in: Which steps only warm up.
        owner: The replay whose training stream fills it; None: it is of a pass.
    """

    def __init__(
        self,
        buffers: Buffers,
        records: Tensor,
        weight: Tensor | None,
        step_items: bool,
        total: Tensor,
        burn_in: BurnIn | None,
        owner: object = None,
    ) -> None:
        self.buffers, self.micro, self.owner = buffers, 0, owner
        self._mixture: TableMixture | None = None
        self.written = [*buffers.all, records, *([] if weight is None else [weight])]
        epoch = torch.zeros(len(records), dtype=torch.int64, device=records.device)
        valid = records[:, Resolution.ID] >= 0
        samples = BatchSamples(records, valid, step_items, total, epoch, weight, burn_in=burn_in)
        super().__init__(dict(buffers.tensors), dict(buffers.mask), samples)
        self._valid: Tensor | None = None

    def place(self, micro: int, first_index: int, index_step: int, source: Tensor | None = None) -> None:
        """Set the micro batch that it holds, the sample indices in its global batch, and their tables."""
        self._source = source
        self.micro, self._first_index, self._index_step = micro, first_index, index_step

    def of_mixture(self, mixture: TableMixture) -> None:
        """Set the tables that it is drawn from, where there are several."""
        self._mixture = mixture

    def of_pass(self, number: int, size: int) -> None:
        """Set the number of its pass, and the items of the pass: samples after them are fillers."""
        self.valid = self.sample_number < size
        self.epoch = torch.full_like(self.epoch, number)

    def again(self) -> DeviceBatch:
        """Return a batch of the same tensors in which a transform may replace fields."""
        return copy.copy(self)._renewed()

    def _renewed(self) -> DeviceBatch:
        self._tensors, self.mask = dict(self.buffers.tensors), dict(self.buffers.mask)
        return self

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """As of every `Batch`; the result keeps its probabilities when the table is drawn from again."""
        return super().map(function).with_probability(function(self.probability))

    @property
    def valid(self) -> Tensor:
        """False where the table had no mass to draw from, or a sample only fills up a pass. [B], bool.

        In the training stream it is computed from the records at each access, so that `sample_` need not
        write it.
        """
        return self.trajectory_id >= 0 if self._valid is None else self._valid

    @valid.setter
    def valid(self, valid: Tensor) -> None:
        self._valid = valid

    @property
    def probability(self) -> Tensor:
        """As of every `Batch`; 0 where the table had no mass to draw from. [B], float64."""
        found = super().probability
        if self._mixture is not None:
            found = self._mixture.probability(self._records[:, Resolution.MASS].double(), self.source)
        return torch.where(self.trajectory_id >= 0, found, 0.0)

    @property
    def records(self) -> Tensor:
        """What the samples resolved to. [B, 8], int64."""
        return self._records

    @property
    def importance(self) -> Tensor | None:
        """Tensor that the PER weights are written to; None: they are all 1."""
        return self._is_weight

    def __dir__(self) -> list[str]:
        """Return the public names: what completion shows."""
        return public_names(super().__dir__(), INTERNAL)

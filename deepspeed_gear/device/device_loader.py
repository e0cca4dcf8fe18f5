"""Training batches from a table on a device: selected, gathered into fixed tensors, and their reports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed_gear.batching.batch import Batch, BatchSamples
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Buffers, note_overwritten
from deepspeed_gear.batching.priority_reduction import float32_on_device, mask_of, reduce_steps
from deepspeed_gear.batching.transfer.cuda_streams import refuse_capture
from deepspeed_gear.config import PriorityOptions
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.distributed.device_collectives import DeviceCollectives
from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import public_names
from deepspeed_gear.sampling.batch_info import BatchInfo


class DeviceLoader:
    """Fills batches of fixed tensors. Waits for nothing.

    Args:
        mixture: The tables of this rank.
        reports: Priority updates, which take effect before each selection.
        burn_in: Which steps only warm up.
    """

    def __init__(
        self,
        mixture: TableMixture,
        reports: DevicePriorityLog,
        data_rank: int,
        burn_in: BurnIn | None,
        info: BatchInfo,
        owner: object,
    ) -> None:
        self.reports, self._mixture, self._data_rank = reports, mixture, data_rank
        self._burn_in, self._owner, self._info = burn_in, owner, info
        self._all = self._records(info.micro * info.accumulation)
        self._all_weights = self._weights(info.micro * info.accumulation)
        self._later = [mixture.buffers(info.micro) for _ in range(info.accumulation - 1)]
        self._ring: list[DeviceBatch] = []
        self.next_micro, self._turn = 0, 0
        later = [tensor for buffers in self._later for tensor in buffers.all]
        counters = [each.gatherer.counters for each in mixture.tables]
        for tensor in (self._all, self._all_weights, *counters, *later):
            torch._dynamo.mark_static_address(tensor)  # as in RingTable

    def _records(self, count: int) -> Tensor:
        return torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64, device=self._mixture.device)

    def _weights(self, count: int) -> Tensor:
        has_any = self._mixture.is_prioritized
        return torch.ones(count if has_any else 0, device=self._mixture.device)

    def new_batch(self) -> DeviceBatch:
        """Return a batch of fixed tensors for `fill_`."""
        micro, mixture = self._info.micro, self._mixture
        weight = self._weights(micro) if mixture.is_prioritized else None
        facts = mixture.has_step_items, mixture.totals()[0], self._burn_in
        batch = DeviceBatch(mixture.buffers(micro), self._records(micro), weight, *facts, self._owner)
        if len(mixture.tables) > 1:
            batch.of_mixture(mixture)
        for tensor in (*batch.buffers.all, batch.records, *([] if weight is None else [weight])):
            torch._dynamo.mark_static_address(tensor)
        return batch

    def fill_(self, out: DeviceBatch) -> None:
        """Fill a batch with this rank's next micro batch; see `DeviceReplay.sample_`."""
        if not torch.compiler.is_compiling():
            note_overwritten(out.written)
        if self._info.accumulation == 1:
            self.reports.apply()
            weights = self._all_weights if out.importance is None else out.importance
            self._mixture.select_(out.records, weights)
            self._mixture.fill(out.buffers, out.records, 0)
            self._place(out, 0)
            return
        if self.next_micro == 0:
            self.reports.apply()
            self._mixture.select_(self._all, self._all_weights)
            for micro, buffers in enumerate(self._later, 1):
                self._mixture.fill(buffers, self._records_of(micro), micro)
        micro = self.next_micro
        self._place(out, micro)
        out.records.copy_(self._records_of(micro))
        if out.importance is not None:
            out.importance.copy_(self._all_weights[self._part(micro)])
        if micro == 0:
            self._mixture.fill(out.buffers, out.records, 0)
        else:
            torch._foreach_copy_(out.buffers.all, self._later[micro - 1].all)
        self.next_micro = (micro + 1) % self._info.accumulation

    def next(self) -> DeviceBatch:
        """Fill the next batch of a ring of max(2, accumulation) batches."""
        if not self._ring:
            self._ring = [self.new_batch() for _ in range(max(2, self._info.accumulation))]
        batch = self._ring[self._turn]
        self.fill_(batch)
        self._turn = (self._turn + 1) % len(self._ring)
        return batch

    def begin_anew(self) -> None:
        """Continue from another state of the table: drop pending micro batches and priority updates."""
        self.next_micro = 0
        self.reports.forget()

    def _part(self, micro: int) -> slice:
        """Return the slice of the selected samples that is a micro batch."""
        return slice(micro, None, self._info.accumulation)

    def _records_of(self, micro: int) -> Tensor:
        return self._all[self._part(micro)].contiguous()

    def _place(self, out: DeviceBatch, micro: int) -> None:
        first = self._data_rank + micro * self._info.data_world
        out.place(micro, first, self._info.num_micro, self._mixture.source(micro))


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
        self.micro = micro
        self._samples.place(first_index, index_step, source)

    def of_mixture(self, mixture: TableMixture) -> None:
        """Set the tables that it is drawn from, where there are several."""
        self._mixture = mixture

    def of_pass(self, number: int, size: int) -> None:
        """Set the number of its pass, and the items of the pass: samples after them are fillers."""
        self._valid = self.sample_number < size
        self._samples = replace(self._samples, epoch=torch.full_like(self.epoch, number))

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

    @property
    def probability(self) -> Tensor:
        """As of every `Batch`; 0 where the table had no mass to draw from. [B], float64."""
        found = super().probability
        if self._mixture is not None:
            found = self._mixture.probability(self.records[:, Resolution.MASS].double(), self.source)
        return torch.where(self.trajectory_id >= 0, found, 0.0)

    @property
    def records(self) -> Tensor:
        """What the samples resolved to. [B, 8], int64."""
        return self._samples.records

    @property
    def importance(self) -> Tensor | None:
        """Tensor that the PER weights are written to; None: they are all 1."""
        return self._samples.is_weight

    def __dir__(self) -> list[str]:
        """Return the public names: what completion shows."""
        return public_names(super().__dir__(), INTERNAL)


class DevicePriorityLog:
    """Priority updates of the micro batches of one global batch, applied together. Waits for nothing.

    Args:
        mixture: The tables that batches are drawn from.
        accumulation: Micro batches of a global batch.
        inner: Collectives of this replica's ranks, and its reporting rank; None: it is one rank.
    """

    def __init__(
        self, mixture: TableMixture, accumulation: int, inner: tuple[DeviceCollectives, int] | None = None
    ) -> None:
        self._mixture, self._accumulation, self._inner = mixture, accumulation, inner
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, batch: DeviceBatch, values: Tensor) -> None:
        """Add the priorities of a micro batch; after those of the last one, apply all. [B], float32."""
        if self._inner is not None:  # those of other ranks may differ in the last bits, or be of other steps
            transport, reporter = self._inner
            values = values.clone()
            transport.broadcast(values, reporter)
        if self._accumulation == 1:
            self._mixture.update_(batch.records, values, [0])
            return
        self._waiting[batch.micro] = (batch.records.clone(), values.clone())
        if batch.micro == self._accumulation - 1:
            self._apply()

    def apply(self) -> None:
        """Apply the pending updates, in the order of sample numbers."""
        if not self._waiting:
            return
        refuse_capture("reports of some micro batches", "must be complete before sampling is captured")
        self._apply()

    def _apply(self) -> None:
        reported = sorted(self._waiting)
        parts = [self._waiting[micro] for micro in reported]
        self._waiting.clear()
        records = torch.stack([records for records, _ in parts], 1).reshape(-1, Resolution.NUM_WORDS)
        values = torch.stack([values for _, values in parts], 1).reshape(-1)
        self._mixture.update_(records, values, reported)

    def forget(self) -> None:
        """Drop the pending updates."""
        self._waiting.clear()


def reported(batch: DeviceBatch, priorities: Tensor, mask: Tensor | None, sampler: PriorityOptions) -> Tensor:
    """Return reported priorities in their stored form: [B], float32, on the batch's device.

    Args:
        priorities: [B], or [B, T]. Any floating dtype.
        mask: Which steps of [B, T] count; None: that of `mask_of`. [B, T], bool.
        sampler: How [B, T] becomes [B].
    Raises:
        ShapeError: A wrong shape.
    """
    values = priorities.detach()
    if values.dim() == 2:
        counts = mask_of(batch, values, mask, is_checked=False)
        values = reduce_steps(values, counts, sampler.reduce, sampler.eta, is_checked=False)
    if values.shape != (batch.num_samples,):
        rule = f"must have shape [{batch.num_samples}], or [{batch.num_samples}, T]"
        raise ShapeError("priorities", rule, list(priorities.shape))
    return float32_on_device(values.to(batch.records.device))

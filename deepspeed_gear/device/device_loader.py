"""The loader of training batches from a table on a device: selects global batches, gathers micro batches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import note_overwritten
from deepspeed_gear.device.device_batch import DeviceBatch
from deepspeed_gear.device.device_priority_log import DevicePriorityLog
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.batch_info import BatchInfo


class DeviceLoader:
    """Fills batches of fixed tensors. Waits for nothing.

    Args:
        mixture: The tables of this rank.
        reports: Priority updates, which take effect before each selection.
        data_rank: This rank's replica.
        burn_in: Which steps only warm up.
        info: Sizes of batches.
        owner: Of the batches.
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

"""The loader of training batches from a table on a device: selects global batches, gathers micro batches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import note_overwritten
from deepspeed_gear.device.device_batch import DeviceBatch
from deepspeed_gear.device.device_sharing import Draws, Reports, TableSharing
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.device.joint_selection import JointSelection
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.batch_info import BatchInfo


class DeviceLoader:
    """Fills batches of fixed tensors. Waits for other replicas only, where these draw together.

    Args:
        mixture: The tables of this rank.
        draws: Selects global batches: `mixture`, or one of all replicas together.
        reports: Priority updates, which take effect before each selection.
        sharing: How replicas share the table.
        burn_in: Which steps only warm up.
        info: Sizes of batches.
        owner: Of the batches.
    """

    def __init__(
        self,
        mixture: TableMixture,
        draws: Draws,
        reports: Reports,
        sharing: TableSharing,
        burn_in: BurnIn | None,
        info: BatchInfo,
        owner: object,
    ) -> None:
        self.reports, self._mixture, self._draws = reports, mixture, draws
        self._joint = draws if isinstance(draws, JointSelection) else None
        self._burn_in, self._owner, self._info = burn_in, owner, info
        own, self._data_rank = sharing.has_own_batches, sharing.data_rank
        self._num_parts = info.accumulation if own else info.num_micro
        self._first_part, self._part_step = (0, 1) if own else (sharing.data_rank, info.data_world)
        self._all = self._records(info.micro * self._num_parts)
        self._all_weights = self._weights(info.micro * self._num_parts)
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
        known = mixture.buffers(micro), self._records(micro), weight, *facts, self._owner
        origins = None if self._joint is None else self._joint.origins[:micro].clone()
        batch = DeviceBatch(*known, origins)
        if len(mixture.tables) > 1:
            batch.of_mixture(mixture)
        for tensor in (*batch.buffers.all, batch.records, *([] if weight is None else [weight])):
            torch._dynamo.mark_static_address(tensor)
        return batch

    def fill_(self, out: DeviceBatch) -> None:
        """Fill a batch with this rank's next micro batch; see `DeviceReplay.sample_`."""
        if not torch.compiler.is_compiling():
            note_overwritten(out.written)
        if self._num_parts == 1:
            self.reports.apply()
            self._draws.select_(out.records, self._all_weights if out.importance is None else out.importance)
            self._mixture.fill(out.buffers, out.records, 0)
            self._set_origins(out, 0)
            self._place(out, 0)
            return
        if self.next_micro == 0:
            self.reports.apply()
            self._draws.select_(self._all, self._all_weights)
            for micro, buffers in enumerate(self._later, 1):
                self._mixture.fill(buffers, self._records_of(micro), self.part_of(micro))
        micro = self.next_micro
        self._place(out, micro)
        out.records.copy_(self._records_of(micro))
        if out.importance is not None:
            out.importance.copy_(self._all_weights[self._part(micro)])
        if micro == 0:
            self._mixture.fill(out.buffers, out.records, self.part_of(0))
        else:
            torch._foreach_copy_(out.buffers.all, self._later[micro - 1].all)
        self._set_origins(out, micro)
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
        return slice(self.part_of(micro), None, self._num_parts)

    def part_of(self, micro: int) -> int:
        """Return the number of a micro batch among the parts of what is selected here."""
        return self._first_part + micro * self._part_step

    def _records_of(self, micro: int) -> Tensor:
        return self._all[self._part(micro)].contiguous()

    def _set_origins(self, out: DeviceBatch, micro: int) -> None:
        """Set the replicas that hold the samples of a micro batch, where several hold the table."""
        if self._joint is not None:
            out.origin.copy_(self._joint.origins[self._part(micro)])
            out.hold(self._joint.holders[self._part(micro)])

    def _place(self, out: DeviceBatch, micro: int) -> None:
        first = self._data_rank + micro * self._info.data_world
        out.place(micro, first, self._info.num_micro, self._mixture.source(self.part_of(micro)))

"""The priority log of a table on a device, and the conversion of reported priorities."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.batching.priority_reduction import float32_on_device, mask_of, reduce_steps
from deepspeed_gear.batching.transfer.cuda_streams import refuse_capture
from deepspeed_gear.config import PriorityOptions
from deepspeed_gear.device.device_batch import DeviceBatch
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.distributed.device_collectives import DeviceCollectives
from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import Resolution


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
        batch: The batch.
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

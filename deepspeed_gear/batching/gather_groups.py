"""Groups of fields that are gathered by one call of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_gear.batching.gather import Buffers
from deepspeed_gear.ops import Ops


@dataclass
class FieldGroup:
    """Fields that are gathered by one call of `gather_`.

    Args:
        which: The fields' numbers.
        masks: Numbers of the masks that they write.
        columns, shifts, gains, spec, pads: As of `gather_`; the spec numbers masks within the group.
    """

    which: list[int]
    masks: list[int]
    columns: list[torch.Tensor]
    shifts: list[torch.Tensor]
    gains: list[torch.Tensor]
    spec: list[int]
    pads: list[float]

    def run(
        self,
        ops: Ops,
        buffers: Buffers,
        counters: torch.Tensor,
        records: torch.Tensor,
        steps: torch.Tensor | None,
        threads: int,
        order: torch.Tensor | None = None,
    ) -> None:
        """Gather the fields.

        Args:
            ops: For the tensors' device.
            buffers: The tensors of all fields for the samples.
            counters: As of `gather_`, like the others.
            records: [B, 8], int64.
            steps: [B], int64.
            threads: Of the host.
            order: Order of the samples; affects only the time. [B], int64.
        """
        if not self.which:
            return
        outs = [buffers.outs[i] for i in self.which]
        masks = [buffers.masks[i] for i in self.masks]
        converted = self.columns, self.shifts, self.gains
        given = records, steps, self.spec, self.pads, threads
        ops.gather_(outs, masks, counters, *converted, *given, order)

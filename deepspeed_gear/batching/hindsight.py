"""Hindsight goals: gathers the rows of goals that were achieved. `relabelling.py` draws which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Resolution


@dataclass(frozen=True)
class GoalField:
    """Source and target of the goals of one field.

    Args:
        out: Index of the field's tensor.
        mask: Index of its mask, which no other field shares.
        column: The achieved goals. [rows, *shape].
        source: The op's code for their rows.
        shift: Of the field's conversion.
        gain: Likewise.
        shape: Of a row.
        dtype: In the batch.
    """

    out: int
    mask: int
    column: torch.Tensor
    source: int
    shift: torch.Tensor
    gain: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


class GoalRows:
    """Gathers the drawn rows of all goals of a batch in one call of `gather_`. Not thread-safe.

    Args:
        fields: The goals.
        ops: The ops.
        num_samples: B.
        threads: Of one call.
    """

    def __init__(self, fields: Sequence[GoalField], ops: Ops, num_samples: int, threads: int) -> None:
        self._fields, self._gather, self._threads = fields, ops.gather_, threads
        self._rows = [torch.zeros(num_samples, *field.shape, dtype=field.dtype) for field in fields]
        # One step at the anchor, moved by the vector of steps; no mask.
        self._words = lower(
            GatherSpec(field.source, after_n_step=1, elements=int(np.prod(field.shape, dtype=np.int64)))
            for field in fields
        )

    def fill(
        self,
        outs: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor],
        counters: torch.Tensor,
        records: torch.Tensor,
        goal_step: torch.Tensor,
    ) -> None:
        """Overwrite the goals of relabelled samples by the drawn rows.

        Args:
            outs: Every field's tensor. [B, ...].
            masks: Of the batch.
            counters: As `gather_`.
            records: Resolutions. [B, 8], int64.
            goal_step: As `HindsightRelabelling.draw` returns it. [B], int64.
        """
        chosen = (goal_step >= 0).nonzero().view(-1)
        if not len(chosen):
            return
        some = records[chosen]
        rows = [tensor[: len(chosen)] for tensor in self._rows]
        self._gather(
            rows,
            [],
            counters,
            [field.column for field in self._fields],
            [field.shift for field in self._fields],
            [field.gain for field in self._fields],
            some,
            goal_step[chosen] - some[:, Resolution.ANCHOR],
            self._words,
            [0.0] * len(rows),
            self._threads,
        )
        for field, values in zip(self._fields, rows, strict=True):
            outs[field.out].index_copy_(0, chosen, values)
            masks[field.mask].index_fill_(0, chosen, True)

"""Draws whose every bit goes into a digest, so that a stale read in one of many replays shows."""

import torch
from op_rings import ALL_ANCHORS, Ring
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import MassUnit, Normalize

_ROWS = 1 << 16
_STORED = 60_000
_PER_ADD = 1000


class Draws:
    """Prioritized draws from a table of transitions, the same on every device.

    Args:
        count: Samples of a draw. A warp draws one, so a block has eight.
        is_weighed: Whether the block that ends last weighs the samples of all blocks.
    """

    def __init__(self, ops: Ops, device: str, count: int, is_weighed: bool) -> None:
        ring = Ring(ops, _ROWS, _ROWS, 0, 1, MassUnit.STEP, ALL_ANCHORS, True, False, device=device)
        self.ring = ring
        for _ in range(_STORED // _PER_ADD):
            ring.add([1] * _PER_ADD)
        self._draw = [11, 3, 1, 0, 0, Normalize.BATCH]
        random = torch.Generator().manual_seed(count)
        drawn, _ = ring.select(_PER_ADD, self._draw, [ONE_Q62 // 2])
        ring.update(drawn, (torch.rand(_PER_ADD, generator=random) * 9).to(device))
        self.records, weights = ring.batch(count)
        self.weights = weights if is_weighed else weights[:0]
        self._betas = torch.tensor([ONE_Q62 // 2], device=device)
        factors = torch.randint(1 << 62, self.records.shape, generator=random) | 1
        self._factors = factors.to(device)
        #: Of all draws so far, in their order. [1], int64.
        self.digest = torch.zeros(1, dtype=torch.int64, device=device)

    def draw(self) -> None:
        """Draw once; no tensor of the table is allocated, so that a graph can replay it."""
        ring = self.ring
        known = (ring.slots, ring.sums, ring.minima, ring.row_slots, self._betas)
        how = (ring.rule, ring.shape, self._draw, ring.drawn_unit)
        ring.ops.ring_select_(ring.state, self.records, self.weights, *known, *how)
        self.digest.mul_(0x5851F42D4C957F2D).add_(self.sum())

    def sum(self) -> Tensor:
        of_records = (self.records * self._factors).sum()
        bits = self.weights.view(torch.int32).long()
        return of_records + (bits * self._factors[: len(bits), 0]).sum()

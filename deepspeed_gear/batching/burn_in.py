"""Burn-in: which steps of windows learn, and which only warm up a recurrent state.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.field_resolution import first_step
from deepspeed_gear.ops.records import Align, Resolution
from deepspeed_gear.ops.windows import bounds


@dataclass(frozen=True)
class BurnIn:
    """Burn-in of windows: their first step that learns, and the fields that have a time axis.

    With a burn-in of 2 steps and windows that begin at the step before the anchor, `begin` is 1:
    the steps -1 and 0 only warm up the recurrent state.
    """

    begin: int  # first step that learns, relative to the anchor
    windows: Mapping[str, ResolvedField]  # the fields with a time axis, by name

    @classmethod
    def of(
        cls, steps: int, fields: Sequence[ResolvedField], needed: Sequence[ResolvedField]
    ) -> BurnIn | None:
        """Return the burn-in of windows whose first `steps` only warm up a state; None for 0 steps.

        Args:
            steps: Steps from the begin of the earliest window of `fields` on.
            fields: All fields of a batch.
            needed: The fields that this rank gathers.
        """
        if steps == 0:
            return None
        windows = {field.name: field for field in needed if field.length is not None}
        return cls(first_step(fields) + steps, windows)

    def learns(self, name: str, mask: torch.Tensor, resolutions: torch.Tensor) -> torch.Tensor:
        """Return which steps of a field learn: the real ones after the burn-in.

        The result has the shape of the mask, [B, T] or [B], bool. For a field without a time axis
        it is the mask itself.
        """
        field = self.windows.get(name)
        if field is None:
            return mask
        places = torch.arange(mask.shape[1], device=mask.device) + field.part_first
        offset = int(field.offset)
        if field.align == "in_place":
            return mask & (places >= self.begin - offset)
        assert field.length is not None
        rows = resolutions[:, Resolution.NUM_STEPS] + int(
            field.column is not None and field.column.rows == "T+1"
        )
        align = Align.LEFT if field.align == "left" else Align.RIGHT
        # Windows that are moved to the left or right begin at other steps: `span` has the first
        # real row and its place. With row 7 at place 2 and the anchor 9, place 0 is the step -4.
        span = bounds(offset, field.length, align, resolutions[:, Resolution.ANCHOR], rows)
        steps = (span.begin - span.place - resolutions[:, Resolution.ANCHOR])[:, None] + places
        return mask & (steps >= self.begin)

"""Burn-in: which steps of windows learn, and which only warm up a recurrent state.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.field_checks import first_step
from deepspeed_gear.ops.records import Align, Resolution
from deepspeed_gear.ops.windows import bounds


@dataclass(frozen=True)
class BurnIn:
    """Burn-in of windows: the first step that learns, for each field."""

    begin: int  # first step that learns, relative to the anchor
    windows: Mapping[str, ResolvedField]  # the fields with a time axis, by name

    @classmethod
    def of(
        cls, steps: int, fields: Sequence[ResolvedField], needed: Sequence[ResolvedField]
    ) -> BurnIn | None:
        """Return the burn-in of windows whose first `steps` only warm up; None where these are 0.

        The earliest window of a batch's `fields` begins the sequence; `needed` are what this rank
        gathers.
        """
        if steps == 0:
            return None
        windows = {field.name: field for field in needed if field.length is not None}
        return cls(first_step(fields) + steps, windows)

    def learns(self, name: str, mask: torch.Tensor, resolutions: torch.Tensor) -> torch.Tensor:
        """Return which steps of a field learn: the real ones after the burn-in.

        It is of the shape of its mask, [B, T] or [B], bool; the mask itself for a field without a
        time axis.
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
        span = bounds(offset, field.length, align, resolutions[:, Resolution.ANCHOR], rows)
        steps = (span.begin - span.place - resolutions[:, Resolution.ANCHOR])[:, None] + places
        return mask & (steps >= self.begin)

"""A field of a batch with all defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepspeed_gear.schema import Column


@dataclass(frozen=True)
class ResolvedField:
    """A field of a batch with all defaults filled in.

    Args:
        name: Its name in the batch.
        column: The stored column, or None for a derived field.
        derived: "return_to_go", "timestep", "position" or None.
        offset: First step relative to the anchor, or "n_step".
        length: Steps of the window; None for no time axis.
        align: "in_place", "left" or "right".
        pad_kind: "zero", "edge" or "value".
        pad_value: The padding where `pad_kind` is "value", else 0.
        normalize: "mean_std", "min_max" or None.
        scale: Factor applied after normalisation.
        dtype: Name of the dtype in the batch, or "engine"; of an opaque column its own.
        part_first: First step of the window that is gathered. No option: set where ranks share a window.
        part_length: Steps that are gathered; None for the whole window.
        mask_only: Only the mask is made, the column is not read. No option: set for pipeline stages.
        hindsight: The column that a relabelled sample takes the row of a drawn step from, or None.
    """

    name: str
    column: Column | None
    derived: str | None = None
    offset: int | Literal["n_step"] = 0
    length: int | None = None
    align: str = "in_place"
    pad_kind: str = "zero"
    pad_value: int | float = 0
    normalize: str | None = None
    scale: float = 1.0
    dtype: str = "float32"
    part_first: int = 0
    part_length: int | None = None
    mask_only: bool = False
    hindsight: Column | None = None

    @property
    def follows(self) -> bool:
        """Whether the steps of the n-step return are added to the offset."""
        return self.offset == "n_step"

    @property
    def first(self) -> int:
        """Offset without the steps of the n-step return.

        The state after k steps is row k after the anchor's of the states, and row k - 1 of the next states.
        """
        if self.offset != "n_step":
            return self.offset
        return -1 if self.column is not None and self.column.is_next_observation else 0

    @property
    def collected_length(self) -> int | None:
        """Steps of the window that are gathered; None for no time axis."""
        return self.length if self.part_length is None else self.part_length

    @property
    def needs_episode(self) -> bool:
        """Whether it is right only where a trajectory is a whole episode."""
        return self.derived in ("return_to_go", "timestep")

    @property
    def is_opaque(self) -> bool:
        """Whether it is a list of opaque values, not a tensor."""
        return self.column is not None and self.column.is_opaque

    @property
    def is_converted(self) -> bool:
        """Whether gathering changes values other than by dtype."""
        return self.normalize is not None or self.scale != 1.0

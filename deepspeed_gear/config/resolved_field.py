"""A field of a batch with all defaults filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_gear.schema import Column, Schema

OF_EPISODES = ("return_to_go", "timestep")  # derived, unless the table has a column of the role


@dataclass(frozen=True)
class ResolvedField:
    """A field of a batch with all defaults filled in; options as in `FieldConfig`."""

    name: str
    column: Column | None  # None: derived
    derived: str | None = None
    offset: int | Literal["n_step"] = 0
    length: int | None = None
    align: str = "in_place"
    pad_kind: str = "zero"  # or "edge", or "value": that of `pad_value`, else 0
    pad_value: int | float = 0
    normalize: str | None = None
    scale: float = 1.0
    dtype: str = "float32"  # in the batch, or "engine"; of an opaque column its own
    absent: int | float | None = None  # in tables without the column; None: all have it
    # The next three are no options. Where sequence ranks share a window, this rank gathers its
    # steps from `part_first` on, `part_length` of them (None: all).
    part_first: int = 0
    part_length: int | None = None
    mask_only: bool = False  # for pipeline stages: the mask is made, the column is not read
    hindsight: Column | None = None  # achieved goals; a relabelled sample takes a row of them
    #: Windows that an advantage or a value target is estimated from, gathered for it alone. In the
    #: order of `advantages_`: reward, value, next_value, terminated, truncated, log_prob and
    #: behaviour_log_prob; None where there is no such column.
    inputs: tuple[ResolvedField | None, ...] = ()
    factors: tuple[float, ...] = ()  # gamma, lambda, rho_bar, c_bar

    @property
    def follows(self) -> bool:
        """Whether the offset follows the n-step return, and so varies between samples."""
        return self.offset == "n_step"

    @property
    def first(self) -> int:
        """Offset without the steps of the n-step return.

        The state after k steps is row k after the anchor's row of the states, but row k - 1 of the
        next states, so for next states the offset is -1.
        """
        if self.offset != "n_step":
            return self.offset
        return -1 if self.column is not None and self.column.is_next_observation else 0

    @property
    def gathered_length(self) -> int | None:
        """Steps of the window that this rank gathers; None without a time axis."""
        return self.length if self.part_length is None else self.part_length

    @property
    def needs_episode(self) -> bool:
        """Whether its values are right only where a trajectory is a whole episode."""
        return self.derived in OF_EPISODES

    @property
    def is_input(self) -> bool:
        """Whether it is gathered only to estimate other fields, and is not in the batch."""
        return self.name.startswith("\0")

    @property
    def is_opaque(self) -> bool:
        """Whether it is a list of opaque values or ragged ones, not a tensor."""
        return self.column is not None and not self.column.is_tensor

    @property
    def is_ragged(self) -> bool:
        """Whether its places have different numbers of values."""
        return self.column is not None and self.column.is_ragged

    @property
    def is_converted(self) -> bool:
        """Whether gathering changes the values, other than by a conversion of dtype."""
        return self.normalize is not None or self.scale != 1.0


def fields_in(fields: Sequence[ResolvedField], schema: Schema) -> list[ResolvedField]:
    """Return the fields whose column is in a table; others have their `absent` value there."""
    return [one for one in fields if one.absent is None or one.column in list(schema)]


def read_fields(fields: Sequence[ResolvedField]) -> list[ResolvedField]:
    """Return the fields whose rows are read: estimated ones are replaced by their inputs."""
    # A dict keeps the order; equal inputs of two fields are read once.
    read = (each for field in fields for each in field.inputs or (field,) if each is not None)
    return list(dict.fromkeys(read))

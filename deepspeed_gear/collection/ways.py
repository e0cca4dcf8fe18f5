"""Which way each field takes to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepspeed_gear.config import ResolvedField

DIRECT, COPIES, STAGED = "direct", "copies", "staged"
WAYS = (DIRECT, COPIES, STAGED)  # in the order in which they are taken where nothing is measured


def is_computed(field: ResolvedField) -> bool:
    """Whether nothing is stored of a field: time steps and positions."""
    return field.column is None and field.derived != "return_to_go"


def ways_of(
    fields: Sequence[ResolvedField], way: str, is_reached: Callable[[ResolvedField], bool]
) -> list[str]:
    """Return the way of each field.

    Args:
        fields: Of a batch.
        way: What is wanted.
        is_reached: Whether the device reads the column of a field in place.
    Returns:
        Goals are staged, as the host draws them, like what the device cannot read; what the copy engine does
        not serve is read in place.
    """
    return [_way_of(field, way, is_reached) for field in fields]


def _way_of(field: ResolvedField, way: str, is_reached: Callable[[ResolvedField], bool]) -> str:
    if way == STAGED or field.hindsight is not None or field.mask_only:
        return STAGED
    if not is_computed(field) and not is_reached(field):
        return STAGED
    return COPIES if way == COPIES and suits_copies(field) else DIRECT


def suits_copies(field: ResolvedField) -> bool:
    """Whether a sample's rows are one piece that the host can name, and all that its kernel reads."""
    if is_computed(field) or field.pad_kind == "edge" or field.offset == "n_step":
        return False
    return field.column is None or field.column.rows != "1"

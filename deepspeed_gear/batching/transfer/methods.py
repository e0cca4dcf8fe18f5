"""Transfer methods: choose zero-copy, copy engine or staging for each field."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepspeed_gear.config import ResolvedField

DIRECT, COPIES, STAGED = "direct", "copies", "staged"
WAYS = (DIRECT, COPIES, STAGED)  # in order of preference without a measurement
_RETURN_BYTES = 4  # a row of returns-to-go
#: Smallest window that the copy engine fetches unless it is configured. A piece of any size takes about
#: 1.1 us; kernels read 35 GB/s in place, so it is slower below some 28 KiB, as others measured on an H100.
LEAST_COPY_BYTES = 1 << 14


def is_computed(field: ResolvedField) -> bool:
    """Return whether a field is computed without stored rows: time steps and positions."""
    return field.column is None and field.derived != "return_to_go"


def ways_of(
    fields: Sequence[ResolvedField],
    way: str,
    is_reached: Callable[[ResolvedField], bool],
    least_copy_bytes: int = 0,
) -> list[str]:
    """Return the transfer method of each field.

    Args:
        fields: The fields of a batch.
        is_reached: Whether the device reads the column of a field in place.
        least_copy_bytes: Smaller windows are not copied by the copy engine.
    Returns:
        One of `WAYS` each. Fields that the device cannot read are staged, and goals, as the host draws them;
        fields that do not suit the copy engine are read in place.
    """
    return [_way_of(field, way, is_reached, least_copy_bytes) for field in fields]


def _way_of(
    field: ResolvedField, way: str, is_reached: Callable[[ResolvedField], bool], least_copy_bytes: int
) -> str:
    if way == STAGED or field.hindsight is not None or field.mask_only:
        return STAGED
    if not is_computed(field) and not is_reached(field):
        return STAGED
    return COPIES if way == COPIES and suits_copies(field, least_copy_bytes) else DIRECT


def suits_copies(field: ResolvedField, least_bytes: int = 0) -> bool:
    """Return whether a sample's rows of a field are one large piece, with all rows that its kernel reads.

    Args:
        least_bytes: Smallest size of a window.
    """
    if is_computed(field) or field.pad_kind == "edge" or field.offset == "n_step":
        return False
    row_bytes = _RETURN_BYTES if field.column is None else field.column.row_bytes
    is_large = (field.collected_length or 1) * row_bytes >= least_bytes
    return is_large and (field.column is None or field.column.rows != "1")

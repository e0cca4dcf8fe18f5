"""Checks of a field's dtype conversion and of its padding value."""

from __future__ import annotations

import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import DTYPES, Column

_GATHERED = (torch.int32, torch.int64)  # integers that the gather op converts others to


def check_dtype(at: str, own: str, requested: str, column: Column | None, converted: bool) -> None:
    """Reject a conversion that loses values or the precision that they need."""
    option, source = f"{at}.as", f"a derived {own}" if column is None else f"the {own} column {column.name}"
    # Values that targets and losses are computed from keep at least the precision of float32.
    exact = column is None or column.role in ("reward", "return", "terminated", "truncated")
    if requested == "engine":
        if exact:
            remedy = (
                "rewards, returns, flags and derived fields keep their precision; convert them in the model"
            )
            raise ConfigError(option, f'must not be "engine" for {source}', requested, remedy)
        if own in ("int16", "int32", "int64") and not converted:
            raise ConfigError(
                option, f'must not be "engine" for {source}', requested, "large integers would be rounded"
            )
        return
    target, have = DTYPES[requested], DTYPES[own]
    if target.is_floating_point:
        if exact and target.itemsize < min(4, have.itemsize):
            raise ConfigError(option, f"must keep the precision of {source}", requested, "use float32")
    elif converted:
        raise ConfigError(
            option, "must be a float type where the field is normalised or scaled", requested, "use float32"
        )
    elif not _holds(target, have):
        raise ConfigError(
            option, f"must hold every value of {source}", requested, f"use {own} or a wider type"
        )
    elif target != have and target not in _GATHERED:
        raise ConfigError(option, f"must be {own}, int32, int64 or a float type", requested, "use int32")


def _holds(target: torch.dtype, have: torch.dtype) -> bool:
    """Return whether an integer or bool type holds every value of another type."""
    if target == have or have is torch.bool:
        return True
    if have.is_floating_point or target is torch.bool:
        return False
    wide, narrow = torch.iinfo(target), torch.iinfo(have)
    return wide.min <= narrow.min and narrow.max <= wide.max


def check_pad(at: str, pad: int | float, dtype: str) -> None:
    name = f"{at}.pad"
    if dtype == "engine":
        return
    target = DTYPES[dtype]
    if dtype == "bool":
        if pad not in (0, 1):
            raise ConfigError(name, "must be 0 or 1 for a bool field", pad, "or convert the field with as")
    elif target.is_floating_point:
        if abs(pad) > torch.finfo(target).max:
            raise ConfigError(name, f"must be representable in {dtype}", pad, "choose a smaller number")
    elif pad != int(pad) or not torch.iinfo(target).min <= pad <= torch.iinfo(target).max:
        raise ConfigError(
            name, f"must be an integer that {dtype} can hold", pad, 'or convert the field with "as"'
        )

"""Columns and fields of gymnasium spaces, one for each part of a Dict or Tuple at any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import Column


def space_fields(name: str, space: Any) -> Any:
    """Return the names of the fields of a space's parts, nested in dicts and tuples as it is."""
    parts = _spaces_of(space)
    if parts is None:
        return name
    fields = {key: space_fields(f"{name}.{key}", part) for key, part in parts.items()}
    return fields if isinstance(space.spaces, Mapping) else tuple(fields.values())


def nested_fields(batch: Batch, fields: Any) -> Any:
    """Return the fields of a batch, nested as their names are; [B, 1] where they are [B]."""
    if isinstance(fields, str):
        values = batch[fields]
        return values if values.dim() > 1 else values.unsqueeze(1)
    if isinstance(fields, tuple):
        return tuple(nested_fields(batch, part) for part in fields)
    return {key: nested_fields(batch, part) for key, part in fields.items()}


def _spaces_of(space: Any) -> dict[str, Any] | None:
    """Return the parts of gymnasium's Dict or Tuple, by key or index; None for other spaces."""
    kinds = {base.__name__ for base in type(space).__mro__}
    if "Dict" in kinds:
        return dict(space.spaces)
    if "Tuple" in kinds:
        return {str(index): part for index, part in enumerate(space.spaces)}
    return None


def space_parts(name: str, argument: str, space: Any, value: Any) -> dict[str, Any]:
    """Return the parts of a value by the names of their columns.

    Args:
        name: Name of the column, or of those of the parts before the first dot.
        argument: Name of the value in errors.
    Raises:
        DataError: The value does not have the parts of the space.
    """
    spaces = _spaces_of(space)
    if spaces is None:
        return {name: value}
    given = value
    if isinstance(value, (tuple, list)):
        given = {str(index): part for index, part in enumerate(value)}
    if not isinstance(given, Mapping) or given.keys() != spaces.keys():
        shown = sorted(given) if isinstance(given, Mapping) else type(value).__name__
        remedy = "give the parts as the environment returns them: a dict, or a tuple"
        rule = f"must have the parts {', '.join(spaces)} of its space"
        raise DataError(argument, rule, shown, remedy)
    parts: dict[str, Any] = {}
    for key, part in spaces.items():
        parts |= space_parts(f"{name}.{key}", f"{argument}.{key}", part, given[key])
    return parts


def space_columns(name: str, space: Any, rows: Any) -> Iterator[Column]:
    """Yield the columns for the values of a gymnasium space, one for each of its parts."""
    role, _, part = name.partition(".")
    where = f"{role}_space" + (f": {part}" if part else "")
    parts = _spaces_of(space)
    if parts is not None:
        if not parts:
            raise ConfigError(where, "must have at least one part", 0, "leave the empty space out")
        for key, inner in parts.items():
            if not isinstance(key, str) or "." in key:
                remedy = "rename it with a wrapper of the environment"
                raise ConfigError(where, "must have names without dots as keys", key, remedy)
            yield from space_columns(f"{name}.{key}", inner, rows)
        return
    shape = getattr(space, "shape", None)
    dtype = getattr(space, "dtype", None)
    if shape is None or dtype is None:
        remedy = "store its values as arrays of one shape, with a wrapper of the environment"
        rule = "must be Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them"
        raise ConfigError(where, rule, type(space).__name__, remedy)
    yield Column(name, np.dtype(dtype).name, tuple(shape), role, rows)

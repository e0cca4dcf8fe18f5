"""Numbers that change with the global batch: constant, linear, or a function of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from deepspeed_gear.config.types import Words, refuse
from deepspeed_gear.errors import ConfigError

_ADMITTED = (
    "a number in [0, 1]",
    '{"linear": [from, to, steps]}',
    '{"callable": "module:function"}',
)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _check(value: Any) -> Any:
    """Accept what `value_at` can evaluate; values lie in [0, 1], as alpha, beta and shares do."""
    if _is_share(value) or callable(value):
        return value
    match value:
        case {"linear": [first, last, int(steps)], **rest} if not rest:
            if _is_share(first) and _is_share(last) and steps >= 1 and not isinstance(steps, bool):
                return value
        case {"callable": str(path), **rest} if not rest and path.count(":") == 1:
            return value
    if isinstance(value, dict) and [*value] == ["linear"]:
        raise refuse(
            'must be {"linear": [from, to, steps]} with from and to in [0, 1] and steps >= 1'
        )
    raise refuse(f"must be {', '.join(_ADMITTED[:-1])} or {_ADMITTED[-1]}")


def _to_json(value: Any) -> Any:
    return {"callable": f"{value.__module__}:{value.__qualname__}"} if callable(value) else value


Schedule = Annotated[Any, BeforeValidator(_check), PlainSerializer(_to_json), Words(*_ADMITTED)]


def value_at(schedule: Any, step: int, name: str) -> float:
    """Return the value of a schedule at a global batch.

    Args:
        step: The global batch, from 0 on.
        name: The option, for errors.
    """
    value = schedule
    if (function := function_of(schedule, name)) is not None:
        value = function(step)
        if not _is_share(value):
            raise ConfigError(
                f"{name} at global batch {step}",
                "must be a number in [0, 1]",
                value,
                "correct the schedule's function",
            )
    elif isinstance(schedule, dict):
        # {"linear": [0.4, 1.0, 100]} is 0.4 at batch 0, 0.7 at batch 50, and 1.0 from 100 on.
        first, last, steps = schedule["linear"]
        value = first + (last - first) * min(step / steps, 1.0)
    return float(value)


def function_of(schedule: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that a schedule is or names; None for a number or a linear schedule."""
    if isinstance(schedule, dict):
        schedule = schedule.get("callable")
    if schedule is None or isinstance(schedule, (int, float)):
        return None
    return imported(schedule, name)


def imported(path: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """Import the attribute that "module:attribute" names; a function is returned unchanged.

    Args:
        name: The option, for errors.
    """
    if not isinstance(path, str):
        return path
    module, _, attribute = path.partition(":")
    any_error = Exception  # of the user's module
    with ConfigError.on(
        name,
        "must name what can be imported",
        any_error,
        value=path,
        remedy="write module:name, and make the module importable",
    ):
        value: Callable[..., Any] = attrgetter(attribute)(importlib.import_module(module))
    return value

"""Numbers that change with the global batch: constant, linear, or any function of it."""

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
    """Accept what `value_at` can evaluate. Every value lies in [0, 1], as alpha, beta and shares
    do.
    """
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
    """Return the value of a schedule at global batch `step`, from 0 on; `name` is the option, for
    errors.
    """
    value = schedule
    if (function := function_of(schedule, name)) is not None:
        value = function(step)
        if not _is_share(value):
            raise ConfigError(f"{name} at global batch {step}", "must be a number in [0, 1]", value)
    elif isinstance(schedule, dict):
        first, last, steps = schedule["linear"]
        value = first + (last - first) * min(step / steps, 1.0)
    return float(value)


def function_of(schedule: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that a schedule is or names; None: it is a number, or linear."""
    if isinstance(schedule, dict):
        schedule = schedule.get("callable")
    return (
        None if schedule is None or isinstance(schedule, (int, float)) else imported(schedule, name)
    )


def imported(path: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """Import and return the attribute that "module:attribute" names; a function is returned as it
    is.

    `name` is the option, for the error.
    """
    if not isinstance(path, str):
        return path
    module, _, attribute = path.partition(":")
    # a module of the user's may raise any
    rule = "must name what can be imported"
    kind = Exception
    with ConfigError.on(name, rule, kind, value=path):
        found: Callable[..., Any] = attrgetter(attribute)(importlib.import_module(module))
    return found

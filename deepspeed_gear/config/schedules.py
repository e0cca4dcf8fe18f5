"""Numbers that change with the global batch: constant, linear, cosine, piecewise, or any function of it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from deepspeed_gear.config.types import Words, refuse
from deepspeed_gear.errors import ConfigError

_RAMPS = ("linear", "cosine")
_ADMITTED = (
    "a number in [0, 1]",
    '{"linear": [from, to, steps]}',
    '{"cosine": [from, to, steps]}',
    '{"piecewise": [[step, value], ...]}',
    '{"callable": "module:function"}',
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(value: Any) -> Any:
    """Accept what `value_at` can evaluate. Every value lies in [0, 1], as alpha, beta and shares do."""
    if _is_share(value) or callable(value):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, given),) = value.items()
        if kind in _RAMPS:
            good = isinstance(given, list) and len(given) == 3 and all(map(_is_share, given[:2]))
            if good and _is_step(given[2]) and given[2] > 0:
                return value
            raise refuse(f'must be {{"{kind}": [from, to, steps]}} with from and to in [0, 1] and steps >= 1')
        if kind == "piecewise":
            return _check_piecewise(value, given)
        if kind == "callable" and isinstance(given, str) and given.count(":") == 1:
            return value
    raise refuse(f"must be {', '.join(_ADMITTED[:-1])} or {_ADMITTED[-1]}")


def _check_piecewise(value: Any, pieces: Any) -> Any:
    pairs = isinstance(pieces, list) and all(isinstance(p, list) and len(p) == 2 for p in pieces)
    if not (pairs and pieces and all(_is_step(step) and _is_share(v) for step, v in pieces)):
        raise refuse('must be {"piecewise": [[step, value], ...]} with values in [0, 1]')
    steps = [step for step, _ in pieces]
    if steps[0] != 0 or steps != sorted(set(steps)):
        raise refuse("must have ascending steps that begin at 0")
    return value


def _to_json(value: Any) -> Any:
    return {"callable": f"{value.__module__}:{value.__qualname__}"} if callable(value) else value


Schedule = Annotated[Any, BeforeValidator(_check), PlainSerializer(_to_json), Words(*_ADMITTED)]


def value_at(schedule: Any, step: int, name: str) -> float:
    """Return the value of a schedule at a global batch.

    Args:
        schedule: As the config holds it.
        step: Number of the global batch, from 0 on.
        name: Of the option, for errors.
    Raises:
        ConfigError: A function cannot be imported, or returns no number in [0, 1].
    """
    if not isinstance(schedule, dict):
        return float(schedule) if not callable(schedule) else _called(schedule, step, name)
    ((kind, given),) = schedule.items()
    if kind == "piecewise":
        return float(next(value for begin, value in reversed(given) if begin <= step))
    if kind == "callable":
        return _called(imported(given, name), step, name)
    first, last, steps = given
    done = min(step / steps, 1.0)
    if kind == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return float(first + (last - first) * done)


def end_of(schedule: Any) -> int | None:
    """Return the global batch from which on a schedule stays as it is; None for a function."""
    if not isinstance(schedule, dict):
        return None if callable(schedule) else 0
    ((kind, given),) = schedule.items()
    if kind == "callable":
        return None
    return int(given[-1][0]) if kind == "piecewise" else int(given[2])


def imported(path: str, name: str) -> Callable[..., Any]:
    """Return what "module:attribute" names.

    Args:
        path: As the config has it.
        name: Of the option, for errors.
    Raises:
        ConfigError: It cannot be imported.
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(name, "must name what can be imported", path, str(error)) from error
    made: Callable[..., Any] = found
    return made


def _called(function: Callable[[int], float], step: int, name: str) -> float:
    value = function(step)
    if not _is_share(value):
        raise ConfigError(f"{name} at global batch {step}", "must be a number in [0, 1]", value)
    return float(value)

"""Schedules: values by global batch, what is refused, and functions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepspeed_gear.config import parse
from deepspeed_gear.config.schedules import value_at
from deepspeed_gear.errors import ConfigError


def beta_of(schedule: Any) -> Any:
    sampler = {"kind": "prioritized", "beta": schedule}
    return parse({"data": "d", "sampler": sampler}).sampler.beta  # type: ignore[union-attr]


def falling(step: int) -> float:
    return 1 / (1 + step)


def too_large(step: int) -> float:
    return 0.5 + step


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (0.3, {0: 0.3, 10**12: 0.3}),
        (1, {0: 1.0}),
        ({"linear": [0.4, 1.0, 100]}, {0: 0.4, 50: 0.7, 99: 0.994, 100: 1.0, 10**9: 1.0}),
        ({"linear": [1, 0, 4]}, {0: 1.0, 1: 0.75, 4: 0.0, 5: 0.0}),
        (falling, {0: 1.0, 3: 0.25}),
        ({"callable": "math:cos"}, {0: 1.0, 1: math.cos(1)}),
    ],
)
def test_values(schedule: Any, values: dict[int, float]) -> None:
    given = beta_of(schedule)
    for step, value in values.items():
        found = value_at(given, step, "gear.sampler.beta")
        assert type(found) is float
        assert found == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(
    "schedule",
    [
        -0.1,
        1.5,
        True,
        float("nan"),
        "0.5",
        None,
        {},
        {"linear": [0, 1]},
        {"linear": [0, 1, 0]},
        {"linear": [0, 1, 2.5]},
        {"linear": [0, 2, 10]},
        {"linear": 3},
        {"linear": [0, 1, True]},
        {"cosine": [0, 1, 5]},
        {"callable": "math"},
        {"callable": 3},
        {"linear": [0, 1, 5], "callable": "math:cos"},
        {"step": [0, 1, 5]},
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"gear\.sampler\.beta"):
        beta_of(schedule)


def test_functions_are_checked_when_they_are_called() -> None:
    with pytest.raises(ConfigError, match=r"beta at global batch 2 must be a number in \[0, 1\], got 2.5"):
        value_at(beta_of(too_large), 2, "beta")
    assert value_at(beta_of(too_large), 0, "beta") == 0.5
    for path in ("nothing_of_this_name:f", "math:nothing"):
        with pytest.raises(ConfigError, match=r"beta must name .*can be imported"):
            value_at(beta_of({"callable": path}), 0, "beta")

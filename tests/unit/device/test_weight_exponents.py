"""Schedules of beta on a device: a table of a linear one, and a function that is computed with
tensors.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ring_cases import PRIORITIZED, device_and_host, online, trajectories

from deepspeed_gear import DeviceReplay
from deepspeed_gear.config import parse
from deepspeed_gear.config.schedules import value_at
from deepspeed_gear.device.device_table import WeightExponents
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import RingState

CPU = torch.device("cpu")


SCHEDULES = SimpleNamespace(
    approach=lambda step: 1 - 0.6 / (1 + step / 4),  # without an end; exact on every device
    constant=lambda _: 0.5,
    vector=lambda step: step * torch.zeros(2),
    large=lambda step: step / 2000,
    late=lambda step: torch.where((step > 2) & (step < 900), step, 0.5),
)
NAMES = f"{__name__}:SCHEDULES"


def section(beta: Any, **options: Any) -> dict[str, Any]:
    return online({**PRIORITIZED, "beta": beta}, **options)


@pytest.mark.parametrize(
    "beta",
    [0.4, 0, 1, *({"linear": [0.2, 1.0, n]} for n in (1, 7, 10**5)), {"linear": [1, 0.3, 33]}],
)
def test_a_table_has_the_values_of_the_schedule(beta: Any) -> None:
    exponents = WeightExponents(parse(section(beta)).item_sampler, CPU)
    values = exponents.next_(torch.zeros(RingState.NUM_WORDS, dtype=torch.int64)).tolist()
    expected = [int(value_at(beta, key, "beta") * ONE_Q62) for key in range(len(values) + 2)]
    assert values == expected[: len(values)]
    assert values[-1] == expected[-1]


@pytest.mark.parametrize("normalize", ["batch", None])
def test_a_function_gives_the_weights_of_a_table_in_host_memory(normalize: str | None) -> None:
    made = section({"callable": f"{NAMES}.approach"}, seed=2)
    made["sampler"]["normalize"] = normalize
    with device_and_host(made) as both:
        columns = trajectories(6, 6)
        for i in range(6):
            both.add({name: values[i].numpy() for name, values in columns.items()})
        for _ in range(6):
            both.sample()
            both.report(torch.rand(32))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("math:sqrt", r"beta must take a tensor \[\], float64, and return one"),
        (f"{NAMES}.constant", "must take a tensor .*float: 0.5.*use the functions of torch"),
        (f"{NAMES}.vector", r"must take a tensor .*, got \[2\]"),
        (f"{NAMES}.large", r"beta at global batch 1000000000 must be in \[0, 1\], got 500000.0"),
        (f"{NAMES}.missing", "must name what can be imported"),
    ],
)
def test_a_function_that_cannot_run_on_a_device_is_refused(name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DeviceReplay(section({"callable": name}), "cpu")


def test_a_value_outside_of_its_range_is_clamped_and_counted() -> None:
    with DeviceReplay(section({"callable": f"{NAMES}.late"}), "cpu") as replay:
        replay.add_(trajectories(6, 6))
        for _ in range(3):
            replay.sample()
        replay.check()
        replay.sample()
        assert replay.statistics()["refused"] == 1
        with pytest.raises(DataError, match=r"beta in \[0, 1\]"):
            replay.check()

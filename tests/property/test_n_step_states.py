"""The state that an n-step return bootstraps from: of T+1 rows, and of a column of next observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import Column, DeviceReplay, Replay, Schema
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import ConfigError

GAMMA = 0.5
COLUMNS = [
    Column("reward", "float32", (), "reward"),
    Column("terminated", "bool", (), "terminated"),
    Column("truncated", "bool", (), "truncated"),
]
FORMS = {
    "T+1": ([Column("observation", "float32", (2,), "observation", "T+1")], "observation"),
    "role": ([Column("after", "float32", (2,), "next_observation")], "after"),
    "name": ([Column("next_observation.a", "float32", (2,), "observation")], "next_observation.a"),
}
Episode = tuple[int, str]  # steps, and the flag of the last one


def rows_of(number: int, episode: Episode) -> dict[str, torch.Tensor]:
    """Return an episode whose state t is 100 * number + t."""
    steps, end = episode
    states = (100.0 * (number + 1) + torch.arange(steps + 1.0))[:, None].repeat(1, 2)
    last = torch.arange(steps) == steps - 1
    flags = {flag: last & (end == flag) for flag in ("terminated", "truncated")}
    rows = {"observation": states, "after": states[1:], "next_observation.a": states[1:]}
    return {**rows, **flags, "reward": torch.ones(steps)}


def check(batch: Batch, n: int, episodes: list[Episode]) -> None:
    for sample in range(batch.num_samples):
        number, anchor = int(batch.trajectory_id[sample]), int(batch.anchor[sample])
        steps, end = episodes[number]
        k = min(n, steps - anchor)
        ends = end == "terminated" and anchor + k == steps
        assert batch["next"][sample].tolist() == [100.0 * (number + 1) + anchor + k] * 2
        assert bool(batch.mask["next"][sample])
        assert batch["discount"][sample] == (0 if ends else GAMMA**k)
        assert batch["return_n"][sample] == sum(GAMMA**i for i in range(k))


def section(form: str, n: int, **table: Any) -> dict[str, Any]:
    return {
        "batch_size": 16,
        "tables": {"main": {"capacity_steps": 200, "max_length": 7, "remove": "fifo", **table}},
        "sampler": {"unit": "step"},
        "n_step": {"n": n, "gamma": GAMMA},
        "fields": {"next": {"column": FORMS[form][1], "offset": "n_step"}, "reward": {}},
    }


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated", ""])), min_size=1, max_size=4
    ),
    st.integers(1, 4),
    st.sampled_from(list(FORMS)),
)
def test_the_state_after_the_steps_that_are_summed(episodes: list[Episode], n: int, form: str) -> None:
    schemas = {"main": Schema([*COLUMNS, *FORMS[form][0]])}
    given = [
        {name: rows_of(i, one)[name] for name in schemas["main"].names} for i, one in enumerate(episodes)
    ]
    with Replay(section(form, n), schemas=schemas) as replay:
        for rows in given:
            replay.add(rows)
        check(replay.sample(), n, episodes)
    with DeviceReplay(section(form, n, placement="device"), "cpu", schemas=schemas) as on_device:
        for rows in given:
            on_device.add_({name: value[None] for name, value in rows.items()})
        check(on_device.sample(), n, episodes)


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_column_without_that_state_is_refused(placement: str) -> None:
    schemas = {"main": Schema([*COLUMNS, Column("observation", "float32", (2,), "observation")])}
    options = section("T+1", 2, placement=placement)
    make: Any = Replay if placement == "host" else lambda config, **more: DeviceReplay(config, "cpu", **more)
    with pytest.raises(
        ConfigError, match=r"next\.column must have a row after the last step .*role next_observation"
    ):
        make(options, schemas=schemas)


def test_anchors_that_fit_have_that_state() -> None:
    """Of a column of next observations every step fits that has n steps from it on."""
    schemas = {"main": Schema([*COLUMNS, *FORMS["role"][0]])}
    options = section("role", 3)
    with Replay({**options, "sampler": {"unit": "step", "anchors": "fits"}}, schemas=schemas) as replay:
        replay.add({name: rows_of(0, (5, ""))[name] for name in schemas["main"].names})
        assert np.unique(replay.sample().anchor).tolist() == [0, 1, 2]

"""An episode longer than max_length is stored in parts, or refused where a field needs whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.errors import DataError

SCHEMA = Schema(
    [
        Column("observation", "float32", (), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
LONGEST = 5


def replay(fields: dict[str, Any], **table: Any) -> Replay:
    options = {"capacity_steps": 100, "max_length": LONGEST, **table}
    section = {
        "tables": {"main": options},
        "sampler": {"unit": "step"},
        "fields": {"observation": {}, **fields},
        "batch_size": 64,
    }
    return Replay(section, schemas={"main": SCHEMA})


def step(writer: Any, at: int, ended: bool = False, publish: bool = False) -> Any:
    """Take a step of two environments; the second one is reset before the limit."""
    if at % 4 == 0:
        writer.reset(np.array([at == 0, True]), observation=np.full(2, at, np.float32))
    no = np.zeros(2, bool)
    observation, reward = np.full(2, at + 1, np.float32), np.ones(2, np.float32)
    columns = {"observation": observation, "reward": reward, "terminated": no | ended, "truncated": no}
    return writer.step(publish=publish, **columns)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{"return_to_go": {}}, {"timestep": {}}, {"time": {"derived": "timestep", "length": 2}}],
    ids=str,
)
def test_a_field_that_needs_whole_episodes(fields: dict[str, Any], publish: bool, attached: bool) -> None:
    if publish and "return_to_go" in fields:
        pytest.skip("returns-to-go cannot be published")
    with replay(fields, writers=1) as found:
        name = found.tables["main"].memory.path.name
        source = TrajectoryWriter.attach(name=name) if attached else found.writer()
        writer = source.vector_writer(2, "disabled")
        for at in range(LONGEST):
            step(writer, at, publish=publish)
        for _ in range(2):
            with pytest.raises(DataError, match=f"environment 0 must have at most max_length = {LONGEST}"):
                step(writer, LONGEST, publish=publish)
        writer.reset(np.array([True, False]), observation=np.zeros(2, np.float32))
        assert [done.num_steps for done in step(writer, LONGEST, True, publish)] == [1, 2]
        source.close()


def test_an_episode_of_the_limit_is_whole() -> None:
    with replay({"return_to_go": {}, "timestep": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST):
            step(writer, at, at == LONGEST - 1)
        batch = found.sample()
        first = batch["return_to_go"] + batch["timestep"]
        assert set(first.tolist()) <= {float(LONGEST), 1.0}


def test_other_fields_admit_parts() -> None:
    with replay({"reward": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST + 2):
            step(writer, at)
        assert found.read([0])[0]["truncated"].tolist() == [False] * (LONGEST - 1) + [True]

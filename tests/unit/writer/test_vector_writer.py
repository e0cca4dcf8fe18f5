"""A VectorWriter refuses names that it does not take, and stores a long episode in parts or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gear_support import prefix

from deepspeed_gear import Column, DataError, Replay, Schema, TrajectoryWriter, VectorWriter

COLUMNS = {
    "observation.a": {"dtype": "float32", "role": "observation", "rows": "T+1"},
    "observation.b": {"dtype": "float32", "shape": [2], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "role": "action"},
    "task.id": {"dtype": "int64", "rows": "1"},
    "advantage": {"dtype": "float32", "late": True},
}
STATE = "observation.a, observation.b"
STEP = f"it takes action, {STATE}, task.id, terminated, truncated"


@pytest.fixture
def replay() -> Iterator[Replay]:
    table = {"capacity_steps": 100, "schema": {"columns": COLUMNS}}
    options = {"shared_memory": {"prefix": prefix()}}
    with Replay({"batch_size": 2, "tables": {"main": table}, **options}) as made:
        yield made


def state(**parts: Any) -> dict[str, Any]:
    return {"observation": {"a": np.zeros(2, np.float32), "b": np.zeros((2, 2), np.float32), **parts}}


def flat() -> dict[str, Any]:
    """Return a step that a native call takes."""
    return {
        "observation.a": np.zeros(2, np.float32),
        "observation.b": np.zeros((2, 2), np.float32),
        "action": np.ones(2, np.float32),
        "terminated": np.zeros(2, bool),
    }


def begun(replay: Replay, autoreset: Any = "disabled") -> VectorWriter:
    steps = replay.vector_writer(2, autoreset)
    steps.reset(**state(), task={"id": [4, 5]})
    return steps


@pytest.mark.parametrize(
    ("more", "name", "remedy"),
    [
        ({"speed": np.zeros(2, np.float32)}, "speed", STEP),
        ({"task": {"id": [1, 2], "name": [0, 0]}}, "task.name", STEP),
        ({"task": 3}, "task", STEP),
        (state(c=[0, 0]), "observation.c", STEP),
        ({"advantage": [0, 0]}, "advantage", "the column is late: write it by fill, when the trajectory was"),
    ],
)
def test_a_step_with_another_name(replay: Replay, more: dict[str, Any], name: str, remedy: str) -> None:
    steps = begun(replay)
    plain = flat()
    if "observation" in more:
        plain = {key: value for key, value in plain.items() if "." not in key}
    for given in (plain, {key: np.asarray(value).tolist() for key, value in plain.items()}):
        with pytest.raises(
            DataError, match=f"step: column {name} must be a column that step takes; {remedy}"
        ):
            steps.step(**given, **more)
    misspelt = {"actoin" if key == "action" else key: value for key, value in flat().items()}
    with pytest.raises(DataError, match="step: column actoin must be a column that step takes"):
        steps.step(**misspelt)
    assert (steps.num_steps, len(replay)) == (0, 0)
    steps.step(**flat())
    steps.step(**{**flat(), "terminated": np.ones(2, bool)}, truncated=np.zeros(2, bool))
    assert (steps.num_steps, len(replay), replay.num_steps) == (4, 2, 4)


@pytest.mark.parametrize(
    ("more", "name"),
    [({"speed": [0, 0]}, "speed"), ({"action": [0, 0]}, "action"), ({"terminated": [0, 0]}, "terminated")],
)
def test_a_reset_with_another_name(replay: Replay, more: dict[str, Any], name: str) -> None:
    steps = begun(replay)
    steps.step(**flat())
    rule = f"reset: column {name} must be a column that reset takes; it takes {STATE}, task.id"
    with pytest.raises(DataError, match=rule):
        steps.reset(**state(), **more)
    with pytest.raises(DataError, match=r"reset: column observation.c must be a column that reset takes"):
        steps.reset(**state(c=[0, 0]))
    steps.step(**{**flat(), "terminated": np.ones(2, bool)})
    assert replay.num_steps == 4, "nothing has changed"


def test_a_last_state_with_another_name(replay: Replay) -> None:
    steps, last = begun(replay, "same_step"), {**flat(), "terminated": np.ones(2, bool)}
    rule = f"final: column action must be a column that final takes; it takes {STATE}"
    with pytest.raises(DataError, match=rule):
        steps.step(**last, final={**state(), "action": [0, 0]})
    assert [done.num_steps for done in steps.step(**last, final=state())] == [1, 1]


# ---- episodes longer than max_length -----------------------------------------------------------------

EPISODE = Schema(
    [
        Column("observation", "float32", (), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
LONGEST = 5


def limited(fields: dict[str, Any], **table: Any) -> Replay:
    options = {"capacity_steps": 100, "max_length": LONGEST, **table}
    section = {
        "tables": {"main": options},
        "sampler": {"unit": "step"},
        "fields": {"observation": {}, **fields},
        "batch_size": 64,
    }
    return Replay(section, schemas={"main": EPISODE})


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
    with limited(fields, writers=1) as found:
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


def test_an_episode_of_the_limit_is_whole_and_other_fields_admit_parts() -> None:
    with limited({"return_to_go": {}, "timestep": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST):
            step(writer, at, at == LONGEST - 1)
        batch = found.sample()
        first = batch["return_to_go"] + batch["timestep"]
        assert set(first.tolist()) <= {float(LONGEST), 1.0}
    with limited({"reward": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST + 2):
            step(writer, at)
        assert found.read([0])[0]["truncated"].tolist() == [False] * (LONGEST - 1) + [True]

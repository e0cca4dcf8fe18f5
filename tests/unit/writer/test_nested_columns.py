"""Nested columns: every call that adds stores them as it stores columns under their
dotted names.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear import Column, Dataset, DatasetWriter, Replay, Schema
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import DataError

SCHEMA = Schema(
    [
        Column("observation.arm", "float32", (2,), "observation", "T+1"),
        Column("observation.cameras.0", "uint8", (3,), "observation", "T+1"),
        Column("observation.cameras.1", "float16", (), "observation", "T+1"),
        Column("action.move", "int64", (), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("task.goal", "float64", (2,), rows="1"),
        Column("score.human", "float32", (), rows="1", late=True),
    ]
)
STEPS = 3
RANDOM = np.random.default_rng(0)
FLAT: dict[str, Any] = {
    "observation.arm": RANDOM.random((STEPS + 1, 2), np.float32),
    "observation.cameras.0": RANDOM.integers(0, 256, (STEPS + 1, 3), np.uint8),
    "observation.cameras.1": RANDOM.random(STEPS + 1).astype(np.float16),
    "action.move": np.arange(STEPS),
    "reward": RANDOM.random(STEPS, np.float32),
    "terminated": np.arange(STEPS) == STEPS - 1,
    "task.goal": np.array([0.1, 0.2]),
}


def observation(rows: Any = slice(None)) -> dict[str, Any]:
    return {
        "arm": FLAT["observation.arm"][rows],
        "cameras": (FLAT["observation.cameras.0"][rows], FLAT["observation.cameras.1"][rows]),
    }


def nested(rows: Any = slice(None)) -> dict[str, Any]:
    """Return the columns of steps, nested."""
    return {
        "observation": observation(rows),
        "action": {"move": FLAT["action.move"][rows]},
        "reward": FLAT["reward"][rows],
        "terminated": FLAT["terminated"][rows],
    }


TASK = {"goal": FLAT["task.goal"]}
NESTED = {**nested(), "task": TASK}


def replay_of(schema: Schema = SCHEMA) -> Replay:
    section = {"batch_size": 2, "tables": {"main": {"capacity_steps": 200, "max_length": 20}}}
    return Replay(section, schemas={"main": schema})


def bits(trajectory: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: rows.contiguous().view(torch.uint8).flatten().tolist() for name, rows in
            ((name, torch.atleast_1d(rows)) for name, rows in trajectory.items())}  # fmt: skip


def test_every_writer_stores_nested_columns_as_flat_ones() -> None:
    with replay_of() as replay:
        writer = replay.writer()
        ids = [replay.add(FLAT), replay.add(NESTED), writer.add(NESTED)]
        rows = {**NESTED, "observation": [observation(row) for row in range(STEPS + 1)]}
        ids.append(writer.add(rows))  # an observation each, as they were collected
        for set_later in (False, True):
            with writer.trajectory(**({} if set_later else {"task": TASK})) as opened:
                for step in range(STEPS):
                    opened.append(**nested(step), publish=not set_later)
                opened.append(observation=observation(STEPS))
                opened.set(task=TASK)
            assert opened.completed is not None
            assert opened.completed == (0, opened.trajectory_id, STEPS)
            ids.append(opened.completed.trajectory_id)
        vector = writer.vector_writer(1, "disabled")
        vector.reset(observation=observation([0]), task={"goal": [TASK["goal"]]})
        for step in range(STEPS):
            completed = vector.step(**{**nested([step]), "observation": observation([step + 1])})
        ids += [done.trajectory_id for done in completed]
        vector.reset(observation=observation([0]), task={"goal": [[9.0, 9.0]]})
        for step in range(
            STEPS
        ):  # flat rows, which a native call could take, beside a nested value
            flat = {name: rows[[step]] for name, rows in FLAT.items() if name != "task.goal"}
            flat |= {
                name: FLAT[name][[step + 1]] for name in FLAT if name.startswith("observation")
            }
            task = {"task": {"goal": [TASK["goal"]]}} if step == STEPS - 1 else {}
            completed = vector.step(**flat, **task)
        ids += [done.trajectory_id for done in completed]
        assert len(ids) == 8
        for number in ids:
            replay.fill(number, score={"human": 0.5})
        wanted, *found = [bits(trajectory) for trajectory in replay.read(ids)]
        assert found == [wanted] * 7


def test_a_data_set_takes_them_too(tmp_path: Path) -> None:
    schema = Schema([column for column in SCHEMA if not column.late])
    for name, given in (("flat", FLAT), ("nested", NESTED)):
        with DatasetWriter(tmp_path / name, schema) as writer:
            writer.add(given)
    flat, found = (Dataset.open(tmp_path / name).trajectory(0) for name in ("flat", "nested"))
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in flat.items()}


def test_errors_name_the_column_by_its_dotted_name() -> None:
    with replay_of() as replay:
        writer = replay.writer()
        vector = replay.vector_writer(1, "disabled")
        opened = writer.trajectory()
        arm = observation()["arm"]
        cameras = observation()["cameras"]
        for wrong, text in (
            (
                {"arm": arm, "cameras": cameras, "leg": arm},
                "column observation.leg must be in the schema",
            ),
            (
                {"arm": arm, "cameras": cameras[:1]},
                r"column observation.cameras.1 must be in every traj",
            ),
            (
                {"arm": arm[:, :1], "cameras": cameras},
                r"column observation.arm must have shape \['T\+1', 2",
            ),
            ({"arm": arm[:2], "cameras": cameras}, "column observation.arm must have 4 rows"),
            ({}, "column observation must be in the schema"),
            ({"arm": {"x": arm}, "cameras": cameras}, "column observation.arm must be conv.*parts"),
            (
                {"arm": arm, "cameras": {0: arm}},
                "column observation.cameras must have strings as keys, got 0",
            ),
            (
                [observation(0), {"arm": 1.0}],
                "column observation.cameras must be in every row or in none",
            ),
        ):
            for add in (replay.add, writer.add):
                with pytest.raises(DataError, match=text):
                    add({**NESTED, "observation": wrong})
        with pytest.raises(
            DataError, match=r"trajectory: column observation.arm must be given once; by"
        ):
            replay.add({**NESTED, "observation.arm": arm})
        with pytest.raises(DataError, match=r"column observation.leg must be a column of steps"):
            opened.append(**{**nested(0), "observation": {"leg": 1.0}})
        with pytest.raises(DataError, match=r"column observation.arm must be in every step"):
            opened.append(**{**nested(0), "observation": {"cameras": cameras}})
        with pytest.raises(DataError, match=r"column observation.arm must be in every reset"):
            vector.reset(observation={"cameras": cameras})
        vector.reset(observation=observation([0]))
        with pytest.raises(DataError, match=r"column observation.cameras.1 must be in every step"):
            vector.step(**{**nested([0]), "observation": {"arm": arm[:1], "cameras": cameras[:1]}})
        with pytest.raises(
            DataError, match=r"column observation.arm must have shape \[1, 2\], got \[4, 2\]"
        ):
            vector.step(**{**nested([0]), "observation": observation()})
        with pytest.raises(
            DataError, match=r"score.rest must be one of the late columns: score.human"
        ):
            replay.fill(0, score={"rest": 1.0})
        assert len(replay) == 0


def test_flat_columns_are_not_copied() -> None:
    names = frozenset(FLAT)
    assert flatten("x", FLAT, names) is FLAT
    assert flatten("x", {}, names) == {}
    assert flatten("x", {"a": [[1, 2], [3]], "b": (), "c": [None]}, names) == {
        "a": [[1, 2], [3]],
        "b": (),
        "c": [None],
    }
    rows = np.array([None, {"a": 1}, None], object)
    assert flatten("x", {"o": rows}, names) == {"o.a": [None, 1, None]}

"""Columns that come later, policy versions and ages, through a Replay.

Batches of them, deaths and checkpoints: tests/property/test_online_machine.py.
"""

import os
import signal
from typing import Any

import numpy as np
import pytest
from process_support import exit_status, in_child

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    NotReadyError,
    SchemaError,
    StoreError,
    StoreFullError,
)

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("which", "int64"),
        Column("version", "int64"),
        Column("advantage", "float32", late=True),
        Column("value", "float32", rows="T+1", late=True),
        Column("score", "float32", rows="1", late=True),
    ]
)


def trajectory(number: int, steps: int = 3, version: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "observation": np.full((steps + 1, 2), number, np.float32),
        "which": np.full(steps, number, np.int64),
        "version": np.full(steps, version, np.int64) + np.arange(steps) // 2,
        **more,
    }


def replay(
    fields: Any = ("which", "advantage"), sampler: dict[str, Any] | None = None, **table: Any
) -> Replay:
    section = {
        "tables": {"main": {"capacity_steps": 60, "capacity_trajectories": 6, **table}},
        "sampler": sampler or {"kind": "uniform", "unit": "step"},
        "fields": {name: {} for name in fields},
        "batch_size": 32,
        "timeout_s": 5.0,
    }
    return Replay(section, schemas={"main": SCHEMA})


def drawn(found: Replay) -> set[int]:
    return set(found.sample()["which"].tolist())


def test_a_column_that_no_batch_reads_changes_no_priority() -> None:
    with replay(sampler={"kind": "prioritized", "unit": "step"}) as found:
        number = found.add(trajectory(0, advantage=np.array([4, 5, 6], np.float32)))
        batch = found.sample()
        found.update_priorities(batch, (batch["advantage"] == 5).float() * 100)
        assert set(found.sample()["advantage"].tolist()) == {5}
        found.fill(number, score=np.float32(7))
        assert set(found.sample()["advantage"].tolist()) == {5}


@pytest.mark.parametrize(
    "sampler",
    [
        {"kind": "weighted", "weight": "score"},
        {"kind": "recent", "within": {"column": "score", "distance": 100}},
        {"kind": "uniform", "where": {"score": {"max": 100}}},
    ],
    ids=lambda sampler: sampler["kind"],
)
def test_columns_that_a_sampler_reads_are_waited_for(sampler: dict[str, Any]) -> None:
    """One that is not filled holds 0, which is no weight, age or value."""
    with replay(["which"], sampler) as found:
        ids = [found.add(trajectory(number)) for number in range(3)]
        assert not found.can_sample()
        found.fill(ids[1], score=np.float32(7))
        assert drawn(found) == {1}


def test_wrong_fills_change_nothing() -> None:
    with replay() as found:
        number = found.add(trajectory(4))
        for columns, text in (
            (
                {"which": np.zeros(3)},
                "which must be one of the late columns: advantage, value, score",
            ),
            ({"advantage": np.zeros(4, np.float32)}, "must have the rows of 3 steps, got 4"),
            ({"value": np.zeros(3, np.float32)}, "must have the rows of 3 steps"),
            ({"score": np.zeros(3, np.float32)}, "must have shape"),
            (
                {"advantage": np.zeros(3, np.float32), "value": np.zeros(9, np.float32)},
                "must have the rows",
            ),
        ):
            with pytest.raises(DataError, match=text):
                found.fill(number, **columns)
        assert not found.can_sample()
        found.fill(number, advantage=np.ones(3), value=np.ones(4), score=2.5)
        assert drawn(found) == {4}
        with pytest.raises(StoreError, match="must be stored on this node"):
            found.fill(number + 1, advantage=np.ones(3))
    with pytest.raises(SchemaError, match="must not be late with the role reward"):
        Column("reward", "float32", role="reward", late=True)


# ---- completed trajectories ----------------------------------------------------------------------


def states(*values: float) -> dict[str, Any]:
    return {"observation": np.repeat(np.array(values, np.float32)[:, None], 2, 1)}


@pytest.mark.parametrize("publish", [False, True])
def test_every_trajectory_that_ends_is_returned(publish: bool) -> None:
    with replay(max_length=3, capacity_steps=120, capacity_trajectories=20) as found:
        vector = found.vector_writer(2, autoreset="disabled")
        completed = []
        assert vector.reset(**states(0, 0)) == []
        for step in range(1, 6):
            ended = np.array([False, step == 2])
            rows = {
                "which": np.arange(2) + 10 * step,
                "version": np.zeros(2, np.int64),
                "terminated": ended,
            }
            completed.append(vector.step(**states(step, step), **rows, publish=publish))
            if step == 2:
                assert vector.reset(ended, **states(2, 0)) == []
        # Published ids are in the order of the first steps, others in that of the ends.
        cut, ended, last = (0, 2, 3) if publish else (1, 0, 2)
        ended = 1 if publish else 0
        assert completed == [[], [(1, ended, 2)], [], [(0, cut, 3)], []]
        dropped = vector.reset(np.array([True, False]), **states(0, 0))
        assert dropped == ([(0, last, 2)] if publish else [])
        closed = vector.close()
        assert closed == ([(1, 2, 3)] if publish else [])
        assert vector.close() == []
        every = [*completed[1], *completed[3], *dropped, *closed]
        assert len(every) == len(found)
        for done in every:
            found.fill(done.trajectory_id, advantage=np.full(done.num_steps, done.env, np.float32))
        batch = found.sample()
        assert (batch["which"] % 10 == batch["advantage"]).all()


def test_a_trajectory_that_is_completed_before_an_error_is_returned_later() -> None:
    """Nothing is lost where the table has no room for the second of two."""
    with replay(capacity_steps=10, capacity_trajectories=1, max_length=5) as found:
        vector = found.vector_writer(2, autoreset="next_step")
        vector.reset(**states(0, 0))
        rows = {
            "which": np.arange(2),
            "version": np.zeros(2, np.int64),
            "terminated": np.ones(2, bool),
        }
        with pytest.raises(StoreFullError):
            vector.step(**states(1, 1), **rows)
        assert vector.reset(**states(0, 0)) == [(0, 0, 1)]


def test_one_trajectory_says_how_it_was_completed() -> None:
    with replay(max_length=5) as found:
        writer = found.writer()
        step = {"which": 1, "version": 0}
        for publish in (False, True):
            with writer.trajectory() as opened:
                opened.append(observation=[0.0, 0.0], **step)
                opened.append(observation=[1.0, 1.0], publish=publish)
                assert opened.completed is None
            assert opened.completed == (0, int(publish), 1)
        for publish in (False, True):
            with writer.trajectory() as opened:
                opened.append(observation=[0.0, 0.0], **step)
                opened.append(observation=[1.0, 1.0], **step, publish=publish)
                opened.discard()
            assert opened.completed == ((0, 2, 1) if publish else None)


# ---- ages ----------------------------------------------------------------------------------------


def test_versions_that_are_too_old_go() -> None:
    with replay(("which",), version={"column": "version", "max_lag": 2}) as found:
        for number in range(4):
            found.add(
                trajectory(number, steps=3 + number, version=number)
            )  # its last steps are newer
        found.set_policy_version(3)
        assert drawn(found) == {1, 2, 3}
        wanted = float(np.mean([3 - int(number) for number in found.sample()["which"]]))
        assert found.progress().lag == found.take_metrics()["lag"] == wanted
        found.set_policy_version(2)  # never falls
        assert drawn(found) == {1, 2, 3}
        found.set_policy_version(5)
        assert drawn(found) == {3}
        stale = found.statistics()["stale"]["main"]
        assert stale == {"trajectories": 3, "steps": 12, "by_length": {"2-3": 1, "4-7": 2}}
    with replay(("which",)) as found, pytest.raises(ConfigError, match="must have versions"):
        found.set_policy_version(1)


def test_what_came_too_long_ago_goes() -> None:
    with replay(("which",), max_age=2) as found:
        found.add(trajectory(0))
        assert drawn(found) == {0}
        found.add(trajectory(1))
        assert drawn(found) == {0, 1}
        assert drawn(found) == {0, 1}
        assert drawn(found) == {1}


@pytest.mark.parametrize("how", ["too much has changed", "a writer has died"])
def test_versions_are_known_when_changes_are_not(how: str) -> None:
    """What came since the last selection is found in the slot table, where the log does
    not say it.
    """
    limit = {"column": "version", "max_lag": 2}
    with replay(fields=("which",), version=limit, remove="fifo", writers=1) as found:
        found.set_policy_version(10)
        for number in range(2):
            found.add(trajectory(number, version=10))
        found.sample()
        for number in range(600 if how == "too much has changed" else 3):
            found.add(trajectory(100 + number, version=10))
        if how == "a writer has died":
            name = found.tables["main"].memory.path.name

            def die() -> None:
                TrajectoryWriter.attach(name=name).parts[0].lock.__enter__()
                os.kill(os.getpid(), signal.SIGKILL)

            exit_status(in_child(die))
        held = len(found)
        found.sample()
        assert len(found) == held


def test_a_new_version_waits_for_open_trajectories() -> None:
    version = {"column": "version", "max_lag": 1, "on_stale": "wait"}
    with replay(("which",), version=version) as found:
        vector = found.vector_writer(2, autoreset="next_step")
        states = {"observation": np.zeros((2, 2), np.float32)}

        def step(version: int, *ended: bool) -> None:
            columns = {
                "which": np.arange(2),
                "version": np.full(2, version),
                "terminated": np.array(ended),
            }
            vector.step(**states, **columns)

        vector.reset(**states)
        step(0, False, False)
        found.set_policy_version(1)
        step(1, False, True)  # one ends, the other began with version 0
        with pytest.raises(NotReadyError, match="end this process's own trajectories first"):
            found.set_policy_version(2)
        step(1, True, False)
        found.set_policy_version(2)
        assert not found.can_sample(), "what is complete and too old goes"
        step(2, False, False)
        step(2, True, True)
        assert drawn(found) == {0, 1}

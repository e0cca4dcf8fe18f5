"""Steps of open trajectories that batches hold already.

In any order, with deaths, evictions, late columns and checkpoints:
tests/property/test_online_machine.py.
"""

import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import wait_until
from process_support import in_child, kill

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.errors import DataError, NotReadyError, StoreError, StoreFullError
from deepspeed_gear.sampling import batch_stream
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.writer import trajectory_writer

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("which", "int64"),
        Column("truncated", "bool", (), "truncated"),
        Column("terminated", "bool", (), "terminated"),
        Column("task", "int64", rows="1"),
    ]
)
LONGEST = 8


def replay(
    sampler: Any = None, schema: Schema = SCHEMA, fields: Any = None, **table: Any
) -> Replay:
    options = {
        "capacity_steps": 40,
        "capacity_trajectories": 6,
        "max_length": LONGEST,
        "remove": "fifo",
    }
    section = {
        "tables": {"main": {**options, **table}},
        "sampler": sampler or {"kind": "uniform", "unit": "step"},
        "fields": fields or {"which": {}, "observation": {"offset": 0, "length": 2}},
        "batch_size": 64,
        "timeout_s": 5.0,
    }
    return Replay(section, schemas={"main": schema})


def observed(number: int) -> dict[str, Any]:
    return {"observation": np.full(2, number, np.float32)}


def step(number: int) -> dict[str, Any]:
    return {**observed(number), "which": number, "truncated": False, "terminated": False}


def append(opened: Any, numbers: Iterable[int], publish: bool = True) -> None:
    for number in numbers:
        opened.append(**step(number), publish=publish)


def drawn(found: Replay) -> set[int]:
    batch = found.sample()
    observation = batch["observation"][..., 0]
    assert (observation[:, 0] == batch["which"]).all()
    assert (observation[:, 1] == batch["which"] + 1).all()  # the state that the step has led to
    return set(batch["which"].tolist())


def whole(number: int, steps: int) -> dict[str, Any]:
    which = np.arange(steps) + 100 * number
    observation = (
        np.repeat(np.arange(steps + 1) + 100.0 * number, 2).reshape(-1, 2).astype(np.float32)
    )
    ends = np.zeros(steps, bool)
    return {
        "observation": observation,
        "which": which,
        "truncated": ends,
        "terminated": ends,
        "task": number,
    }


@pytest.mark.parametrize(
    "sampler",
    [
        {"unit": "step"},
        {"kind": "prioritized", "unit": "trajectory"},
        {"unit": "step", "anchors": "end"},
    ],
    ids=str,
)
def test_steps_are_drawn_as_soon_as_they_are_published(sampler: dict[str, Any]) -> None:
    with replay(sampler) as found, found.writer().trajectory(task=3) as opened:
        opened.append(**step(0), publish=True)
        assert not found.can_sample()  # the state behind it is not known yet
        for number in range(1, 6):
            opened.append(**step(number), publish=number != 3)
            known = {1: 1, 2: 2, 3: 2, 4: 4, 5: 5}[number]
            expected = {known - 1} if sampler.get("anchors") == "end" else set(range(known))
            assert drawn(found) == expected
        assert found.read([opened.trajectory_id])[0]["task"].item() == 3
        opened.append(**observed(6))


def test_a_late_priority_of_a_step_that_is_no_anchor_changes_nothing() -> None:
    sampler = {"kind": "prioritized", "unit": "step", "anchors": "end"}
    with replay(sampler) as found, found.writer().trajectory(task=0) as opened:
        append(opened, range(4))
        late = found.sample().clone()
        assert set(late["which"].tolist()) == {2}
        append(opened, [4])
        found.update_priorities(late, torch.full((64,), 9.0))
        assert drawn(found) == drawn(found) == {3}
        found.update_priorities(late, torch.full((64,), 9.0))
        append(opened, [5])
        assert drawn(found) == {4}
        opened.append(**observed(6))


def test_a_trajectory_without_its_last_state_stays_as_truncated() -> None:
    with replay() as found:
        opened = found.writer().trajectory(task=0)
        with pytest.raises(DataError, match="must have the rows of 3 steps"), opened:
            append(opened, range(4))
        assert found.read([opened.trajectory_id])[0]["truncated"].tolist() == [False, False, True]
        table = found.tables["main"]
        assert table.control[Control.FREE_ROWS] == table.spec.capacity_rows - 4


# ---- many environments ---------------------------------------------------------------------------


def begun(found: Replay, num_envs: int) -> Any:
    """Return a writer of environments that have begun an episode of task 0."""
    vector = found.vector_writer(num_envs, autoreset="next_step")
    vector.reset(observation=np.zeros((num_envs, 2), np.float32), task=np.zeros(num_envs, np.int64))
    return vector


def vector_step(t: int, num_envs: int, ends: list[int], **more: Any) -> dict[str, Any]:
    which = np.arange(num_envs) * 100 + t
    observation = np.stack([which + 1, which + 1], 1).astype(np.float32)
    is_last = np.isin(np.arange(num_envs), ends)
    return {
        "observation": observation,
        "which": which,
        "terminated": is_last,
        "truncated": is_last & False,
        **more,
    }


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_many_environments(autoreset: Any) -> None:
    with replay(capacity_steps=60) as found:
        vector = found.vector_writer(3, autoreset=autoreset)
        start = np.repeat(np.arange(3) * 100.0, 2).reshape(3, 2).astype(np.float32)
        vector.reset(observation=start, task=np.arange(3))
        for t in range(4):
            assert vector.step(**vector_step(t, 3, []), publish=True) == []
            assert drawn(found) == {100 * env + n for env in range(3) for n in range(t + 1)}
        last = vector_step(4, 3, [1])
        final = {"observation": last["observation"]} if autoreset == "same_step" else None
        added = vector.step(**last, final=final, publish=True)
        assert len(added) == 1
        stored = found.read([added[0].trajectory_id])[0]
        assert stored["which"].tolist() == [100, 101, 102, 103, 104]
        assert stored["terminated"].tolist() == [False] * 4 + [True]
        assert stored["task"].item() == 1
        assert drawn(found) == {100 * env + n for env in range(3) for n in range(5)}
        vector.reset(np.array([True, False, False]), observation=start)
        assert found.read([0])[0]["truncated"].tolist() == [False] * 4 + [True]


# ---- room ----------------------------------------------------------------------------------------


def test_too_many_open_ones_find_no_room() -> None:
    with replay(capacity_steps=2 * LONGEST) as found:
        vector = begun(found, 3)
        with pytest.raises(StoreFullError, match="must have 9 free rows in a run"):
            vector.step(**vector_step(0, 3, []), publish=True)


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_follows_a_removed_part_is_another_trajectory(how: str) -> None:
    with replay() as found:
        with found.writer().trajectory(task=7) as opened:
            append(opened, range(4))
            first = opened.trajectory_id
            found.remove([first]) if how == "remove" else found.clear()
            assert not found.can_sample()
            found.add(whole(1, 2))  # its rows are not free yet
            opened.append(**step(4))
            opened.append(**step(5), publish=True)
            assert opened.trajectory_id != first
            assert drawn(found) == {3, 4, 100, 101}
            opened.append(**observed(6))
        assert found.read([opened.trajectory_id])[0]["which"].tolist() == [3, 4, 5]
        assert found.read([opened.trajectory_id])[0]["task"].item() == 7
        table = found.tables["main"]
        found.clear()
        assert table.control[Control.FREE_ROWS] == table.spec.capacity_rows


def test_a_rate_counts_published_steps() -> None:
    rate = {
        "samples_per_insert": 32,
        "min_size": 2,
        "error_buffer": 224,
    }  # up to 9 steps without a sample
    with replay(rate_limiter=rate) as found:
        table = found.tables["main"]
        found.add(whole(1, 2))
        with found.writer().trajectory(task=0) as opened:
            append(opened, range(8))
            assert table.num_steps == 9
            assert found.can_sample()
            with pytest.raises(NotReadyError, match="must be sampled from first"):
                opened.append(**observed(8), publish=True)
            assert table.num_steps == 9
            found.sample()  # the step is appended already: the end publishes it
        assert table.control[Control.STEPS_INSERTED] == 10


def test_many_that_publish_at_once_pass_the_smallest_buffer() -> None:
    """Each waits for its own steps only, so no process waits for what the others bring."""
    rate = {"samples_per_insert": 4, "min_size": 8, "error_buffer": 48}
    with replay(
        rate_limiter=rate, capacity_steps=1000, capacity_trajectories=100, writers=1
    ) as found:
        name = found.tables["main"].memory.path.name

        def write() -> None:
            with TrajectoryWriter.attach(name=name) as writer:
                vector = writer.vector_writer(32, "next_step")
                vector.reset(observation=np.zeros((32, 2), np.float32), task=np.zeros(32, np.int64))
                for t in range(4):
                    vector.step(**vector_step(t, 32, []), publish=True)
                signal.pause()

        child = in_child(write)
        for _ in range((32 * 4 * 4 - 48) // 64):
            found.sample()
        wait_until(lambda: found.tables["main"].num_steps == 32 * 4, "publishing")
        kill(child)


def test_who_is_dropped_without_being_closed_keeps_no_room() -> None:
    with replay() as found:
        for _ in range(5):
            vector = begun(found, 2)
            vector.step(**vector_step(0, 2, []), publish=True)
        with vector:
            pass
        assert found.tables["main"].views["retention"][:, SlotRetention.OPEN].sum() == 0


def test_a_reset_that_is_refused_changes_nothing() -> None:
    with replay() as found:
        vector = begun(found, 1)
        for t in range(2):
            vector.step(**vector_step(t, 1, []), publish=True)
        with pytest.raises(DataError, match="column observation must be in every reset"):
            vector.reset()
        vector.step(**vector_step(2, 1, []), publish=True)
        assert (len(found), found.tables["main"].num_steps) == (1, 3)


def test_a_writer_that_publishes_learns_that_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = replay(writers=1)
    writer = TrajectoryWriter.attach(name=found.tables["main"].memory.path.name)
    opened = writer.trajectory(task=0)
    append(opened, range(3))
    assert writer.num_added == 1
    found.close()
    monkeypatch.setattr(trajectory_writer, "_CHECK_S", 0.0)
    with pytest.raises(StoreError, match="its ranks have ended"):
        append(opened, [3])
    writer.close()


@pytest.mark.parametrize("anchors", ["all", "end"])
def test_growth_is_seen_where_the_log_of_changes_was_too_short(anchors: str) -> None:
    sampler = {"kind": "prioritized", "unit": "step", "anchors": anchors}
    many = {"capacity_steps": 200, "capacity_trajectories": 20}
    with replay(sampler, **many) as found, found.writer().trajectory(task=0) as opened:
        append(opened, range(3))
        found.sample()
        append(opened, range(3, 6))
        for number in range(1, 601):
            found.add(whole(number, 1))
        steps = {step for _ in range(20) for step in found.sample()["which"].tolist() if step < 100}
        assert steps == ({4} if anchors == "end" else set(range(5)))
        opened.append(**observed(6))


# ---- refusals ------------------------------------------------------------------------------------


def test_what_cannot_be_published() -> None:
    """Without a longest trajectory, with returns-to-go, without a value of the trajectory."""
    with replay(max_length=None) as found, found.writer().trajectory(task=0) as opened:
        with pytest.raises(DataError, match="must have max_length for steps of open trajectories"):
            append(opened, [0])
        opened.append(observation=np.zeros(2, np.float32))
    schema = Schema([*SCHEMA, Column("reward", "float32", (), "reward")])
    with replay(schema=schema, fields={"return_to_go": {}}) as found:
        vector = begun(found, 1)
        with pytest.raises(DataError, match="must not keep returns-to-go"):
            vector.step(**vector_step(0, 1, [], reward=np.zeros(1, np.float32)), publish=True)
    with replay() as found:
        opened = found.writer().trajectory()
        append(opened, [0, 1], publish=False)
        with pytest.raises(DataError, match="column task must be in every trajectory"):
            append(opened, [2])
        assert found.tables["main"].num_steps == 0


def test_longer_than_the_longest() -> None:
    with replay() as found:
        opened = found.writer().trajectory(task=0)
        with pytest.raises(DataError, match="must have at most max_length = 8 steps"):
            append(opened, range(LONGEST + 2))
        with pytest.raises(DataError, match="must have at most max_length"), opened:
            pass
        assert found.read([opened.trajectory_id])[0]["truncated"].tolist() == [False] * (
            LONGEST - 1
        ) + [True]


# ---- death, checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize("notices", ["a cut", "a writer", "the next in its place"])
def test_what_a_dead_writer_has_published_stays(
    notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_stream, "_CLEAN_S", 0.0)
    with replay(writers=1, capacity_steps=20) as found:
        config = found.config.to_json()

        def write() -> None:
            writer = TrajectoryWriter.attach(config, table="main", name=name)
            with writer.trajectory(task=5) as opened:
                for number in range(5):
                    opened.append(**step(number), publish=number != 4)
                signal.pause()

        table = found.tables["main"]
        name = table.memory.path.name
        child = in_child(write)
        wait_until(lambda: table.num_steps == 3, "publishing")
        kill(child)
        if notices == "a cut":
            assert drawn(found) == {0, 1, 2}
        elif notices == "a writer":
            for number in (1, 2):
                found.add(whole(number, 7))
        else:
            TrajectoryWriter.attach(table="main", name=name).close()
        assert found.read([0])[0]["truncated"].tolist() == [False, False, True]
        assert found.read([0])[0]["which"].tolist() == [0, 1, 2]
        found.clear()
        assert table.control[Control.FREE_ROWS] == table.spec.capacity_rows
        assert table.control[[Control.PENDING, Control.ROWS_HELD]].tolist() == [0, 0]

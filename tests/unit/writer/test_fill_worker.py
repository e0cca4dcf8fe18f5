"""Fill workers: leases of trajectories that lack a late column."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from gear_support import wait_until
from group_support import COLUMNS, add, section
from process_support import exit_status, in_child

from deepspeed_gear import ConfigError, DataError, FillWorker, Replay, StoreError, TrajectoryWriter
from deepspeed_gear.store.late_columns import absent, fill_each


@pytest.fixture
def config() -> dict[str, Any]:
    return section({"column": "prompt", "size": 2, "needs": ["reward"]}, writers=2)


def ids(leases: Any) -> list[int]:
    return [lease.trajectory_id for lease in leases]


def test_leases_are_of_other_trajectories_until_they_end(config: dict[str, Any]) -> None:
    with Replay(config) as replay:
        for prompt in (3, 1, 2):
            add(replay, prompt, 0)
            add(replay, prompt, 1)
        first = FillWorker.attach(config, "reward")
        second = FillWorker.attach(config, "reward", lease_s=0)
        assert ids(first.lease(2)) == [2, 3]  # by group
        third, fourth = second.lease(2)
        assert ids((third, fourth)) == [4, 5]
        assert sorted(third.columns) == ["prompt", "sample", "tokens", "weight"]
        assert third.columns["tokens"].tolist() == [3, 3, 3]
        assert ids(first.lease(9)) == [4, 5, 0, 1]  # the time of the second one's has passed
        assert first.lease(timeout_s=0.01) == second.lease(timeout_s=0) == []
        third.fill(np.float32(4))
        third.fill(np.float32(5))
        assert replay.read([4])[0]["reward"] == 4
        assert replay.statistics()["late"]["main"] == {"reward": {"absent": 5, "repeated": 1}}
        first.close()
        again = second.lease(9)
        assert ids(again) == [2, 3, 5, 0, 1]
        with pytest.raises(DataError, match="must be finite"):
            again[1].fill(np.float32(np.nan))
        replay.remove([0])  # and 1, of the same group
        again[3].fill(np.float32(1))
        fourth.fill(np.float32(1))
        assert ids(second.lease(9)) == [2, 3]
        with pytest.raises(DataError, match="have shape"):
            again[0].fill(np.zeros(3, np.float32))
        second.close()
        with pytest.raises(StoreError, match="must be open"):
            again[0].fill(np.float32(1))
        with pytest.raises(ConfigError, match="must be a late column; there are: reward"):
            FillWorker.attach(config, "weight")


def test_several_columns_are_filled_together(config: dict[str, Any]) -> None:
    """Both or none: a value that does not fit leaves the other column as it was."""
    teacher = {
        "ids": {"dtype": "int32", "shape": [2], "late": True},
        "teacher": {"dtype": "float32", "shape": [2], "late": True},
    }
    config["tables"]["main"]["schema"] = {"columns": {**COLUMNS, **teacher}}
    ids = np.arange(6).reshape(3, 2)
    logp = -np.ones((3, 2), np.float32)
    with Replay(config) as replay, FillWorker.attach(config, ["teacher", "ids"]) as worker:
        for sample in range(3):
            add(replay, 1, sample)
        replay.fill(0, ids=ids)
        first, second = worker.lease(2)
        with FillWorker.attach(config, ("ids", "teacher")) as other:
            assert [one.trajectory_id for one in other.lease(9)] == [2]
        first.fill(ids=ids + 1, teacher=logp)
        assert replay.read([0])[0]["ids"].tolist() == ids.tolist()
        assert replay.statistics()["late"]["main"]["ids"] == {"absent": 2, "repeated": 1}
        for wrong, match in (
            ({"ids": ids}, "must be given the worker's columns: teacher, ids"),
            ({"ids": ids, "teacher": logp, "reward": 1.0}, "must be given the worker's columns"),
            ({"ids": ids, "teacher": logp[:2]}, "column teacher must have shape"),
            ({"ids": ids[:, :1], "teacher": logp}, "column ids must have shape"),
            ({"ids": ids, "teacher": logp * np.nan}, "must be finite"),
        ):
            with pytest.raises(DataError, match=match):
                second.fill(**wrong)
        with pytest.raises(DataError, match="got '1 values without names'"):
            second.fill(ids)
        assert replay.statistics()["late"]["main"]["ids"]["absent"] == 2
        second.fill(ids=ids, teacher=logp)
        assert replay.read([1])[0]["teacher"].tolist() == logp.tolist()
        for names in ([], ["ids", "ids"]):
            with pytest.raises(ConfigError, match="must name one or more columns, each once"):
                FillWorker.attach(config, names)


def test_a_killed_worker_returns_its_leases(config: dict[str, Any]) -> None:
    with Replay(config) as replay:
        for sample in range(4):
            add(replay, 1 + sample // 2, sample)

        def work() -> None:
            worker = FillWorker.attach(config, "reward")
            for lease in worker.lease(3)[:1]:
                lease.fill(np.float32(7))
            time.sleep(60)

        child = in_child(work)
        wait_until(lambda: replay.statistics()["late"]["main"]["reward"]["absent"] < 4, "a fill")
        with FillWorker.attach(config, "reward") as worker:
            (free,) = worker.lease(9, timeout_s=0)
            assert free.trajectory_id == 3
            os.kill(child, signal.SIGKILL)
            exit_status(child)
            assert ids(worker.lease(9)) == [1, 2]
            assert replay.read([0])[0]["reward"] == 7


@pytest.mark.parametrize("count", [0, 2])
def test_a_death_inside_a_fill_leaves_whole_columns(config: dict[str, Any], count: int) -> None:
    """Killed with the lock held: all rows are written, and the first `count` of four count as
    filled.
    """
    with Replay(config) as replay:
        for sample in range(4):
            add(replay, 1 + sample // 2, sample)
        values = np.arange(4, dtype=np.float32)

        def work() -> None:
            table, _ = TrajectoryWriter.attach(config).parts
            native = table.ops.native
            mark = native.late_rows_mark

            def mark_some(store: int, bit: int, slots: np.ndarray) -> None:
                mark(store, bit, slots[:count])
                os.kill(os.getpid(), signal.SIGKILL)

            native.late_rows_mark = mark_some
            with table.lock:
                records = absent(table, "reward")
            fill_each(table, table.schema["reward"], records, values, table.lineage)

        assert exit_status(in_child(work)) == -signal.SIGKILL
        assert replay.statistics()["late"]["main"]["reward"]["absent"] == 4 - count
        with FillWorker.attach(config, "reward") as worker:
            leases = worker.lease(9)
            assert ids(leases) == list(range(count, 4))
            for lease in leases:
                assert "reward" not in lease.columns
                lease.fill(values[lease.trajectory_id])
        assert [replay.read([number])[0]["reward"] for number in range(4)] == values.tolist()

"""States, refusals and batches of a table in the memory of one device, here the host's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import PRIORITIZED, SAMPLERS, assert_same, online, step_of, trajectories

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GearError,
    SchemaError,
    ShapeError,
    StoreError,
)


def test_an_empty_state_is_empty() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        empty = replay.export_table()
        replay.add_(trajectories(2, 3))
        replay.import_table(empty)
        with pytest.raises(StoreError, match="must hold a trajectory"):
            replay.sample()
        sums = empty["content"]["main"].pop("sums")
        with pytest.raises(CheckpointError, match=r"content of table main must be that of .*, got 'sums'"):
            replay.import_table(empty)
        empty["content"]["main"] |= {"sums": sums, "other": sums}
        with pytest.raises(CheckpointError, match="got 'other'"):
            replay.import_table(empty)


def test_a_state_continues_with_the_batches_that_would_have_come() -> None:
    section = online(SAMPLERS["by the table"], seed=2)
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as other:
        replay.add_(trajectories(6, 5))
        for _ in range(3):
            replay.update_priorities_(replay.sample(), torch.rand(32))
        state = replay.export_table()
        expected = [replay.sample().clone() for _ in range(3)]
        addresses = [tensor.data_ptr() for tensor in other.table.content.values()]
        other.import_table(state)
        for batch in expected:
            assert_same(other.sample(), batch)
        assert addresses == [tensor.data_ptr() for tensor in other.table.content.values()]
        with pytest.raises(CheckpointError, match="format"):
            other.import_table({**state, "format": 0})
        with pytest.raises(CheckpointError, match="must be of the same seed"):
            other.import_table({**state, "options": "x"})
    with (
        DeviceReplay(online(SAMPLERS["by the table"], seed=2, table={"capacity_steps": 80}), "cpu") as larger,
        pytest.raises(CheckpointError, match="must be of a table of this size"),
    ):
        larger.import_table(state)


def test_a_position_continues_with_the_content_that_is_there() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(6, 5))
        for _ in range(3):
            replay.sample()
        position = json.loads(json.dumps(replay.state_dict()))
        expected = [replay.sample().clone() for _ in range(2)]
        replay.load_state_dict(position)
        for batch in expected:
            assert_same(replay.sample(), batch)
        assert len(replay) == 6
        progress = replay.progress()
        assert progress.num_samples == (3 + 2 + 2) * replay.batch_info.global_batch
        assert progress.wait_share is None
        del position["train"]["main"]["samples"]
        with pytest.raises(CheckpointError, match=r"train.main must have the entry 'samples'"):
            replay.load_state_dict(position)


def test_a_save_does_not_destroy_the_one_before(tmp_path: Path) -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(2, 3))
        before = replay.save(tmp_path)
        replay.add_(trajectories(2, 3))
        newest = replay.save(tmp_path)
        assert json.loads(json.dumps(newest)) == newest
        for state, count in ((before, 2), (newest, 4), (None, 4)):
            replay.load(tmp_path, state)
            assert len(replay) == count
        replay.load(tmp_path, before)
        replay.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"main must hold the save .* of the state"):
            replay.load(tmp_path, newest)
        file = tmp_path / "main" / "shard-0" / "content.pt"
        file.write_bytes(file.read_bytes() + b"x")
        with pytest.raises(CheckpointError, match=r"shard-0/content\.pt must be as it was saved"):
            replay.load(tmp_path)
        assert len(replay) == 2


def test_transitions_are_refused_where_returns_are_of_several_steps() -> None:
    """Each is a trajectory of its own, so all returns would be of one step."""
    step = step_of(trajectories(3, 1))
    with DeviceReplay(online(), "cpu") as replay:
        with pytest.raises(ConfigError, match=r"gear.n_step.n must be 1 where .*, got 3; add pieces"):
            replay.add_transitions_(*step)
        assert len(replay) == 0
    for n_step, length in (({"n": 1, "gamma": 0.9}, 1), ({"n": 3, "gamma": 0.9}, 2)):
        table = {"max_length": length, "capacity_trajectories": 60}
        with DeviceReplay(online(table=table, n_step=n_step), "cpu") as replay:
            if length == 1:
                replay.add_transitions_(*step)
            else:
                replay.add_(trajectories(3, 2))
            assert int(replay.sample()["steps_n"].max()) == length


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    good = trajectories(2, 4)
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        state = replay.table.state.clone()
        bad: list[tuple[type[GearError], dict[str, Any], Any]] = [
            (SchemaError, {k: v for k, v in good.items() if k != "reward"}, None),
            (SchemaError, {**good, "more": good["reward"]}, None),
            (SchemaError, {**good, "reward": good["reward"].double()}, None),
            (ShapeError, {**good, "reward": good["reward"][:, :3]}, None),
            (ShapeError, {**good, "observation": good["observation"][:, :4]}, None),
            (ShapeError, {**good, "task": good["task"][:1]}, None),
            (ShapeError, trajectories(2, 7), None),
            (ShapeError, trajectories(50, 2), None),
            (ShapeError, good, torch.tensor([1])),
            (ShapeError, good, torch.tensor([1.0, 2.0])),
        ]
        for error, columns, lengths in bad:
            with pytest.raises(error):
                replay.add_(columns, lengths)
        assert torch.equal(replay.table.state, state)
        replay.add_(good, torch.tensor([5, 4]))  # a length that only the device sees
        assert replay.statistics()["refused"] == 1
        with pytest.raises(DataError, match="1 that were not"):
            replay.check()
        batch = replay.sample()
        assert set(batch["task"].tolist()) == {1}
        with pytest.raises(ShapeError, match="must have shape"):
            replay.update_priorities_(batch, torch.ones(3))
        replay.update_priorities_(batch, torch.full((32,), float("nan")))
        assert replay.statistics()["refused"] == 33
        replay.sample()
    with pytest.raises(StoreError, match="must be open"):
        replay.sample()


def test_a_clone_keeps_its_probabilities() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(2, 5))
        batch = replay.sample()
        kept, probability = batch.clone(), batch.probability.clone()
        replay.add_(trajectories(3, 6))
        assert not torch.equal(replay.sample().probability, probability)
        assert torch.equal(kept.probability, probability)


def test_ranks_that_share_the_time_axis_report_whole_samples() -> None:
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(2, 5))
        batch = replay.sample()
        replay.batch_info = dataclasses.replace(replay.batch_info, sequence_world=2)
        with pytest.raises(ShapeError, match=r"must have shape \[B\] where ranks share the time axis"):
            replay.update_priorities_(batch, torch.ones(batch.num_samples, 2))

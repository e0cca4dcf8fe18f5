"""States, refusals and batches of a table in the memory of one device, here the host's."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import COLUMNS, PRIORITIZED, SAMPLERS, assert_same, online, step_of, trajectories

from deepspeed_gear import DeviceReplay, Replay
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
        with pytest.raises(
            CheckpointError, match=r"content of table main must have the tensors of .*, got 'sums'"
        ):
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
        position = json.loads(json.dumps(replay.state_dict()))
        expected = [replay.sample().clone() for _ in range(3)]
        replay.load_state_dict(position)  # and the content that is there
        for batch in expected:
            assert_same(replay.sample(), batch)
        progress = replay.progress()
        assert progress.num_samples == (3 + 3 + 3) * replay.batch_info.global_batch
        assert progress.wait_share is None
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
        DeviceReplay(
            online(SAMPLERS["by the table"], seed=2, table={"capacity_steps": 80}), "cpu"
        ) as larger,
        pytest.raises(CheckpointError, match="must have the size of this config's table"),
    ):
        larger.import_table(state)


def test_a_save_does_not_destroy_the_one_before(tmp_path: Path) -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(2, 3))
        before = replay.save(tmp_path)
        replay.add_(trajectories(2, 3))
        newest = replay.save(tmp_path)
        assert json.loads(json.dumps(newest)) == newest
        for state, count in ((newest, 4), (None, 4), (before, 2)):
            replay.load(tmp_path, state)
            assert len(replay) == count
        file = tmp_path / "main" / "shard-0" / "content.pt"
        file.write_bytes(file.read_bytes() + b"x")
        with pytest.raises(CheckpointError, match=r"shard-0/content\.pt must be as it was saved"):
            replay.load(tmp_path)
        assert len(replay) == 2


def test_transitions_are_refused_where_returns_are_of_several_steps() -> None:
    """Each is a trajectory of its own, so all returns would be of one step."""
    step = step_of(trajectories(3, 1))
    with DeviceReplay(online(), "cpu") as replay:
        with pytest.raises(
            ConfigError, match=r"gear.n_step.n must be 1 where .*, got 3; add pieces"
        ):
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
        wrong: list[tuple[type[GearError], dict[str, Any]]] = [
            (SchemaError, {"more": good["reward"]}),
            (SchemaError, {"reward": good["reward"].double()}),
            (ShapeError, {"reward": good["reward"][:, :3]}),
            (ShapeError, {"observation": good["observation"][:, :4]}),
            (ShapeError, {"task": good["task"][:1]}),
            (ShapeError, trajectories(2, 7)),
            (ShapeError, trajectories(50, 2)),
        ]
        for error, change in wrong:
            with pytest.raises(error):
                replay.add_({**good, **change})
        with pytest.raises(SchemaError, match="column action must be given"):
            replay.add_({"reward": good["reward"]})
        for lengths in (torch.tensor([1]), torch.tensor([1.0, 2.0])):
            with pytest.raises(ShapeError):
                replay.add_(good, lengths)
        assert torch.equal(replay.table.state, state)
        replay.add_(good, torch.tensor([5, 4]))  # a length that only the device sees
        assert replay.statistics()["refused"] == 1
        with pytest.raises(DataError, match="1 outside it"):
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


def test_a_clone_keeps_its_probabilities_and_ranks_that_share_the_time_axis_report_whole_samples() -> (
    None
):
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(2, 5))
        batch = replay.sample()
        kept = batch.clone()
        probability = batch.probability.clone()
        replay.add_(trajectories(3, 6))
        assert not torch.equal(replay.sample().probability, probability)
        assert torch.equal(kept.probability, probability)
        replay.batch_info = dataclasses.replace(replay.batch_info, sequence_world=2)
        with pytest.raises(
            ShapeError, match=r"must have shape \[B\] where ranks share the time axis"
        ):
            replay.update_priorities_(batch, torch.ones(batch.num_samples, 2))


UNIFORM = {"kind": "uniform"}
STRATIFIED = SAMPLERS["trajectories"]
TOP_K = {"kind": "top_k", "unit": "step"}
WHERE = {"kind": "uniform", "unit": "step", "where": {"task": {"min": 1}}}
LATE = {"columns": {**COLUMNS, "task": {**COLUMNS["task"], "late": True}}}


def with_envs(**table: Any) -> dict[str, Any]:
    """Options of a table to which steps of 4 environments are added."""
    return {"table": {"capacity_steps": 4000, "max_length": 5, "num_envs": 4, **table}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": {"max_length": None}}, "max_length must be given"),
        (
            {"table": {"max_length": 1}},
            r"must be at least 2 with gear.n_step.n 3: .*, got 1; set it",
        ),
        ({"table": {"remove": "uniform"}}, 'remove must be "fifo"'),
        ({"table": {"writers": 2}}, "writers must not be given"),
        ({"table": {"max_age": 2}}, "max_age must not be given"),
        ({"prefetch": 2}, "prefetch must not be given"),
        ({"sampler": {"kind": "lifo"}}, "kind must be one of"),
        ({"sampler": {**PRIORITIZED, "alpha": {"linear": [0, 1, 5]}}}, "alpha must be a number"),
        (
            {"sampler": {**PRIORITIZED, "beta": {"callable": "math:sqrt"}}},
            r"beta must take a tensor \[\]",
        ),
        (
            {"table": {"scope": "shard"}},
            r"gear\.tables\.main\.scope is not an option; known are data, ",
        ),
        ({"table": {"placement": "host"}}, 'placement must be "device"'),
        (
            {"table": {"placement": "host", "rows": "host"}},
            "rows must not be given for a table in host",
        ),
        (
            {"sampler": UNIFORM, "table": {"num_envs": 2, "max_times_sampled": 2}},
            "sampled must not be given",
        ),
        ({"sampler": TOP_K, "table": {"num_envs": 2}}, "unit must be .trajectory. where steps"),
        (
            {"sampler": TOP_K, "table": {"max_times_sampled": 2}},
            "must not be given unless trajectories",
        ),
        (
            {"sampler": STRATIFIED, "table": {"max_times_sampled": 2}},
            r"together with sampler\.stratified",
        ),
        (
            {"sampler": WHERE, "table": {"num_envs": 2}},
            r"sampler\.where must not be given where steps are",
        ),
        (with_envs(capacity_steps=39), "capacity_steps must be at least 40"),
        (with_envs(capacity_trajectories=23), "capacity_trajectories must be at least 24"),
        (with_envs(capacity_steps=None, capacity_bytes=700), "capacity_bytes must hold 40 steps"),
        (with_envs(placement="host"), "num_envs must not be given for a table in host memory"),
        (
            {**with_envs(), "fields": {"return_to_go": {}, "action": {}}},
            'must not be "return_to_go"',
        ),
        ({**with_envs(), "fields": {"time": {"derived": "timestep"}}}, 'must not be "timestep"'),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceReplay(online(**copy.deepcopy(change)), "cpu")


def test_tables_that_cannot_be_on_devices_are_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"column task must not be late where gear\.sampler\.where"
    ):
        DeviceReplay(online(WHERE, table={"schema": LATE}), "cpu")
    with pytest.raises(ConfigError, match="use DeviceReplay"):
        Replay(online())
    made = online({"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}, "of": {"unit": "step"}})
    table = made["tables"].pop("main")
    made["tables"] = {"a": table, "b": {**table, "placement": "host"}}
    with pytest.raises(ConfigError, match=r"b\.placement must be \"device\" as that of the other"):
        DeviceReplay(made, "cpu")


@pytest.mark.parametrize(
    "device", ["cuda:99", "cudaa", "meta", *([] if torch.cuda.is_available() else ["cuda"])]
)
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        DeviceReplay(online(), device)

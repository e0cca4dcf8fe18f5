"""Configs that a table on devices cannot have are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ring_cases import COLUMNS, PRIORITIZED, SAMPLERS, online

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.errors import ConfigError, SchemaError

TOP_K_STEPS = {"kind": "top_k", "unit": "step"}
WHERE = {"kind": "uniform", "unit": "step", "where": {"task": {"min": 1}}}
LATE = {"columns": {**COLUMNS, "task": {**COLUMNS["task"], "late": True}}}


def with_envs(**table: Any) -> dict[str, Any]:
    """Options of a table to which steps of 4 environments are added."""
    return {"table": {"capacity_steps": 4000, "max_length": 5, "num_envs": 4, **table}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": {"max_length": None}}, "max_length must be given"),
        ({"table": {"max_length": 1}}, r"must be at least 2 with gear.n_step.n 3: .*, got 1; set it"),
        ({"table": {"remove": "uniform"}}, 'remove must be "fifo"'),
        ({"table": {"writers": 2}}, "writers must not be given"),
        ({"table": {"max_age": 2}}, "max_age must not be given"),
        ({"prefetch": 2}, "prefetch must not be given"),
        ({"sampler": {"kind": "epoch"}}, "kind must be one of"),
        ({"sampler": {**PRIORITIZED, "alpha": {"linear": [0, 1, 5]}}}, "alpha must be a number"),
        ({"sampler": {**PRIORITIZED, "beta": {"callable": "math:sqrt"}}}, r"beta must take a tensor \[\]"),
        ({"table": {"scope": "shard"}}, r"gear\.tables\.main\.scope is not an option; known are data, "),
        ({"table": {"placement": "host"}}, 'placement must be "device"'),
        (
            {"table": {"placement": "host", "rows": "host"}},
            r"rows must not be given for a table in host",
        ),
        (
            {"sampler": {"kind": "uniform"}, "table": {"num_envs": 2, "max_times_sampled": 2}},
            "max_times_sampled must not be given",
        ),
        ({"sampler": TOP_K_STEPS, "table": {"num_envs": 2}}, "unit must be .trajectory. where steps"),
        ({"sampler": TOP_K_STEPS, "table": {"max_times_sampled": 2}}, r"sampled needs sampler\.unit"),
        (
            {"sampler": SAMPLERS["trajectories"], "table": {"max_times_sampled": 2}},
            r"must not be given together with sampler\.strat",
        ),
        ({"sampler": WHERE, "table": {"num_envs": 2}}, r"sampler\.where must not be given where steps are"),
        (with_envs(capacity_steps=39), "capacity_steps must be at least 40"),
        (with_envs(capacity_trajectories=23), "capacity_trajectories must be at least 24"),
        (with_envs(capacity_steps=None, capacity_bytes=700), "capacity_bytes must hold 40 steps"),
        (with_envs(placement="host"), "num_envs must not be given for a table in host memory"),
        ({**with_envs(), "fields": {"return_to_go": {}, "action": {}}}, 'must not be "return_to_go"'),
        ({**with_envs(), "fields": {"time": {"derived": "timestep"}}}, 'must not be "timestep"'),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceReplay(online(**copy.deepcopy(change)), "cpu")


def test_a_late_column_cannot_be_a_condition() -> None:
    with pytest.raises(SchemaError, match=r"column task must not be late where gear\.sampler\.where"):
        DeviceReplay(online(WHERE, table={"schema": LATE}), "cpu")


def test_tables_on_devices_and_on_the_host_are_not_mixed() -> None:
    made = online({"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}, "of": {"unit": "step"}})
    table = made["tables"].pop("main")
    made["tables"] = {"a": table, "b": {**table, "placement": "host"}}
    with pytest.raises(ConfigError, match=r"b\.placement must be \"device\", as that of the other"):
        DeviceReplay(made, "cpu")


@pytest.mark.parametrize(
    "device", ["cuda:99", "cudaa", "meta", *([] if torch.cuda.is_available() else ["cuda"])]
)
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        DeviceReplay(online(), device)


def test_a_replay_in_shared_memory_refuses_a_table_on_devices() -> None:
    with pytest.raises(ConfigError, match="use DeviceReplay"):
        Replay(online())

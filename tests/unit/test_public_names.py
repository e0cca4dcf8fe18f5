"""What completion and `repr` show of the public objects."""

from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix
from rollout_support import filled, section

import deepspeed_gear
from deepspeed_gear import DeviceReplay, Replay, TransitionBuffer

MAPPING = "get items keys values"
REPLAY_BASE = """
    batch_info clear close config datasets denormalize device fields is_node_leader iterator load
    load_state_dict node normalize normalizer num_batches num_replicas num_steps progress sample save schemas
    state_dict statistics take_metrics transform update_priorities"""
REPLAY = f"""{REPLAY_BASE}
    add can_sample check_packing copy_items fill fingerprint forward gradient_divisor missing_groups
    priorities prompt_priorities read remove rollout rollout_worker run set_model set_policy_version
    set_priorities set_prompt_priorities step store tables vector_writer writer"""
DEVICE_REPLAY = f"""{REPLAY_BASE.replace("schemas", "schema").replace("fields ", "")}
    add_ add_steps_ add_transitions_ check end_steps_ export_table fill_ import_table new_batch
    num_trajectories remove_ sample_ table tables update_priorities_"""
BATCH = f"""{MAPPING}
    anchor cat clone device epoch goal_step handle is_weight learns map mask minibatches num_samples
    num_steps opaque part probability relabelled sample_index sample_number source to to_tensordict
    trajectory_id tree valid"""
MICRO_BATCH = f"""{MAPPING}
    block_mask cu_seqlens fill fraction group index is_weight lengths loss_mask mask_mod max_seqlen
    media model_inputs num_tokens num_trajectories opaque per_place per_sequence position_ids ragged sequence sum targets
    table trajectory_id weight"""
ROLLOUT = """
    advantages close column columns correct forward group lengths mask num_items num_tokens num_trajectories number
    set steps_done table trajectory_id values whiten"""
TRAIN_STEP = "index loss_tokens mean num_tokens num_trajectories number shared_tokens"
TABLE = {
    "capacity_steps": 90,
    "max_length": 9,
    "schema": {"columns": {"x": {"dtype": "float32", "role": "observation", "rows": "T+1"}}},
}
OPTIONS: dict[str, Any] = {"batch_size": 4, "shared_memory": {"prefix": prefix()}}


def shown(names: str) -> list[str]:
    return sorted(names.split())


def test_the_package_shows_its_public_names_only() -> None:
    assert dir(deepspeed_gear) == sorted(deepspeed_gear.__all__)


def test_a_replay_and_its_batch() -> None:
    with Replay({"tables": {"main": TABLE}, **OPTIONS}) as replay:
        replay.add({"x": np.zeros(4)})
        assert dir(replay) == shown(REPLAY)
        batch = replay.sample()
        assert dir(batch) == dir(batch[:2]) == dir(batch.clone()) == shown(BATCH)
        for _ in range(3):
            replay.sample()
        assert repr(batch) == "Batch(overwritten)"
        assert {"get", "mask"} <= set(dir(batch)), "completion raises no error"
        replay.add({"x": np.zeros(4)})
        assert (
            repr(replay) == "Replay(main: uniform, batches of 4, on cpu, 2 trajectories, 6 steps)"
        )
    assert repr(replay) == "Replay(main: uniform, batches of 4, on cpu, closed)"


def test_a_replay_on_a_device_and_its_batch() -> None:
    table = {**TABLE, "placement": "device", "remove": "fifo"}
    with DeviceReplay({"tables": {"main": table}, **OPTIONS}, device="cpu") as replay:
        assert dir(replay) == shown(DEVICE_REPLAY)
        replay.add_({"x": torch.zeros(1, 4)})
        assert dir(replay.sample()) == shown(BATCH)
        assert (
            repr(replay)
            == "DeviceReplay(main: uniform, batches of 4, on cpu, 1 trajectories, 3 steps)"
        )


def test_a_rollout_batch_its_steps_and_its_micro_batches() -> None:
    with filled(section()) as replay:
        rollout = replay.rollout()
        assert dir(rollout) == shown(ROLLOUT)
        steps = iter(rollout)  # the batch ends with this loop
        step = next(steps)
        assert dir(step) == shown(TRAIN_STEP)
        assert dir(next(iter(step))) == shown(MICRO_BATCH)


def test_writers_show_what_they_did() -> None:
    with Replay({"tables": {"main": TABLE}, **OPTIONS}) as replay:
        with replay.writer() as writer:
            writer.add({"x": np.zeros(4)})
            assert repr(writer) == "TrajectoryWriter(main: 1 trajectories added)"
            assert dir(writer) == shown(
                "add attach close fill max_length num_added run schema table trajectory "
                "vector_writer waited_s"
            )
        assert repr(writer) == "TrajectoryWriter(main: 1 trajectories added, closed)"
        steps = replay.vector_writer(2, "next_step")
        steps.reset(x=np.zeros(2))
        steps.step(x=np.ones(2), terminated=np.array([True, False]))
        assert (
            repr(steps)
            == 'VectorWriter(2 environments, "next_step", 2 steps, 1 trajectories added)'
        )
        assert dir(steps) == shown("autoreset close num_envs num_steps num_trajectories reset step")


def test_a_closed_transition_buffer_shows_that_it_is_closed() -> None:
    spaces = pytest.importorskip("gymnasium", reason="its spaces are used").spaces
    buffer = TransitionBuffer(
        100, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), autoreset="disabled", **OPTIONS
    )
    buffer.add(np.zeros(3), np.ones(3), 1, 0.5, False, False)
    holds = "batches of 4, on cpu, 1 trajectories, 1 steps"
    assert repr(buffer) == f"TransitionBuffer(1 environments, Replay(main: uniform, {holds}))"
    assert dir(buffer) == shown("add close num_envs replay sample")
    buffer.close()
    assert repr(buffer).endswith("batches of 4, on cpu, closed))")

"""Rollout batches whose run was saved in the middle of them, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_support import filled, responses, section

from deepspeed_gear import Replay
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.replay.rollout import Rollout


def trained(rollout: Rollout) -> list[list[tuple[Any, ...]]]:
    """What each of the steps that are left trains."""
    return [
        [(m.trajectory_id.tolist(), m["old"].tolist(), m["advantage"].tolist()) for m in step]
        for step in rollout
    ]


@pytest.mark.parametrize("steps_done", [0, 1, 3])
@pytest.mark.parametrize("kind", ["fifo", "uniform", "epoch"])
def test_a_rollout_is_resumed_between_minibatches(kind: str, steps_done: int, tmp_path: Path) -> None:
    size = {"trajectories": 12, "minibatches": 2, "epochs": 2}
    config = section(sampler={"kind": kind}, rollout=size)
    with filled(config)[0] as replay:
        list(replay.rollout())
        rollout = replay.rollout()
        for micro in rollout.forward("old"):
            micro.fill(old=micro["logp"] * torch.rand(1))
        rollout.advantages("dr_grpo")
        steps = iter(rollout)
        for _ in range(steps_done):
            list(next(steps))
        position = replay.state_dict()
        replay.save(tmp_path)
        replay.add(responses(1)[0])
        wanted = trained(rollout), replay.rollout().trajectory_id.tolist()
        with pytest.raises(CheckpointError, match="must be loaded from the folder of its save"):
            replay.load_state_dict(position)
    with Replay(config) as other:
        other.load(tmp_path)
        other.add(responses(1)[0])
        resumed = other.rollout()
        assert resumed.steps_done == steps_done
        assert list(resumed.forward("old")) == []
        assert (trained(resumed), other.rollout().trajectory_id.tolist()) == wanted
        other.save(tmp_path / "between")
        assert not list((tmp_path / "between").glob("rollout.*"))
    longer, text = section(sampler={"kind": kind}, rollout={**size, "epochs": 3}), "size of this config"
    with Replay(longer) as other, pytest.raises(CheckpointError, match=text):
        other.load(tmp_path)


def test_a_rollout_is_not_resumed_with_other_lengths(tmp_path: Path) -> None:
    """Truncated to another length, the columns would belong to other tokens."""
    pack = {"tokens": 48, "pad": {"multiple": 16}, "too_long": "truncate"}
    config = section(pack=pack, rollout={"trajectories": 12, "minibatches": 2})
    with filled(config)[0] as replay:
        rollout = replay.rollout()
        rollout.advantages("dr_grpo")
        number = rollout.num_tokens
        replay.save(tmp_path)
    with Replay({**config, "pack": {**pack, "tokens": 32}}) as other:
        other.load(tmp_path)
        with pytest.raises(CheckpointError, match=f"must have the {number} steps with which it was saved"):
            other.rollout()
    with Replay({**config, "pack": {**pack, "plan_width": 3}}) as other:
        other.load(tmp_path)
        assert other.rollout().num_tokens == number


def test_a_save_in_the_last_step_resumes_after_the_rollout_batch(tmp_path: Path) -> None:
    config = section(sampler={"kind": "epoch"}, rollout={"trajectories": 8, "minibatches": 2})
    with filled(config)[0] as replay:
        for step in replay.rollout():
            for micro in step:
                assert micro.num_tokens
            replay.save(tmp_path)  # of each step: the last one stays
        wanted = replay.rollout().trajectory_id.tolist()
    with Replay(config) as other:
        other.load(tmp_path)
        resumed = other.rollout()
        assert (len(list(resumed)), resumed.trajectory_id.tolist()) == (2, wanted)

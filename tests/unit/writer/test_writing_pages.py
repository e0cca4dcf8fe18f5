"""The programs of docs/how-to/late-rewards.md and single-environment.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gear_support import config_of
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from page_support import HOW_TO, blocks, page_json

from deepspeed_gear import Replay
from deepspeed_gear.errors import NotReadyError, StoreError


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_late_rewards(mode: AutoresetMode) -> None:
    tables = page_json("late-rewards.md")[0]["tables"]
    known: dict[str, Any] = {"np": np, "StoreError": StoreError}
    for block in blocks(HOW_TO / "late-rewards.md", "python"):
        exec(block.text, known)
    fields: dict[str, Any] = {"observation": {}, "success": {}, "score": {}}
    sampler = {"kind": "prioritized", "unit": "step"}
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=mode)
    pending: list[int] = []
    with Replay(config_of(tables=tables, fields=fields, sampler=sampler, batch_size=64)) as replay:
        policy = lambda observation: (observation[:, 2] > 0).astype(int)  # noqa: E731
        assert known["collect"](replay, envs, policy, 120, pending) == []
        assert sorted(pending) == list(range(len(replay)))
        assert len(pending) >= 6
        assert not replay.can_sample()
        with pytest.raises(
            NotReadyError, match=rf"{len(pending)} traj.* without the late column score"
        ):
            replay.sample()
        replay.remove(pending[:1])
        assert known["take_scores"](replay, [(number, number / 2) for number in pending[:4]]) == 1
        batch = replay.sample()
        assert set(batch.trajectory_id.tolist()) == set(pending[1:4])
        assert (batch["score"] == batch.trajectory_id / 2).all()
        lengths = {
            n: len(t["action"]) for n, t in zip(pending[1:], replay.read(pending[1:]), strict=True)
        }
        wanted = [float(lengths[number] >= 15) for number in batch.trajectory_id.tolist()]
        assert batch["success"].tolist() == wanted


def test_single_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stopped after a save, and goes on there."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(HOW_TO / "single-environment.md", "python")
    for last, first in ((60, 0), (120, 60)):
        short, count = re.subn(r"= 30_000, 1_000, 2, 5_000", f"= {last}, 40, 20, 30", block.text)
        assert count == 1
        known: dict[str, Any] = {}
        exec(short, known)
        assert known["first"] == first
        assert torch.load(tmp_path / known["FOLDER"] / "learner.pt")["step"] == last
    assert "step 120: mean return of the last 10 episodes" in capsys.readouterr().out
    with Replay(known["config"]) as replay:
        known["load"](replay)
        assert 100 <= replay.num_steps <= 120

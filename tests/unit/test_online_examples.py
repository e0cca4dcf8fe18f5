"""The examples that learn online use gear as their pages say."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import re
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gear_support import ROOT, prefix
from page_support import page_json

from deepspeed_gear import Replay, TransitionBuffer
from deepspeed_gear.replay.transition_buffer import TransitionSamples

EXAMPLES = ROOT / "examples"


# ---- off-policy examples: they learn from what the environments have done ---------------------------


class Recorded(TransitionBuffer):
    """Keeps copies of what is sampled, and the number of transitions at the end."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, shared_memory={"prefix": prefix()})
        self.sampled: list[list[Any]] = []
        self.made.append(self)

    def sample(self, batch_size: int | None = None) -> TransitionSamples:
        data = super().sample(batch_size)
        rows = data.observations, data.actions, data.rewards, data.next_observations, data.dones
        self.sampled += torch.cat([one.double() for one in rows], 1).tolist()
        return data

    def close(self) -> None:
        self.num_held = len(self)
        super().close()


def recorded(env: Any, observe: Any, monkeypatch: pytest.MonkeyPatch) -> set[tuple[float, ...]]:
    """Return the set that holds the transitions of all environments of a class, each as numbers."""
    step, record = env.step, set()

    def recording(self: Any, action: Any) -> Any:
        before = np.array(observe(self), np.float32)
        following, reward, terminated, truncated, infos = step(self, action)
        numbers = before, action, np.float32(reward), following, terminated
        record.add(tuple(np.concatenate([np.ravel(one).astype(np.float64) for one in numbers]).tolist()))
        return following, reward, terminated, truncated, infos

    monkeypatch.setattr(env, "step", recording)
    return record


@pytest.mark.parametrize(("program", "envs", "steps"), [("dqn", 3, 150), ("sac", 1, 420), ("td3", 2, 420)])
def test_what_an_example_samples_is_what_its_environments_have_done(
    program: str, envs: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes end by failures in DQN, by time limits in the others; each has another autoreset mode."""
    classic = pytest.importorskip("gymnasium.envs.classic_control", reason="the examples act in them")
    if program == "dqn":
        record = recorded(classic.CartPoleEnv, lambda env: env.state, monkeypatch)
    else:
        record = recorded(classic.PendulumEnv, classic.PendulumEnv._get_obs, monkeypatch)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module(program)
    options = argparse.Namespace(seed=1, steps=steps, random_steps=steps - 20, envs=envs)
    if program == "td3":
        result = example.train(Recorded, options)
    else:
        monkeypatch.setattr(example, "TransitionBuffer", Recorded)
        result = example.train(options)
        assert math.isfinite(result["loss"])
    assert math.isfinite(result["return"])
    buffer = Recorded.made.pop()
    assert buffer.num_held == len(record)
    found = {tuple(row) for row in buffer.sampled}
    assert found <= record
    assert len(found) > 0.6 * len(record)
    assert {row[-1] for row in found} == ({0.0, 1.0} if program == "dqn" else {0.0})


def test_the_page_shows_the_config_and_an_actor_of_15_lines() -> None:
    page = (ROOT / "docs" / "how-to" / "online.md").read_text()
    shown = page_json("online.md")[0]["tables"]["main"]
    table = json.loads((ROOT / "configs" / "online.json").read_text())["gear"]["tables"]["main"]
    assert shown == {name: value for name, value in table.items() if name != "schema"}
    actor = re.findall(r"```python\n(import gymnasium.*?)```", page, re.DOTALL)[0]
    ast.parse(actor)
    assert len(actor.strip().splitlines()) <= 15


@pytest.mark.parametrize("epochs", [1, 3])
def test_ppo_sees_every_step_of_its_roll_outs_once_per_epoch(epochs: int) -> None:
    section = json.loads((ROOT / "configs" / "ppo.json").read_text())["gear"]
    section |= {"batch_size": 256, "shared_memory": {"prefix": prefix()}}
    with Replay(section) as replay:
        for update in range(4):
            codes = np.arange(1024, dtype=np.float32).reshape(16, 64) + 10_000 * update
            for code in codes:
                zeros = dict.fromkeys(("log_probability", "advantage"), np.zeros(64, np.float32))
                rows = {"observation": np.stack([code] * 4, 1), "action": np.zeros(64, np.int64)}
                replay.add({**rows, **zeros, "value": code})
            seen = Counter(v for _ in range(4 * epochs) for v in replay.sample()["value"].tolist())
            assert seen == dict.fromkeys(codes.flatten().tolist(), epochs)
            replay.clear()
            assert len(replay) == 0

"""What the loop of the device examples adds to its replay is what the environments have done."""

from __future__ import annotations

import importlib
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

gymnasium = pytest.importorskip("gymnasium", reason="the examples act in its environments")
SEED, ENVS, TURNS = 5, 2, 450  # two episodes and a part of a third


class Recorder:
    """A learner that acts at random, adds, and remembers what it has added."""

    def __init__(self, replay: Any, feed: Any) -> None:
        self.replay, self.feed, self.added = replay, feed, list[dict[str, Tensor]]()
        self.action, self.updates = torch.zeros(ENVS, 1), (self.add,)

    def act(self) -> None:
        self.action.uniform_(-2, 2)

    def kind_of(self, turn: int) -> int:
        return 0

    def add(self) -> None:
        self.replay.add_transitions_(self.feed.row, {"observation": self.feed.following})
        row = {**self.feed.row, "following": self.feed.following}
        self.added.append({name: values.clone() for name, values in row.items()})


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(checkout / "examples"))
    return importlib.import_module("device_loop")


def test_a_truncated_episode_keeps_its_own_last_observation(loop: ModuleType) -> None:
    recorders: list[Recorder] = []

    def make(replay: Any, feed: Any) -> Recorder:
        recorders.append(Recorder(replay, feed))
        return recorders[-1]

    options = {"device": "cpu", "compile": False, "cudagraphs": False, "buffer": "prioritized"}
    result = loop.train(make, Namespace(steps=TURNS, random_steps=0, envs=ENVS, seed=SEED, **options))
    (recorder,) = recorders
    assert len(recorder.added) == TURNS - 1
    for env in range(ENVS):
        own = gymnasium.make("Pendulum-v1")
        observation, _ = own.reset(seed=SEED + env)
        returns, total = [], 0.0
        for row in recorder.added:
            assert np.array_equal(row["observation"][env], observation)
            observation, reward, terminated, truncated, _ = own.step(row["action"][env].numpy())
            assert np.array_equal(row["following"][env], observation)
            assert float(row["reward"][env]) == pytest.approx(float(reward), rel=1e-5)
            assert (bool(row["terminated"][env]), bool(row["truncated"][env])) == (terminated, truncated)
            total += float(reward)
            if truncated:
                observation, _ = own.reset()
                returns.append(total)
                total = 0.0
        assert len(returns) == 2
    assert -2000 < result["return"] < 0


class FakeGraph:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_every_call_of_a_captured_function_is_one_call(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls run, the fourth captures, which runs nothing on a device, and replays."""
    calls: list[str] = []
    stream = MagicMock()
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    step = loop.Captured(lambda: calls.append("call"), False, True)
    for _ in range(10):
        step()
    assert len(calls) == loop.Captured.WARM_UP + 1, "the last one is the capture"
    assert step._graph.num_replays == 10 - loop.Captured.WARM_UP
    assert stream.wait_stream.call_count == 2 * loop.Captured.WARM_UP

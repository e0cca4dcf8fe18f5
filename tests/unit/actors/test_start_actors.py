"""Actors of `start_actors`: what they add, how they stop, and what is left when they fail."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from gear_support import ROOT, prefix, shared_files, wait_until
from process_support import environment
from torch import nn
from warm_python import WarmProcess

from deepspeed_gear import Replay
from deepspeed_gear.actors.actor_process import _steps
from deepspeed_gear.actors.policy_board import PolicyBoard
from deepspeed_gear.actors.start_actors import start_actors
from deepspeed_gear.errors import ConfigError, PeerError

gymnasium = pytest.importorskip("gymnasium", reason="actors act in its environments")
import actor_policies as policies  # noqa: E402

COLUMNS = {
    "observation": {"dtype": "float32", "shape": [2], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}
MORE = {"seen": {"dtype": "float32"}, "actor": {"dtype": "int64", "rows": "1"}}


def config_of(columns: dict[str, Any] = COLUMNS, writers: int = 2, **table: Any) -> dict[str, Any]:
    options = {"capacity_steps": 300_000, "max_length": 50, "remove": "fifo", **table}
    return {
        "tables": {"main": {**options, "writers": writers, "schema": {"columns": columns}}},
        "batch_size": 8,
        "shared_memory": {"prefix": prefix()},
    }


class WarmActor(WarmProcess):
    """An actor's process that has imported torch."""

    started: ClassVar[list[WarmActor]] = []  # by this test, in the order of actors

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__(command[1:], options.pop("env"), text=False, **options)
        WarmActor.started.append(self)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    plain = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
    module = sys.modules["deepspeed_gear.actors.start_actors"]
    WarmActor.started.clear()
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(**plain, Popen=WarmActor))
    yield
    assert shared_files(prefix()) == []


@pytest.mark.parametrize(("mode", "count"), [("next_step", 2), ("same_step", 1), ("disabled", 1)])
def test_every_autoreset_mode_gives_the_same_trajectories(mode: str, count: int) -> None:
    with Replay(config_of({**COLUMNS, **MORE})) as replay:
        env = functools.partial(policies.counting, mode=mode)
        with start_actors(env, policies.slowly, replay, num_actors=count, num_envs=2) as actors:
            wait_until(lambda: len(episodes_of(replay)) == count, "the first episode of each")
            before = len(replay)
            wait_until(lambda: len(replay) >= before + 40, "collecting")
            actors.check()
        assert [result["actor"] for result in actors.results] == list(range(count))
        assert sum(result["episodes"] for result in actors.results) == len(replay)
        assert all(
            result["steps"] > 4 and 1 <= result["mean_return"] <= 6 for result in actors.results
        )
        for trajectory in replay.read(range(len(replay))):
            episode = int(trajectory["observation"][0, 0])
            steps = len(trajectory["reward"])
            assert steps == episode % 3 + 1
            assert trajectory["observation"].tolist() == [[episode, at] for at in range(steps + 1)]
            assert trajectory["reward"].tolist() == [at + 1 for at in range(steps)]
            assert trajectory["seen"].tolist() == list(range(steps))
            assert trajectory["terminated"].tolist() == [False] * (steps - 1) + [episode % 2 == 1]
            assert trajectory["truncated"].tolist() == [False] * (steps - 1) + [True]
        for episodes in episodes_of(replay).values():
            assert sorted(episodes) == episodes  # of two environments side by side
            assert set(episodes) == set(range(max(episodes) + 1))


@pytest.mark.parametrize(
    ("mode", "prefix"),
    [("next_step", ""), ("same_step", ""), ("same_step", "observation."), ("disabled", "seen.")],
)
def test_parts_of_observations_are_columns(mode: str, prefix: str) -> None:
    """They have the names of the environment's, or these after a common prefix."""
    one = {"dtype": "float32", "role": "observation", "rows": "T+1"}
    observations = {f"{prefix}episode": one, f"{prefix}at.0": one}
    config = config_of({**observations, **{n: c for n, c in COLUMNS.items() if n != "observation"}})
    autoreset = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode.upper()]}
    envs = gymnasium.vector.SyncVectorEnv([policies.CountingParts] * 2, **autoreset)
    with Replay(config) as replay:
        act = lambda observation: np.zeros(2, np.int64)  # noqa: E731
        steps = _steps(replay.writer(), envs, act, 0)
        while len(replay) < 8:
            next(steps)
        for trajectory in replay.read(range(8)):
            episode = int(trajectory[f"{prefix}episode"][0])
            count = len(trajectory["reward"])
            assert count == episode % 3 + 1
            assert trajectory[f"{prefix}episode"].tolist() == [episode] * (count + 1)
            assert trajectory[f"{prefix}at.0"].tolist() == list(range(count + 1))


def episodes_of(replay: Replay) -> dict[int, list[int]]:
    """Return the numbers of each actor's episodes, as they came."""
    found: dict[int, list[int]] = {}
    for trajectory in replay.read(range(len(replay))):
        found.setdefault(int(trajectory["actor"]), []).append(int(trajectory["observation"][0, 0]))
    return found


def test_actors_follow_the_board() -> None:
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.bias)
    with Replay(config_of()) as replay, PolicyBoard.create(module, prefix=prefix()) as board:
        env = "actor_policies:counting"
        with start_actors(env, "actor_policies:by_board", replay=replay, board=board) as actors:
            wait_until(lambda: len(replay) > 5, "collecting")
            nn.init.ones_(module.bias)
            board.publish(module)
            before = len(replay)
            wait_until(lambda: len(replay) > before + 5, "collecting on")
            actors.check()
        actions = [t["action"].tolist() for t in replay.read(range(len(replay)))]
        flat = [action for trajectory in actions for action in trajectory]
        assert flat == sorted(flat)  # from the old policy to the new one, once
        assert set(flat) == {0, 1}


def test_a_registered_environment_by_config_and_its_seed() -> None:
    config = config_of({**COLUMNS, "observation": {**COLUMNS["observation"], "shape": [4]}})
    with Replay(config) as replay:
        with start_actors("CartPole-v1", policies.at_once, replay=config, num_envs=3, seed=5):
            wait_until(lambda: len(replay) > 6, "collecting")
        first = {tuple(t["observation"][0].tolist()) for t in replay.read(range(len(replay)))}
    wanted, _ = gymnasium.make_vec("CartPole-v1", num_envs=3).reset(seed=5)
    assert {tuple(row) for row in wanted.tolist()} <= first


@pytest.mark.parametrize(
    ("policy", "checks", "text"),
    [
        (
            policies.failing,
            True,
            r"actor 1 must run until it is stopped, but failed:\nT(?s:.)*policy of actor 1 is",
        ),
        (policies.dying, False, r"actor \d must run until .*\nexit status -9"),
        (
            "actor_policies:nobody",
            False,
            "policy must name what can be imported, got 'actor_policies:nobody'",
        ),
    ],
)
def test_an_actor_that_dies_is_an_error(policy: Any, checks: bool, text: str) -> None:
    with Replay(config_of()) as replay:
        actors = start_actors(policies.counting, policy, num_actors=2, num_envs=1, replay=replay)
        pids = actors.pids
        failed = WarmActor.started[1]
        with pytest.raises(PeerError, match=text), actors:
            wait_until(actors.check if checks else lambda: failed.poll() is not None, "the failure")
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_an_actor_that_waits_for_learners_stops() -> None:
    """It has come as far ahead as its table's rate admits, and would wait for ten minutes."""
    config = config_of(rate_limiter={"min_size": 5, "samples_per_insert": 1.0, "error_buffer": 60})
    with Replay(config) as replay:
        with start_actors(policies.counting, policies.at_once, replay=replay) as actors:
            wait_until(lambda: len(replay) >= 60, "collecting")
            time.sleep(1.0)
            assert len(replay) <= 66
        assert actors.results[0]["waited_s"] > 0


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from deepspeed_gear import Replay
from deepspeed_gear.actors.start_actors import start_actors
from test_start_actors import config_of
import actor_policies

replay = Replay(config_of())
actors = start_actors(actor_policies.counting, actor_policies.at_once,
                 num_actors=2, replay=replay)
while len(replay) < 5:
    time.sleep(0.01)
print(*actors.pids, flush=True)
time.sleep(60)
"""


def test_actors_end_with_the_process_that_started_them() -> None:
    program = PARENT.format(tests=str(ROOT / "tests" / "unit" / "actors"))
    with WarmProcess(["-c", program], environment(), subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the actors"
    )
    wait_until(lambda: shared_files(prefix()) == [], "the end of the store")


def test_an_actor_that_is_terminated_detaches_and_is_an_error() -> None:
    with Replay(config_of()) as replay:
        actors = start_actors(policies.counting, policies.at_once, replay=replay)
        wait_until(lambda: len(replay) >= 1, "collecting")
        os.kill(actors.pids[0], signal.SIGTERM)
        with pytest.raises(PeerError, match=r"actor 0 must run until .*\nSIGTERM has ended it"):
            wait_until(actors.check, "its end")


def test_actors_end_with_the_run() -> None:
    replay = Replay(config_of())
    actors = start_actors(policies.counting, policies.at_once, num_actors=2, replay=replay)
    wait_until(lambda: len(replay) >= 1, "collecting")
    replay.close()  # the second actor may not have attached yet
    wait_until(
        lambda: all(process.poll() is not None for process in WarmActor.started), "their end"
    )
    actors.check()
    assert len(actors.stop()) == 2


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with Replay(config_of(writers=1)) as replay:
        with pytest.raises(
            ConfigError, match=r"gear.tables.main.writers must admit 2 actors, got 1"
        ):
            start_actors("CartPole-v1", policies.at_once, num_actors=2, replay=replay)
        with pytest.raises(ConfigError, match="policy and env must be picklable"):
            start_actors("CartPole-v1", lambda actor: None, replay=replay)
        monkeypatch.setattr(policies.at_once, "__module__", "__main__")
        with pytest.raises(
            ConfigError, match=r"policy must be importable by actors.*module:at_once"
        ):
            start_actors("CartPole-v1", policies.at_once, replay=replay)
        monkeypatch.setitem(sys.modules, "gymnasium", None)
        with pytest.raises(
            ConfigError, match=r"gymnasium must be installed .*deepspeed_gear\[examples\]"
        ):
            start_actors("CartPole-v1", "actor_policies:at_once", replay=replay)

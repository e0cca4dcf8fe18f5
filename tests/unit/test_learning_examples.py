"""Examples that learn online: what they add and sample is what their environments do,
as pages say.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from gear_support import ROOT, prefix
from page_support import page_json
from torch import Tensor

from deepspeed_gear import DeviceReplay, Replay, TransitionBuffer
from deepspeed_gear.replay.transition_buffer import TransitionSamples

gymnasium = pytest.importorskip("gymnasium", reason="the examples act in its environments")
SEED = 5
ENVS = 2
CPU = torch.device("cpu")
OPTIONS = {"device": CPU, "compile": False, "cudagraphs": False, "envs": ENVS, "seed": SEED}
PROGRAMS = {  # options, and the steps that the table holds
    "dqn_device": ({"steps": 60, "random_steps": 40, "buffer": "uniform"}, ENVS * 59),
    "td3_device": ({"steps": 220, "random_steps": 205, "buffer": "uniform"}, ENVS * 219),
    "sac_device": ({"steps": 220, "random_steps": 205, "buffer": "uniform"}, ENVS * 219),
    "c51_device": ({"steps": 60, "random_steps": 40}, ENVS * 59),
    "ppo_device": ({"steps": 96, "rollout": 24}, ENVS * 24),
}
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> Load:
    monkeypatch.syspath_prepend(str(checkout / "examples"))
    monkeypatch.setattr(importlib.import_module("device_loop"), "TEST_EPISODES", 2)
    return importlib.import_module


# ---- tables of a device: compiling changes nothing -----------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_gives_the_numbers_of_a_plain_one(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Traced by dynamo and run as traced; draws are equal, and Adam's corrections are rounded
    otherwise.
    """
    program = load(name)
    (options, held) = PROGRAMS[name]
    plain = program.train(Namespace(**OPTIONS, **options))
    assert np.isfinite([plain["loss"], plain["test"], plain["return"]]).all()
    assert plain["held"] == held
    compiled = list[Any]()
    compiles = partial(torch.compile, backend="eager")
    monkeypatch.setattr(
        torch, "compile", lambda function: compiled.append(function) or compiles(function)
    )
    torch._dynamo.reset()
    again = program.train(Namespace(**{**OPTIONS, **options, "compile": True}))
    assert len(compiled) >= 2, "acting and learning"
    assert (again["held"], again["return"]) == (plain["held"], plain["return"]), (
        "of the same actions"
    )
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def test_an_episode_keeps_its_own_last_observation(load: Load) -> None:
    # two episodes and a part of a third
    loop = load("device_loop")
    num_turns = 450
    torch.manual_seed(SEED)
    envs = loop.Environments("Pendulum-v1", ENVS, SEED, CPU)
    rows = list[dict[str, Tensor]]()
    assert torch.equal(envs.seen, torch.from_numpy(envs._observation))
    for _ in range(num_turns):
        envs.act_at_random()
        envs.fetch()
        envs.step()
        row = {**envs.row, "following": envs.following}
        rows.append({name: values.clone() for name, values in row.items()})
    assert len(envs.returns) == 2 * ENVS
    assert all(-2000 < each < 0 for each in envs.returns)
    for env in range(ENVS):
        own = gymnasium.make("Pendulum-v1")
        observation, _ = own.reset(seed=SEED + env)
        returns = []
        total = 0.0
        for row in rows:
            assert np.array_equal(row["observation"][env], observation)
            observation, reward, terminated, truncated, _ = own.step(row["action"][env].numpy())
            assert np.array_equal(row["following"][env], observation)
            assert float(row["reward"][env]) == pytest.approx(float(reward), rel=1e-5)
            assert (bool(row["terminated"][env]), bool(row["truncated"][env])) == (
                terminated,
                truncated,
            )
            total += float(reward)
            if truncated:
                observation, _ = own.reset()
                returns.append(total)
                total = 0.0
        assert returns == pytest.approx(envs.returns[env::ENVS])


def test_advantages_end_with_an_episode(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against equation 16 of the paper, from the critic and the environments' rows; some episodes
    are cut.
    """
    loop = load("device_loop")
    program = load("ppo_device")
    make = partial(gymnasium.make, max_episode_steps=20)
    monkeypatch.setattr(loop, "gymnasium", MagicMock(make=make))
    recorded = list[dict[str, Tensor]]()
    step = loop.Environments.step
    add = DeviceReplay.add_

    def record(envs: Any) -> None:
        step(envs)
        row = {**envs.row, "following": envs.following}
        recorded.append({name: values.clone() for name, values in row.items()})

    monkeypatch.setattr(loop.Environments, "step", record)
    networks = list[Any]()
    network = program.network
    monkeypatch.setattr(
        program, "network", lambda *sizes: networks.append(network(*sizes)) or networks[-1]
    )
    found: dict[str, Tensor] = {}

    def note(replay: Any, columns: dict[str, Tensor]) -> None:
        found.update({name: values.clone() for name, values in columns.items()})
        rows = {name: torch.stack([row[name] for row in recorded], 1) for name in recorded[0]}
        _, critic = networks
        found["before"], found["after"] = (
            critic(rows[name]).squeeze(2).detach().double() for name in ("observation", "following")
        )
        found.update({f"env {name}": values for name, values in rows.items()})
        add(replay, columns)

    monkeypatch.setattr(DeviceReplay, "add_", note)
    program.train(Namespace(**OPTIONS, steps=program.STEPS, rollout=program.STEPS))
    assert torch.equal(found["observation"], found["env observation"])
    assert torch.equal(found["action"], found["env action"])
    goes_on = (~found["env terminated"]).double()
    error = found["env reward"] + program.GAMMA * goes_on * found["after"] - found["before"]
    is_same_episode = (~(found["env terminated"] | found["env truncated"])).double()
    later = torch.zeros(ENVS, dtype=torch.float64)
    for t in reversed(range(program.STEPS)):
        later = error[:, t] + program.GAMMA * program.TRACE * is_same_episode[:, t] * later
        assert found["advantage"][:, t].tolist() == pytest.approx(later.tolist(), abs=1e-4)
    assert (found["value"] - found["advantage"] - found["before"]).abs().max() < 1e-5
    assert min(found["env terminated"].sum(), found["env truncated"].sum()) > 2


def test_a_divergence_is_an_error(load: Load) -> None:
    loop = load("device_loop")
    envs = loop.Environments("CartPole-v1", 1, SEED, CPU)
    with pytest.raises(FloatingPointError, match="loss must be finite, got nan"):
        loop.result(Namespace(**OPTIONS), envs, loop.Clock(CPU, 0), loss=float("nan"))


# ---- off-policy examples: they learn from what the environments have done ------------------------


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
    step = env.step
    record = set()

    def recording(self: Any, action: Any) -> Any:
        before = np.array(observe(self), np.float32)
        following, reward, terminated, truncated, infos = step(self, action)
        numbers = before, action, np.float32(reward), following, terminated
        record.add(
            tuple(np.concatenate([np.ravel(one).astype(np.float64) for one in numbers]).tolist())
        )
        return following, reward, terminated, truncated, infos

    monkeypatch.setattr(env, "step", recording)
    return record


@pytest.mark.parametrize(
    ("program", "envs", "steps"), [("dqn", 3, 150), ("sac", 1, 420), ("td3", 2, 420)]
)
def test_what_an_example_samples_is_what_its_environments_have_done(
    program: str, envs: int, steps: int, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes end by failures in DQN, by time limits in the others; each has another autoreset
    mode.
    """
    classic = importlib.import_module("gymnasium.envs.classic_control")
    if program == "dqn":
        record = recorded(classic.CartPoleEnv, lambda env: env.state, monkeypatch)
    else:
        record = recorded(classic.PendulumEnv, classic.PendulumEnv._get_obs, monkeypatch)
    example = load(program)
    options = Namespace(seed=1, steps=steps, random_steps=steps - 20, envs=envs)
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
    page = (ROOT / "docs" / "how-to" / "actors.md").read_text()
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
                zeros = dict.fromkeys(
                    ("log_probability", "reward", "action", "truncated"), np.zeros(64, np.int64)
                )
                rows = {"observation": np.stack([code] * 4, 1), "value": np.append(code, 0)}
                replay.add(
                    {**rows, **zeros, "terminated": np.arange(64) % 9 == 8}, split_by_flags=True
                )
            seen = Counter(
                v for _ in range(4 * epochs) for v in replay.sample()["observation"][:, 0].tolist()
            )
            assert seen == dict.fromkeys(codes.flatten().tolist(), epochs)
            replay.clear()
            assert len(replay) == 0

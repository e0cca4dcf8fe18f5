"""Autoreset modes: the loops of docs/how-to/actors.md store every transition; a mode is never
assumed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset, TimeLimit

from deepspeed_gear import Replay
from deepspeed_gear.errors import ConfigError, DataError

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "actors.md").read_text(
    encoding="utf-8"
)
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [4], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}
NESTED = {  # the same observation, in the parts of an environment with nested spaces
    "observation.cart": {"dtype": "float32", "shape": [2], "role": "observation", "rows": "T+1"},
    "observation.pole.0": {"dtype": "float32", "shape": [1], "role": "observation", "rows": "T+1"},
    "observation.pole.1.speed": {
        "dtype": "float32",
        "shape": [1],
        "role": "observation",
        "rows": "T+1",
    },
}
NUM_STEPS = 120


def loops() -> dict[str, Any]:
    """Return the functions of the page."""
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(def .+?)```", PAGE, re.DOTALL):
        exec(code, found)
    return found


def replay_of(**more: Any) -> Replay:
    table = {"capacity_steps": 4000, "schema": {"columns": COLUMNS}, **more}
    return Replay({"batch_size": 4, "tables": {"main": table}, "sampler": {"unit": "step"}})


def make() -> gymnasium.Env[Any, Any]:
    """Return CartPole whose episodes end in both ways: terminated, or truncated after 15 steps."""
    return TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 15)


class Nested(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The environment with a Dict space, in which there is a Tuple space."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        box = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        pole = gymnasium.spaces.Tuple([box, gymnasium.spaces.Dict({"speed": box})])
        cart = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"cart": cart, "pole": pole})

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"cart": observation[:2], "pole": (observation[2:3], {"speed": observation[3:]})}


def policy(observation: Any) -> np.ndarray:
    """Act on what is seen, so that an action beside another observation would be found out."""
    if isinstance(observation, dict):
        pole, more = observation["pole"]
        observation = np.concatenate([observation["cart"], pole, more["speed"]], 1)
    return (np.abs(observation * 1e4).astype(np.int64).sum(1) % 5 > 1).astype(np.int64)


def by_hand(seed: int, num_steps: int) -> list[dict[str, np.ndarray]]:
    """Record the whole episodes of one environment in a plain loop."""
    env = make()
    episodes = []
    observation, _ = env.reset(seed=seed)
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for _ in range(num_steps):
        action = policy(observation[None])[0]
        following, reward, terminated, truncated, _ = env.step(action)
        step = (observation, action, reward, terminated, truncated)
        for name, value in zip(COLUMNS, step, strict=True):
            rows[name].append(value)
        observation = following
        if terminated or truncated:
            rows["observation"].append(observation)
            episodes.append({name: np.array(values) for name, values in rows.items()})
            rows = {name: [] for name in COLUMNS}
            observation, _ = env.reset()
    return episodes


def check_stored(replay: Replay, wanted: list[dict[str, np.ndarray]]) -> None:
    """Compare what is stored with what was recorded, in whatever order environments ended."""
    found = [{k: v.numpy() for k, v in t.items()} for t in replay.read(list(range(len(replay))))]
    for one in found:
        if "observation" not in one:
            one["observation"] = np.concatenate([one[name] for name in NESTED], 1)
    assert len(found) == len(wanted) > 4
    for by in (found, wanted):
        by.sort(key=lambda trajectory: trajectory["observation"].tobytes())
    for one, other in zip(found, wanted, strict=True):
        for name in COLUMNS:
            assert one[name].tolist() == other[name].tolist(), name
    ends = {(bool(t["terminated"][-1]), bool(t["truncated"][-1])) for t in wanted}
    assert ends >= {(True, False), (False, True)}


def test_one_environment_that_the_program_resets() -> None:
    with replay_of() as replay:
        loops()["act_in_one"](replay, make(), policy, NUM_STEPS)
        check_stored(replay, by_hand(0, NUM_STEPS))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_many_environments_in_every_mode(mode: AutoresetMode, nested: bool) -> None:
    envs = SyncVectorEnv([(lambda: Nested(make())) if nested else make] * 3, autoreset_mode=mode)
    columns = (
        {**NESTED, **{n: c for n, c in COLUMNS.items() if n != "observation"}}
        if nested
        else COLUMNS
    )
    with replay_of(schema={"columns": columns}) as replay:
        loops()["act_in_many"](replay, envs, policy, NUM_STEPS)
        wanted = [by_hand(seed, NUM_STEPS) for seed in range(3)]
        if mode == AutoresetMode.NEXT_STEP:  # its resets take steps too
            took = [np.cumsum([len(t["reward"]) + 1 for t in episodes]) for episodes in wanted]
            wanted = [
                e[: int((n <= NUM_STEPS + 1).sum())] for e, n in zip(wanted, took, strict=True)
            ]
        check_stored(replay, [trajectory for episodes in wanted for trajectory in episodes])


def test_the_mode_is_read_or_must_be_given() -> None:
    vectors = {mode: SyncVectorEnv([make] * 2, autoreset_mode=mode) for mode in AutoresetMode}
    with replay_of() as replay:
        writer = replay.writer()
        for mode, envs in vectors.items():
            found = writer.vector_writer(envs)
            assert (found.num_envs, found.autoreset) == (2, mode.name.lower())
            assert writer.vector_writer(4, mode).autoreset == mode.name.lower()  # type: ignore[arg-type]
        assert writer.vector_writer(make()).autoreset == "disabled"
        assert writer.vector_writer(Autoreset(make())).autoreset == "next_step"
        assert writer.vector_writer(TimeLimit(Autoreset(make()), 9)).autoreset == "next_step"
        for wrong in (replay.vector_writer, writer.vector_writer):
            text = (
                'autoreset must be given with a number .*"next_step": .*"same_step": .*"disabled": '
            )
            with pytest.raises(DataError, match=text):
                wrong(8)  # type: ignore[operator]
        with pytest.raises(
            DataError, match="autoreset must be one of next_step, same_step, disabled, got 'ne"
        ):
            writer.vector_writer(8, "next")  # type: ignore[arg-type]
        with pytest.raises(
            DataError, match='must be "same_step", the mode of the environment, got'
        ):
            writer.vector_writer(vectors[AutoresetMode.SAME_STEP], "next_step")
        silent = SyncVectorEnv([make])
        silent.metadata = {}
        with pytest.raises(
            DataError, match="autoreset must be in the environment's metadata, or given"
        ):
            writer.vector_writer(silent)
        assert writer.vector_writer(silent, "next_step").autoreset == "next_step"
        for number in (0, -1, True, 1.5, None, "8"):
            with pytest.raises(
                ConfigError, match="the environments must be an integer of at least 1"
            ):
                writer.vector_writer(number, "disabled")


def rows(*values: float) -> dict[str, Any]:
    """Return a step of two environments; -1 of the values ends an episode."""
    given = np.array(values, np.float32)
    return {
        "observation": np.repeat(given[:, None], 4, 1),
        "action": np.zeros(2, np.int64),
        "reward": given,
        "terminated": given < 0,
        "truncated": np.zeros(2, bool),
    }


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_a_step_before_the_first_reset_is_refused(mode: Any) -> None:
    with replay_of() as replay:
        vector = replay.vector_writer(2, autoreset=mode)
        with pytest.raises(
            DataError, match=r"step must come after reset, got 'environments \[0, 1\]'"
        ):
            vector.step(**rows(1, 1))
        vector.reset(np.array([True, False]), observation=np.zeros((2, 4), np.float32))
        with pytest.raises(
            DataError, match=r"step must come after reset, got 'environments \[1\]'"
        ):
            vector.step(**rows(1, 1))
        vector.reset(observation=np.zeros((2, 4), np.float32))
        vector.step(**rows(1, 1))
        assert vector.step(**rows(2, -1), final={"observation": rows(3, 3)["observation"]}) == [
            (1, 0, 2)
        ]
        take: Callable[[], Any] = lambda: vector.step(**rows(1, 1))  # noqa: E731
        if mode == "disabled":
            with pytest.raises(
                DataError, match=r"got 'environments \[1\]'; call reset .* is \"disabled\""
            ):
                take()
        else:
            assert take() == []

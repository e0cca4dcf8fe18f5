"""TransitionBuffer: spaces of every kind, and of several parts (Dict, Tuple)."""

from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix

from deepspeed_gear import DataError, TransitionBuffer

gymnasium = pytest.importorskip("gymnasium")

SMALL = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}}


def test_every_plain_space() -> None:
    spaces = gymnasium.spaces
    box = spaces.Box(-1, 1, (2, 2), np.float64)
    for space in (spaces.Discrete(6), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(4), box):
        with TransitionBuffer(100, space, space, n_envs=2, autoreset="disabled", **SMALL) as held:
            before, after, action = (np.stack([space.sample(), space.sample()]) for _ in range(3))
            held.add(before, after, action, [1, 2], [True, False], [False, True])
            data = held.sample()
            narrow = [
                rows.astype("f4" if rows.dtype.kind == "f" else "i1") for rows in (before, after)
            ]
            held.add(narrow[0], after, action, [3.0, 4.0], *[np.zeros(2, bool)] * 2)
            held.add(narrow[1], before, action, [5.0, 6.0], *[np.zeros(2, bool)] * 2)
            assert len(held) == 6
            assert len(held.replay) == (
                6 if space.dtype == np.float64 else 4
            )  # float32 is another value
        which = data.rewards[:, 0].long() - 1
        assert set(which.tolist()) == {0, 1}
        found = data.observations, data.next_observations, data.actions
        for tensor, given in zip(found, (before, after, action), strict=True):
            rows = torch.from_numpy(given)[which]
            rows = (
                rows.float() if rows.dtype == torch.float64 else rows
            )  # as fields of float64 columns are
            assert torch.equal(tensor, rows if rows.dim() > 1 else rows[:, None])


NESTED = gymnasium.spaces.Dict(
    camera=gymnasium.spaces.Box(0, 255, (2, 2, 3), np.uint8),
    joints=gymnasium.spaces.Tuple(
        (gymnasium.spaces.Box(-9, 9, (3,)), gymnasium.spaces.Discrete(99))
    ),
)
COMMANDS = gymnasium.spaces.Tuple(
    (gymnasium.spaces.Discrete(99), gymnasium.spaces.Box(-9, 9, (2,)))
)


class Nested(gymnasium.Env[Any, Any]):
    """Has observations and actions of several parts, which hold its number and its steps."""

    observation_space = NESTED
    action_space = COMMANDS

    def __init__(self, number: int) -> None:
        self.number = number
        self.at = 0

    def _observe(self) -> dict[str, Any]:
        self.at += 1
        state = np.full(3, self.at, np.float32)
        camera = np.full((2, 2, 3), self.number, np.uint8)
        return {"camera": camera, "joints": (state, np.int64(self.at % 99))}

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self.at)
        observation = self._observe()
        return observation, reward, self.at % 5 == 0, self.at % 7 == 0, {}


def check_nested(data: Any, num_envs: int) -> None:
    """Raise unless the parts of each sample belong together."""
    camera = data.observations["camera"]
    state, joint = data.observations["joints"]
    assert (camera.dtype, camera.shape) == (torch.uint8, (512, 2, 2, 3))
    assert (state.dtype, state.shape, joint.shape) == (torch.float32, (512, 3), (512, 1))
    assert set(camera.flatten().tolist()) == set(range(num_envs))
    assert torch.equal(state[:, :1], data.rewards)
    assert torch.equal(joint, data.rewards.long())
    after, following = data.next_observations["joints"]
    assert torch.equal(after, state + 1)
    assert torch.equal(following, joint + 1)
    assert torch.equal(data.next_observations["camera"], camera)
    command, force = data.actions
    assert torch.equal(command, joint)
    assert torch.equal(force, state[:, :2])
    assert torch.equal(data.batch["observation.joints.0"], state)
    assert torch.equal(data.dones, (after[:, :1] % 5 == 0).float())


def as_commands(obs: Any) -> tuple[Any, Any]:
    state, joint = obs["joints"]
    return joint, state[..., :2]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_spaces_of_several_parts_are_columns_and_come_back_nested(num_envs: int) -> None:
    """Of one environment without its axis, and of several that reset themselves."""
    sizes: dict[str, Any] = {**SMALL, "batch_size": 512}
    if num_envs == 1:
        one = Nested(0)
        with TransitionBuffer(1000, NESTED, COMMANDS, n_envs=one, **sizes) as held:
            obs, _ = one.reset()
            for _ in range(60):
                action = as_commands(obs)
                following, *results = one.step(action)
                held.add(obs, following, action, *results[:3])
                obs = one.reset()[0] if results[1] or results[2] else following
            assert len(held) == 60
            check_nested(held.sample(), 1)
        return
    envs = gymnasium.vector.SyncVectorEnv([lambda n=n: Nested(n) for n in range(num_envs)])
    with TransitionBuffer(1000, NESTED, COMMANDS, n_envs=envs, **sizes) as held:
        obs, _ = envs.reset()
        for _ in range(40):
            action = as_commands(obs)
            following, *results = envs.step(action)
            held.add(obs, following, action, *results[:3])
            obs = following
        check_nested(held.sample(), num_envs)
        assert [*held.replay.tables["main"].schema.names][:4] == [
            "observation.camera",
            "observation.joints.0",
            "observation.joints.1",
            "action.0",
        ]


def test_refused_parts_change_nothing() -> None:
    env = Nested(0)
    obs, _ = env.reset()
    following = env.step(None)[0]
    with TransitionBuffer(100, NESTED, COMMANDS, autoreset="disabled", **SMALL) as held:
        action = as_commands(obs)
        state, joint = following["joints"]
        wrong = [
            ({"camera": following["camera"]}, "next_obs must have the parts camera, joints of its"),
            ({**following, "joints": (state,)}, "next_obs.joints must have the parts 0, 1 of its"),
            ({**following, "more": 1}, "next_obs must have the parts camera, joints"),
            (state, "next_obs must have the parts camera, joints of its space, got 'ndarray'"),
            ({**following, "joints": (state[:2], joint)}, "next_obs.joints.0 must have shape"),
            ({**following, "joints": (state + np.nan, joint)}, "must be finite"),
        ]
        for other, text in wrong:
            with pytest.raises(DataError, match=text):
                held.add(obs, other, action, 1.0, False, False)
        held.add(obs, following, action, 1.0, False, False)
        assert len(held) == 1

"""What is derived from stored steps: n-step returns, and goals by hindsight. NumPy only, as
`work.py`.

Transitions are those of `work.py`. Episodes with goals have HORIZON steps and HORIZON + 1 numbered
states; a pursued goal is a negative number that is never reached, an achieved one has the number of
its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from peers.interface import Array, Rows

from speed import work

N = 3
GAMMA = 0.99
HORIZON = 50
GOAL = 3
RATIO = 0.8


def returns(number: Array) -> Rows:
    """Return the N-step returns from steps by number. [n] each."""
    left = work.EPISODE - number % work.EPISODE
    taken = np.minimum(N, left)
    total = sum(GAMMA**k * (number + k) * (k < taken) for k in range(N))
    return {
        "return": np.asarray(total, np.float32),
        "discount": np.where(taken == left, 0, GAMMA**taken).astype(np.float32),
        "next_observation": work.observation(number + taken),
    }


def check_returns(rows: Rows, batch: int, count: int) -> tuple[int, int]:
    """Raise unless the returns of a batch are right where N steps follow in the trajectory.

    Args:
        rows: observation, action, return, discount, next_observation. [B, ...] each.
        count: Transitions that were added.
    Returns:
        Returns at the ends of trajectories: all, and the wrong ones.
    """
    number = np.rint(rows["observation"][:, 0]).astype(np.int64)
    assert len(number) == batch
    assert ((number >= 0) & (number < count)).all(), "steps that were never added"
    assert (rows["observation"] == work.observation(number)).all(), "observations of other steps"
    expected = returns(number)
    is_right = (
        np.abs(rows["return"].reshape(batch) - expected["return"]) < 1
    )  # a step beside differs by 3
    is_right &= np.abs(rows["discount"].reshape(batch) - expected["discount"]) < 1e-5
    has_next = (rows["next_observation"] == expected["next_observation"]).all(1)
    is_right &= has_next | (expected["discount"] == 0)
    at_end = number % work.EPISODE + N >= work.EPISODE
    assert is_right[~at_end].all(), "wrong returns inside of trajectories"
    return int(at_end.sum()), int((~is_right).sum())


def trajectory_steps(count: int, num_envs: int) -> Iterator[Rows]:
    """Yield the transitions as steps of environments, each with its part of the trajectories. [N,
    ...].
    """
    rows = {name: v.reshape(num_envs, -1, *v.shape[1:]) for name, v in work.steps(0, count).items()}
    for at in range(count // num_envs):
        yield {name: values[:, at] for name, values in rows.items()}


def goal(number: Array) -> Array:
    """Return the goals of states by number. [n] -> [n, GOAL]."""
    rows = work.steps(0, 4096)["action"][number % 4096]
    rows[..., 0] = number
    return rows


def episodes(count: int) -> Iterator[Rows]:
    """Yield episodes with goals, of `count` steps in all: states [HORIZON + 1, ...], steps
    [HORIZON, ...].
    """
    for episode in range(count // HORIZON):
        number = episode * (HORIZON + 1) + np.arange(HORIZON + 1)
        yield {
            "observation": work.observation(number),
            "achieved": goal(number),
            "pursued": np.array([-1 - episode, 0, 0], np.float32),
            "action": work.steps(0, HORIZON)["action"],
            "done": np.arange(HORIZON) == HORIZON - 1,
        }


def goal_steps(parts: Iterable[Rows], num_envs: int) -> Iterator[tuple[Rows, Rows, Rows]]:
    """Yield episodes as steps of environments: state, next state, and the rest. [N, ...] each."""
    for group in zip(*[iter(parts)] * num_envs, strict=True):
        rows = {name: np.stack([one[name] for one in group]) for name in group[0]}
        wanted = rows["pursued"]
        states = [
            {"observation": state, "achieved_goal": achieved, "desired_goal": wanted}
            for state, achieved in zip(
                *(rows[k].swapaxes(0, 1) for k in ("observation", "achieved")), strict=True
            )
        ]
        for at in range(len(states) - 1):
            rest = {"action": rows["action"][:, at], "done": rows["done"][:, at]}
            rest["reward"] = reward(states[at + 1]["achieved_goal"], wanted)
            yield states[at], states[at + 1], rest


def reward(achieved: Array, wanted: Array) -> Array:
    """Return the rewards of a task with goals: 0 where it is reached, else -1. [..., GOAL] ->
    [...].
    """
    return -(np.linalg.norm(achieved - wanted, axis=-1) > 0.05).astype(np.float32)


def check_goals(rows: Rows, batch: int, count: int) -> tuple[int, int]:
    """Raise unless each relabelled goal is that of a later state of the episode, and its reward is
    right.

    Args:
        rows: observation, next_observation, reward, goal. [B, ...] each.
    Returns:
        Samples: all, and the relabelled ones.
    """
    state = np.rint(rows["observation"][:, 0]).astype(np.int64)
    episode = state // (HORIZON + 1)
    assert len(state) == batch
    assert (rows["observation"] == work.observation(state)).all(), "observations of other states"
    assert (rows["next_observation"] == work.observation(state + 1)).all(), (
        "next observations of other states"
    )
    relabelled = rows["goal"][:, 0] >= 0
    reached = np.rint(rows["goal"][:, 0]).astype(np.int64)
    assert (reached[~relabelled] == -1 - episode[~relabelled]).all(), (
        "pursued goals of other episodes"
    )
    assert (rows["goal"][relabelled] == goal(reached[relabelled])).all(), (
        "goals that no state has achieved"
    )
    assert ((reached // (HORIZON + 1) == episode) & (reached > state))[relabelled].all(), (
        "not a later state"
    )
    expected = np.where(relabelled & (reached == state + 1), 0, -1)
    assert (rows["reward"].reshape(batch) == expected).all(), "rewards of other goals"
    return batch, int(relabelled.sum())

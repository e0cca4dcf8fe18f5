"""This project's packed batches of language models, as its user would ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_gear import Replay
from peers.interface import Array

COLUMNS = {
    "number": {"dtype": "int64"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt": {"dtype": "int64", "rows": "1"},
}


def section(tokens: int, count: int, **table: Any) -> dict[str, Any]:
    """Return the options of a rollout of so many trajectories or groups."""
    unit, size = ("group", "groups") if "group" in table else ("trajectory", "trajectories")
    main = {
        "capacity_steps": 4000,
        "capacity_trajectories": 100,
        "max_length": 64,
        "schema": {"columns": COLUMNS},
    }
    return {
        "tables": {"main": {**main, **table}},
        "sampler": {"kind": "epoch", "unit": unit},
        "pack": {"tokens": tokens, "pad": {"multiple": 8}},
        "rollout": {size: count},
    }


def add(replay: Replay, number: int, length: int, reward: float = 0.0, prompt: int = 0) -> None:
    """Add a response."""
    replay.add(
        {
            "number": np.full(length, number),
            "reward": np.float32(reward),
            "prompt": np.int64(prompt),
        }
    )


def token_weights(lengths: Array, tokens: int) -> Array:
    """As `System.token_weights`."""
    found = np.zeros(len(lengths))
    with Replay(section(tokens, len(lengths))) as replay:
        for number, length in enumerate(lengths.tolist()):
            add(replay, number, length)
        for step in replay.rollout():
            for micro in step:
                np.add.at(found, micro["number"].flatten().numpy(), micro.weight.flatten().numpy())
    return found


def advantages(rewards: Array, groups: Array) -> Array:
    """As `System.advantages`."""
    with Replay(section(64, len(rewards))) as replay:
        for number, (reward, prompt) in enumerate(
            zip(rewards.tolist(), groups.tolist(), strict=True)
        ):
            add(replay, number, 4, reward, prompt)
        rollout = replay.rollout()
        found = rollout.advantages("dr_grpo", group="prompt")
        order = np.argsort(rollout.trajectory_id.numpy())
        return found.numpy()[order]


def incomplete_group() -> bool:
    """As `System.incomplete_group`."""
    with Replay(section(64, 2, group={"column": "prompt", "size": 2})) as replay:
        for prompt in range(3):
            for member in range(2):
                if (prompt, member) != (1, 1):
                    add(replay, prompt, 4, prompt=prompt)
        prompts = replay.rollout().values("prompt")
        return sorted(prompts.tolist()) == [0, 0, 2, 2]

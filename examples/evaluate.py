"""Roll a policy out in gymnasium's Hopper, several episodes in one batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from deepspeed_gear import Normalizer

ENVIRONMENT = "Hopper-v4"  # the environment of the data
MAX_STEPS = 1000
# Observations [n, 11], returns so far [n] and the step; actions [n, 3].
Act = Callable[[np.ndarray, np.ndarray, int], Tensor]


def play(act: Act, seeds: list[int]) -> list[tuple[float, int]]:
    """Return return and number of steps of one episode per seed, n in all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data were made with v4; gymnasium recommends v5
        worlds = [gymnasium.make(ENVIRONMENT) for _ in seeds]
    observations = [world.reset(seed=seed)[0] for world, seed in zip(worlds, seeds, strict=True)]
    count = len(seeds)
    collected = np.zeros(count)
    lasted = np.zeros(count, int)
    running = np.ones(count, bool)
    for step in range(MAX_STEPS):
        with torch.inference_mode():
            action = act(np.stack(observations), collected, step).numpy()
        for i, world in enumerate(worlds):
            if running[i]:
                observations[i], reward, terminated, truncated, _ = world.step(action[i])
                collected[i] += float(reward)
                lasted[i] += 1
                running[i] = not (terminated or truncated)
        if not running.any():
            break
    for world in worlds:
        world.close()
    return list(zip(collected.tolist(), lasted.tolist(), strict=True))


def episodes_of(
    model: nn.Module,
    seeds: list[int],
    target: float,
    context: int,
    normalizer: Normalizer,
) -> list[tuple[float, int]]:
    """Return return and number of steps of one episode of a Decision Transformer per seed.

    Args:
        model: Called as in training, on windows of `context` steps.
        seeds: Of the episodes.
        target: Return to condition on.
        context: Steps of a window.
        normalizer: Of the run.
    """
    count = len(seeds)
    window = {
        "observation": torch.zeros(count, context, 11),
        "action": torch.zeros(count, context, 3),
        "return_to_go": torch.zeros(count, context),
        "timestep": torch.zeros(count, context, dtype=torch.int64),
    }
    goal = normalizer.normalize(
        "goal" if "goal" in normalizer.fields else "return_to_go", torch.full((count,), target)
    )
    real = torch.zeros(count, context, dtype=torch.bool)

    def act(observations: np.ndarray, collected: np.ndarray, step: int) -> Tensor:
        for tensor in (*window.values(), real):
            tensor.copy_(tensor.roll(-1, 1))
        real[:, -1] = True
        seen = {"observation": observations, "return_to_go": target - collected}
        for name, values in seen.items():
            window[name][:, -1] = torch.from_numpy(normalizer.normalize(name, values))
        window["timestep"][:, -1] = step
        window["action"][:, -1] = 0
        action = model({**window, "goal": goal}, real)[:, -1]
        window["action"][:, -1] = action
        return action

    return play(act, seeds)

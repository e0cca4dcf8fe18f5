"""Roll a Decision Transformer out in gymnasium, several episodes in one batch."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import torch
from torch import nn

from deepspeed_gear import Normalizer

ENVIRONMENT = "Hopper-v4"  # the environment of the data
MAX_STEPS = 1000


def episodes_of(
    model: nn.Module,
    target: float,
    seeds: list[int],
    context: int,
    normalizer: Normalizer,
) -> list[tuple[float, int]]:
    """Return return and number of steps of one episode per seed.

    Args:
        model: Called as in training, on windows of `context` steps.
        target: Return to condition on.
        seeds: Of the episodes.
        context: Steps of a window.
        normalizer: Of the run.
    """
    if not seeds:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data were made with v4; gymnasium recommends v5
        worlds = [gymnasium.make(ENVIRONMENT) for _ in seeds]
    observations = [world.reset(seed=seed)[0] for world, seed in zip(worlds, seeds, strict=True)]
    count = len(seeds)
    size, actions = len(observations[0]), worlds[0].action_space.shape[0]
    window = {
        "observation": torch.zeros(count, context, size),
        "action": torch.zeros(count, context, actions),
        "return_to_go": torch.zeros(count, context),
        "timestep": torch.zeros(count, context, dtype=torch.int64),
    }
    goal = normalizer.normalize(
        "goal" if "goal" in normalizer.fields else "return_to_go", torch.full((count,), target)
    )
    real = torch.zeros(count, context, dtype=torch.bool)
    collected, lasted, running = np.zeros(count), np.zeros(count, int), np.ones(count, bool)
    for step in range(MAX_STEPS):
        window = {name: tensor.roll(-1, 1) for name, tensor in window.items()}
        real = real.roll(-1, 1)
        real[:, -1] = True
        seen = {"observation": np.stack(observations), "return_to_go": target - collected}
        for name, values in seen.items():
            window[name][:, -1] = torch.from_numpy(normalizer.normalize(name, values))
        window["timestep"][:, -1] = step
        window["action"][:, -1] = 0
        with torch.inference_mode():
            action = model({**window, "goal": goal}, real)[:, -1]
        window["action"][:, -1] = action
        for i, world in enumerate(worlds):
            if running[i]:
                observations[i], reward, terminated, truncated, _ = world.step(action[i].numpy())
                collected[i] += float(reward)
                lasted[i] += 1
                running[i] = not (terminated or truncated)
        if not running.any():
            break
    for world in worlds:
        world.close()
    return list(zip(collected.tolist(), lasted.tolist(), strict=True))

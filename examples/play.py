"""Evaluation of a policy in CartPole."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

EPISODES = 20


@torch.inference_mode()
def returns_of(policy: Callable[[Tensor], Tensor], seed: int, device: torch.device) -> np.ndarray:
    """Return the returns of EPISODES episodes, with the actions that `policy`, on a device, values
    most.
    """
    envs = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES)
    observation, _ = envs.reset(seed=seed)
    total = np.zeros(EPISODES)
    goes_on = np.ones(EPISODES, bool)
    while goes_on.any():
        action = policy(torch.from_numpy(observation).to(device)).argmax(1).cpu().numpy()
        observation, reward, terminated, truncated, _ = envs.step(action)
        total += reward * goes_on
        goes_on &= ~(terminated | truncated)
    return total


def mean_return(policy: Callable[[Tensor], Tensor], seed: int, device: torch.device) -> float:
    """Return the mean return of an evaluation on rank 0, on every rank."""
    mean = torch.zeros(1, device=device)
    if dist.get_rank() == 0:
        mean += float(returns_of(policy, seed, device).mean())
    dist.broadcast(mean, 0)
    return float(mean)

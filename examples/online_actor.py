"""Network and policy of the actors of examples/online.py. Actors import this module without
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from deepspeed_gear.actors.actor_process import Actor

# epsilons from 0.4 to 0.4 ** 8
LARGEST = 0.4
SPREAD = 7.0


def q_network() -> nn.Module:
    """Return a network from an observation of CartPole to the value of each of the two actions."""
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def epsilon_greedy(actor: Actor) -> Callable[[np.ndarray], np.ndarray]:
    """Return an epsilon-greedy policy of the newest network; epsilon differs between actors.

    Source of the epsilons: Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018.
    """
    assert actor.board is not None
    q = q_network()
    board = actor.board
    random = np.random.default_rng(actor.seed)
    here = actor.envs.num_envs
    total = actor.envs.num_envs * actor.count
    place = (actor.index * here + np.arange(here)) / max(1, total - 1)
    epsilon = LARGEST ** (1 + SPREAD * place)

    def act(observation: np.ndarray) -> np.ndarray:
        board.load_into(q)
        with torch.inference_mode():
            greedy = q(torch.from_numpy(observation)).argmax(1).numpy()
        return np.where(random.random(here) < epsilon, random.integers(0, 2, here), greedy)

    return act

"""A double DQN on CartPole in one file and one process, from a TransitionBuffer.

    python examples/dqn.py

The last line is the result as JSON.

Sources: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518, 2015;
van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", AAAI 2016.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_gear import TransitionBuffer

GAMMA = 0.99
TARGET_STEP = 0.02
LEARNING_RATE = 1e-3
CAPACITY = 10_000
BATCH = 128
LEAST_EPSILON = 0.02
EPSILON_STEPS = 2000


def q_network(inputs: int, actions: int) -> nn.Module:
    """Return a network from an observation to the value of each action."""
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions)
    )


def act(
    q: nn.Module, observation: np.ndarray, step: int, random: np.random.Generator
) -> np.ndarray:
    """Return an action of each environment, greedy but for a part that shrinks with the steps."""
    greedy = q(torch.from_numpy(observation)).argmax(1).numpy()
    epsilon = max(LEAST_EPSILON, 1 - step / EPSILON_STEPS)
    explores = random.random(len(greedy)) < epsilon
    return np.where(explores, random.integers(0, 2, len(greedy)), greedy)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the mean return of the last episodes, the last loss and the transitions
    held.
    """
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    envs = gymnasium.make_vec("CartPole-v1", args.envs, vectorization_mode="sync")
    space = envs.single_observation_space
    actions = envs.single_action_space
    q = q_network(space.shape[0], int(actions.n))
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), LEARNING_RATE)
    buffer = TransitionBuffer(
        CAPACITY, space, actions, n_envs=envs, batch_size=BATCH, seed=args.seed
    )
    returns = []
    total = np.zeros(args.envs)
    loss = torch.tensor(torch.nan)
    observation, _ = envs.reset(seed=args.seed)
    for step in range(1, args.steps + 1):
        with torch.no_grad():
            action = act(q, observation, step, random)
        following, reward, terminated, truncated, _ = envs.step(action)
        buffer.add(observation, following, action, reward, terminated, truncated)
        observation = following
        total += reward
        for env in np.nonzero(terminated | truncated)[0]:
            returns.append(total[env])
            total[env] = 0.0
        if step <= args.random_steps:
            continue
        data = buffer.sample()
        with torch.no_grad():
            chosen = q(data.next_observations).argmax(1, keepdim=True)
            value = target(data.next_observations).gather(1, chosen)
            goal = data.rewards + GAMMA * (1 - data.dones) * value
        loss = F.smooth_l1_loss(q(data.observations).gather(1, data.actions), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(q.parameters()), TARGET_STEP)
    held = len(buffer)
    buffer.close()
    envs.close()
    return {"return": round(float(np.mean(returns[-10:])), 1), "loss": loss.item(), "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12_000, help="of each environment")
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(train(args) | {"seed": args.seed}), flush=True)


if __name__ == "__main__":
    main()

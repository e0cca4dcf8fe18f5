"""SAC on Pendulum in one file, one process and one environment, from a TransitionBuffer.

    python examples/sac.py --steps 8000

The last line is the result as JSON.

Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905, with the
temperature of its section 5.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_gear import TransitionBuffer

GAMMA = 0.99
TARGET_STEP = 0.005
LEARNING_RATE = 1e-3
HIDDEN = 256
LEAST_LOG_STD = -5.0
MOST_LOG_STD = 2.0
CAPACITY = 100_000
BATCH = 256


def network(inputs: int, outputs: int) -> nn.Sequential:
    first = nn.Linear(inputs, HIDDEN)
    second = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs))


class SAC:
    """An actor, two critics with targets, and a temperature; actions have elements in [-largest,
    largest].
    """

    def __init__(self, observation: int, action: int, largest: float) -> None:
        self.actor = network(observation, 2 * action)
        self.largest = largest
        self.critics = nn.ModuleList(network(observation + action, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.entropy = -float(action)
        self.critic_optimizer, self.actor_optimizer, self.temperature_optimizer = (
            torch.optim.Adam(parameters, LEARNING_RATE)
            for parameters in (
                self.critics.parameters(),
                self.actor.parameters(),
                [self.log_temperature],
            )
        )

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions and return them with their log densities. [B, action] and [B, 1]."""
        mean, log_std = self.actor(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD).exp())
        raw = normal.rsample()
        slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw)) + math.log(
            self.largest
        )  # log of tanh's
        return torch.tanh(raw) * self.largest, (normal.log_prob(raw) - slope).sum(-1, keepdim=True)

    def least(self, critics: Any, observation: Tensor, action: Tensor) -> Tensor:
        """Return the smaller value of two critics. [B, 1]."""
        return torch.minimum(*(critic(torch.cat([observation, action], 1)) for critic in critics))

    def learn(self, data: Any) -> float:
        """Step all networks; return the critics' loss."""
        with torch.no_grad():
            action, log_density = self.draw(data.next_observations)
            value = self.least(self.targets, data.next_observations, action)
            soft = value - self.log_temperature.exp() * log_density
            goal = data.rewards + GAMMA * (1 - data.dones) * soft
        inputs = torch.cat([data.observations, data.actions], 1)
        loss: Any = sum(F.mse_loss(critic(inputs), goal) for critic in self.critics)
        self._descend(self.critic_optimizer, loss)
        action, log_density = self.draw(data.observations)
        value = self.least(self.critics, data.observations, action)
        self._descend(
            self.actor_optimizer, (self.log_temperature.detach().exp() * log_density - value).mean()
        )
        excess = (log_density.detach() + self.entropy).mean()
        self._descend(self.temperature_optimizer, -self.log_temperature.exp() * excess)
        with torch.no_grad():
            slow = list(self.targets.parameters())
            fast = list(self.critics.parameters())
            torch._foreach_lerp_(slow, fast, TARGET_STEP)
        return loss.item()

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the mean return of the last episodes, the last loss and the transitions
    held.
    """
    torch.manual_seed(args.seed)
    env = gymnasium.make("Pendulum-v1")
    space = env.observation_space
    actions = env.action_space
    actions.seed(args.seed)
    agent = SAC(space.shape[0], actions.shape[0], float(actions.high[0]))
    buffer = TransitionBuffer(
        CAPACITY, space, actions, n_envs=env, batch_size=BATCH, seed=args.seed
    )
    returns = []
    total = 0.0
    loss = math.nan
    observation, _ = env.reset(seed=args.seed)
    for step in range(1, args.steps + 1):
        if step <= args.random_steps:
            action = actions.sample()
        else:
            with torch.no_grad():
                action = agent.draw(torch.from_numpy(observation))[0].numpy()
        following, reward, terminated, truncated, _ = env.step(action)
        buffer.add(observation, following, action, reward, terminated, truncated)
        observation = following
        total += float(reward)
        if terminated or truncated:
            returns = [*returns, total]
            total = 0.0
            observation, _ = env.reset()
        if step > args.random_steps:
            loss = agent.learn(buffer.sample())
    held = len(buffer)
    buffer.close()
    env.close()
    return {"return": round(float(np.mean(returns[-10:])), 1), "loss": loss, "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(train(args) | {"seed": args.seed}), flush=True)


if __name__ == "__main__":
    main()

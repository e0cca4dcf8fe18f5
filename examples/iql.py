"""Train implicit Q-learning (IQL) on Hopper data of two policies, on any number of ranks.

    gear ingest examples/data/hopper_expert.hdf5 examples/data/hopper_medium.hdf5 data/hopper_mixed
    deepspeed --num_gpus 2 examples/iql.py

Trajectories are drawn by their return. `--uniform` draws all steps alike; `--beta 0` clones what is
drawn. examples/offline_run.py describes what it writes.

Sources: Kostrikov et al., "Offline Reinforcement Learning with Implicit Q-Learning",
arXiv:2110.06169, with n-step returns; for the draws Hong et al., "Harnessing Mixed Offline
Reinforcement Learning Datasets via Trajectory Weighting", arXiv:2306.13085.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from common import ACTION, OBSERVATION, config_of
from evaluate import play
from offline_run import OfflineRun, parser, update_average
from torch import Tensor, nn

from deepspeed_gear import Batch, Normalizer

WIDTH = 256
TARGET_STEP = 0.02
EXPECTILE = 0.9
REWARD_SCALE = 0.01  # values are then about 10, which networks reach within a short run
MAX_WEIGHT = 100.0
LEAST_LOG_STD = -5.0
MOST_LOG_STD = 2.0


class ByReturn:
    """Masses of trajectories in proportion to exp(return / temperature), at most 2^30 and at least
    1.

    Args:
        best: The return of mass 2^30; higher ones have no more.
        temperature: In units of the return.
    """

    def __init__(self, best: float, temperature: float) -> None:
        self.best = best
        self.temperature = temperature

    def __call__(
        self, ids: np.ndarray, num_steps: np.ndarray, column: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        scaled = np.minimum(column("return") - self.best, 0) / self.temperature
        return np.maximum(np.rint(2.0**30 * np.exp(scaled)), 1).astype(np.int64)


def network(inputs: int, outputs: int) -> nn.Sequential:
    first = nn.Linear(inputs, WIDTH)
    second = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, outputs))


class IQL(nn.Module):
    """An actor, two critics with targets, and a value function; actions have elements in [-1, 1].

    Args:
        observation: Elements of an observation.
        action: Elements of an action.
        beta: Inverse temperature of the actor's weights; 0 weights all samples alike.
    """

    def __init__(self, observation: int, action: int, beta: float) -> None:
        super().__init__()
        self.actor = network(observation, action)
        self.log_std = nn.Parameter(torch.zeros(action))
        self.value = network(observation, 1)
        self.beta = beta
        self.critics = nn.ModuleList(network(observation + action, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)

    def forward(
        self,
        observation: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        discount: Tensor,
    ) -> Tensor:
        """Return the sum of the losses of value function, critics and actor.

        No gradient of one reaches the networks of another, so one optimizer steps them all.

        Args:
            observation: [B, observation].
            action: [B, action].
            following: The observation that is bootstrapped from. [B, observation].
            reward: Discounted sum of the rewards up to there. [B].
            discount: Of the value of `following`; 0 after a termination. [B].
        """
        inputs = torch.cat([observation, action], 1)
        with torch.no_grad():
            goal = REWARD_SCALE * reward + discount * self.value(following)[:, 0]
            least = torch.minimum(*(target(inputs)[:, 0] for target in self.targets))
        advantage = least - self.value(observation)[:, 0]
        below = (advantage.detach() < 0).float()
        value_loss = ((EXPECTILE - below).abs() * advantage.square()).mean()
        critic_loss = torch.stack(
            [F.mse_loss(critic(inputs)[:, 0], goal) for critic in self.critics]
        ).sum()
        weight = (self.beta * advantage.detach()).exp().clamp(max=MAX_WEIGHT)
        log_std = self.log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD)
        normal = torch.distributions.Normal(self.act(observation), log_std.exp())
        return value_loss + critic_loss - (weight * normal.log_prob(action).sum(1)).mean()

    def act(self, observation: Tensor) -> Tensor:
        """Return the likeliest actions. [B, observation] to [B, action]."""
        return torch.tanh(self.actor(observation))


def episodes_of(model: IQL, seeds: list[int], normalizer: Normalizer) -> list[tuple[float, int]]:
    """Return return and number of steps of one episode per seed."""

    def act(observations: np.ndarray, collected: np.ndarray, step: int) -> Tensor:
        return model.act(torch.from_numpy(normalizer.normalize("observation", observations)))

    return play(act, seeds)


def main() -> None:
    options = parser(__doc__, "iql")
    options.add_argument(
        "--beta", type=float, default=3.0, help="inverse temperature of the actor's weights"
    )
    options.add_argument("--uniform", action="store_true", help="draw all steps alike")
    args = options.parse_args()
    config, steps = config_of(args)
    if args.uniform:
        config["gear"]["sampler"] = {"kind": "uniform", "unit": "step"}
    run = OfflineRun(IQL(OBSERVATION, ACTION, args.beta), config, args, steps)
    model = run.engine.module

    def loss_of(batch: Batch) -> Tensor:
        # Towards the weights after the step before; before the first step the two are equal.
        update_average(model.targets.parameters(), model.critics.parameters(), TARGET_STEP)
        names = "observation", "action", "next_observation", "return_n", "discount"
        return run.engine(*(batch[name] for name in names))

    run.train(loss_of, partial(episodes_of, normalizer=run.engine.gear.normalizer))
    run.finish("sum of the losses", beta=args.beta, uniform=args.uniform)


if __name__ == "__main__":
    main()

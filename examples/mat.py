"""Train a multi-agent transformer on Hopper data by log-likelihood, on any number of ranks.

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/mat.py

There Hopper is one agent; here each of its three joints is one, as in MaMuJoCo:

    python examples/mamujoco.py data/hopper data/hopper_3x1
    deepspeed --num_gpus 2 examples/mat.py --data data/hopper_3x1 --out runs/mat_3x1

examples/offline_run.py describes what it writes.

Source: Wen et al., "Multi-Agent Reinforcement Learning is a Sequence Modeling Problem", NeurIPS
2022.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from common import config_of
from decision_transformer import WIDTH, Attention, Block, Head, attention_mask
from evaluate import play
from mamujoco import local_observations
from offline_run import OfflineRun, parser
from torch import Tensor, nn

from deepspeed_gear import Dataset, Normalizer

LEAST_LOG_STD = -2.5  # of actions that the data repeat, the likelihood has no upper bound


class DecoderBlock(nn.Module):
    """Attention of the actions to those before, then of the encoded observations to these; a
    feed-forward.
    """

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attend = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, encoded: Tensor, allowed: Tensor) -> Tensor:
        own, cross, last = self.norms
        x = x + self.out(self.mix(*self.qkv(own(x)).chunk(3, -1), allowed))
        mixed = self.mix(self.query(encoded), *self.key_value(cross(x)).chunk(2, -1), allowed)
        x = encoded + self.cross_out(mixed)
        return x + self.mlp(last(x))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        heads = (one.unflatten(-1, (self.heads, -1)) for one in (query, key, value))
        return self.attend(*heads, allowed).flatten(2)


class MAT(nn.Module):
    """Encodes the observations of N agents, and decodes their actions one after the other.

    Args:
        agents: Their number, N.
        observation_size: Elements of an agent's observation.
        action_size: Elements of an agent's action, each in [-1, 1].
    """

    def __init__(
        self,
        agents: int,
        observation_size: int,
        action_size: int,
        width: int = WIDTH,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.agents = agents
        self.action_size = action_size
        self.observation = nn.Linear(observation_size, width)
        self.action = nn.Linear(action_size, width)
        self.agent = nn.Parameter(0.02 * torch.randn(2, agents, width))
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(layers))
        self.head = Head(action_size, width)
        self.log_std = nn.Parameter(torch.full((action_size,), -0.5))

    def encode(self, observation: Tensor) -> Tensor:
        """Return what the decoder needs of the observations. [B, N, observation] to [B,
        N, width].
        """
        x = self.observation(observation) + self.agent[0]
        for block in self.encoder:
            x = block(x, allowed=None)
        return x

    def decode(self, encoded: Tensor, action: Tensor) -> Tensor:
        """Return the means of the agents' actions, each from those of the agents before. [B, N,
        action].
        """
        before = F.pad(action[:, :-1], (0, 0, 1, 0))
        x = self.action(before) + self.agent[1]
        allowed = attention_mask(action.new_ones(1, self.agents) > 0)
        for block in self.decoder:
            x = block(x, encoded, allowed)
        return self.head(x)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the log-likelihood of all agents' actions. [B]."""
        action = action.view(-1, self.agents, self.action_size)
        mean = self.decode(self.encode(observation.view(len(action), self.agents, -1)), action)
        log_std = self.log_std.clamp(min=LEAST_LOG_STD)
        error = (action - mean) / log_std.exp()
        return -(0.5 * error.square() + log_std + 0.5 * math.log(2 * math.pi)).sum((1, 2))

    def act(self, observation: Tensor) -> Tensor:
        """Return the likeliest actions, as joint actions. [B, N, observation] to [B, N
        * action].
        """
        encoded = self.encode(observation)
        action = observation.new_zeros(len(observation), self.agents, self.action_size)
        for agent in range(self.agents):
            action[:, agent] = self.decode(encoded, action)[:, agent]
        return action.flatten(1)


def episodes_of(model: MAT, seeds: list[int], normalizer: Normalizer) -> list[tuple[float, int]]:
    """Return return and number of steps of one episode per seed."""

    def act(observations: np.ndarray, collected: np.ndarray, step: int) -> Tensor:
        local = observations if model.agents == 1 else local_observations(observations)
        seen = torch.from_numpy(normalizer.normalize("observation", local))
        return model.act(seen.view(len(seeds), model.agents, -1))

    return play(act, seeds)


def main() -> None:
    args = parser(__doc__, "mat").parse_args()
    config, steps = config_of(args)
    columns = Dataset.open(config["gear"]["data"]["path"]).schema
    agents = 1 if len(columns["action"].shape) == 1 else columns["action"].shape[0]
    model = MAT(agents, columns["observation"].shape[-1], columns["action"].shape[-1])
    run = OfflineRun(model, config, args, steps)
    run.train(
        lambda batch: -run.engine(batch["observation"], batch["action"]).mean(),
        partial(episodes_of, normalizer=run.engine.gear.normalizer),
    )
    run.finish("negative log-likelihood", agents=agents)


if __name__ == "__main__":
    main()

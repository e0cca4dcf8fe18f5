"""A small Decision Transformer: one token a step, of observation, return-to-go, time and the action before.

Sources: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS 2021, with
one token a step instead of three; for returns in bins Lee et al., "Multi-Game Decision Transformers", NeurIPS
2022; for how a bin reaches every layer Perez et al., "FiLM", AAAI 2018.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME_SCALE = 1e-3  # episodes have at most 1,000 steps
NUM_BINS, BINS_PER_UNIT = 20, 5  # of returns in thousands: a bin is 200 wide


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm that a goal can modulate."""

    def __init__(self, width: int, heads: int, has_goal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 4 * width) if has_goal else None

    def forward(self, x: Tensor, allowed: Tensor, goal: Tensor | None) -> Tensor:
        batch, steps, width = x.shape
        gain1 = shift1 = gain2 = shift2 = torch.zeros((), device=x.device)
        if self.modulation is not None:
            gain1, shift1, gain2, shift2 = self.modulation(goal)[:, None].chunk(4, -1)
        split = self.qkv(self.norm1(x) * (1 + gain1) + shift1).view(batch, steps, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x + self.mlp(self.norm2(x) * (1 + gain2) + shift2)


class DecisionTransformer(nn.Module):
    """Predicts the action of each step of a window.

    Args:
        observation_size: Elements of an observation.
        action_size: Elements of an action, each in [-1, 1].
        context: Steps of a window.
        width: Of the transformer.
        layers: Blocks.
        heads: Of attention.
        has_goal: Whether the episode's whole return, in bins, takes the place of the return-to-go: where
            episodes of several policies are mixed, it keeps their behaviours apart.
        sees_return: False for behaviour cloning: both are hidden.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        context: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        has_goal: bool = False,
        sees_return: bool = True,
    ) -> None:
        super().__init__()
        self.has_goal, self.sees_return = has_goal, sees_return
        self.observation, self.action = nn.Linear(observation_size, width), nn.Linear(action_size, width)
        if has_goal:
            self.goal = nn.Embedding(NUM_BINS, width)
        else:
            self.return_to_go, self.time = nn.Linear(1, width), nn.Linear(1, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, has_goal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, action_size)
        # Untrained, it then acts at random; with small outputs Hopper just stands for a while.
        nn.init.normal_(self.head.weight, std=0.2)

    def forward(self, batch: Mapping[str, Tensor], real: Tensor) -> Tensor:
        """Return actions. [B, T, action_size].

        Args:
            batch: "observation" [B, T, n] and "action" [B, T, m]; "goal" [B], the episode's return in
                thousands, or "return_to_go" [B, T] in thousands and "timestep" [B, T].
            real: Which steps exist. [B, T], bool.
        """
        action = batch["action"] * real[..., None]
        before = F.pad(action[:, :-1], (0, 0, 1, 0))
        x = self.observation(batch["observation"]) + self.action(before) + self.place
        goal = None
        if self.has_goal:
            # A little above the edge: 3.6 belongs to the bin that begins there, also in float32.
            bins = (BINS_PER_UNIT * batch["goal"] + 1e-4).long().clamp(0, NUM_BINS - 1)
            goal = self.goal(bins if self.sees_return else torch.zeros_like(bins))
        else:
            returns = batch["return_to_go"] if self.sees_return else torch.zeros_like(batch["return_to_go"])
            x = x + self.return_to_go(returns[..., None])
            x = x + self.time(TIME_SCALE * batch["timestep"][..., None].float())
        steps = real.shape[1]
        causal = torch.ones(steps, steps, dtype=torch.bool, device=real.device).tril()
        itself = torch.eye(steps, dtype=torch.bool, device=real.device)  # a row without a key would be NaN
        allowed = ((causal & real[:, None]) | itself)[:, None]
        for block in self.blocks:
            x = block(x, allowed, goal)
        return torch.tanh(self.head(self.norm(x)))

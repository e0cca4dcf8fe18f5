"""A small Decision Transformer: one token a step, of observation, return-to-go, time and the action before.

Source: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS 2021; with
one token a step instead of three, which costs a third.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME_SCALE = 1e-3  # episodes have at most 1,000 steps


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        batch, steps, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, steps, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x + self.mlp(self.norm2(x))


class DecisionTransformer(nn.Module):
    """Predicts the action of each step of a window.

    Args:
        observation_size: Elements of an observation.
        action_size: Elements of an action, each in [-1, 1].
        context: Steps of a window.
        width, layers, heads: Of the transformer.
        sees_return: False for behaviour cloning: the return-to-go is hidden.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        context: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        sees_return: bool = True,
    ) -> None:
        super().__init__()
        self.sees_return = sees_return
        self.observation, self.action = nn.Linear(observation_size, width), nn.Linear(action_size, width)
        self.return_to_go, self.time = nn.Linear(1, width), nn.Linear(1, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, action_size)
        # Untrained, it then acts at random; with small outputs Hopper just stands for a while.
        nn.init.normal_(self.head.weight, std=0.2)

    def forward(self, batch: Mapping[str, Tensor], real: Tensor) -> Tensor:
        """Return actions. [B, T, action_size].

        Args:
            batch: "observation" [B, T, n], "action" [B, T, m], "return_to_go" [B, T], "timestep" [B, T].
            real: Which steps exist. [B, T], bool.
        """
        action = batch["action"] * real[..., None]
        before = F.pad(action[:, :-1], (0, 0, 1, 0))
        returns = batch["return_to_go"] if self.sees_return else torch.zeros_like(batch["return_to_go"])
        x = (
            self.observation(batch["observation"])
            + self.action(before)
            + self.return_to_go(returns[..., None])
        )
        x = x + self.time(TIME_SCALE * batch["timestep"][..., None].float()) + self.place
        steps = real.shape[1]
        causal = torch.ones(steps, steps, dtype=torch.bool, device=real.device).tril()
        itself = torch.eye(steps, dtype=torch.bool, device=real.device)  # a row without a key would be NaN
        allowed = ((causal & real[:, None]) | itself)[:, None]
        for block in self.blocks:
            x = block(x, allowed)
        return torch.tanh(self.head(self.norm(x)))

"""A small Decision Transformer: one token a step, of observation, return-to-go, time and the action
before.

Sources: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS
2021, with one token a step instead of three; for returns in bins Lee et al., "Multi-Game Decision
Transformers", NeurIPS 2022; for how a bin reaches every layer Perez et al., "FiLM", AAAI 2018.

It is a list of layers, so that a pipeline can be made from it; heads are counted from the layers'
outputs, so that tensor ranks can hold some of them; `Block.attend` and `Block.mlp` can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64
TIME_SCALE = 1e-3  # episodes have at most 1,000 steps
# of returns in thousands: a bin is 200 wide
NUM_BINS = 20
BINS_PER_UNIT = 5


class Attention(nn.Module):
    """Attention of one window's steps to each other."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        """Return the mixed values, of all steps without a mask. [B, T, heads, size], as
        the three.
        """
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed).transpose(1, 2)


def attention_mask(real: Tensor) -> Tensor:
    """Return which steps [.., T, T] each step may attend to: real ones up to itself. [B, 1, T, T],
    bool.
    """
    steps = real.shape[1]
    causal = torch.ones(steps, steps, dtype=torch.bool, device=real.device).tril()
    itself = torch.eye(
        steps, dtype=torch.bool, device=real.device
    )  # a row without a key would be NaN
    return ((causal & real[:, None]) | itself)[:, None]


class Embedding(nn.Module):
    """Makes a token of each step. Arguments as of `DecisionTransformer`."""

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        context: int,
        width: int = WIDTH,
        has_goal: bool = False,
        sees_return: bool = True,
    ) -> None:
        super().__init__()
        self.has_goal = has_goal
        self.sees_return = sees_return
        self.observation = nn.Linear(observation_size, width)
        self.action = nn.Linear(action_size, width)
        if has_goal:
            self.goal = nn.Embedding(NUM_BINS, width)
        else:
            self.return_to_go = nn.Linear(1, width)
            self.time = nn.Linear(1, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, batch: Mapping[str, Tensor], real: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens [B, T, width] and the blocks' modulation. Arguments as of the
        whole model.
        """
        if "before" in batch:
            before = batch["before"]
        else:
            before = F.pad((batch["action"] * real[..., None])[:, :-1], (0, 0, 1, 0))
        place = self.place[batch["position"]] if "position" in batch else self.place
        x = self.observation(batch["observation"]) + self.action(before) + place
        if self.has_goal:
            # A little above the edge: 3.6 belongs to the bin that begins there, also in float32.
            bins = (BINS_PER_UNIT * batch["goal"] + 1e-4).long().clamp(0, NUM_BINS - 1)
            return x, self.goal(bins if self.sees_return else torch.zeros_like(bins))
        returns = (
            batch["return_to_go"] if self.sees_return else torch.zeros_like(batch["return_to_go"])
        )
        x = x + self.return_to_go(returns[..., None])
        return x + self.time(TIME_SCALE * batch["timestep"][..., None].float()), None


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a LayerNorm that a goal can
    modulate.
    """

    def __init__(self, width: int = WIDTH, heads: int = 4, has_goal: bool = False) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 4 * width) if has_goal else None
        self.attend: nn.Module = Attention()

    def forward(self, x: Tensor, allowed: Tensor | None, goal: Tensor | None = None) -> Tensor:
        gain1 = shift1 = gain2 = shift2 = torch.zeros((), device=x.device)
        if self.modulation is not None:
            gain1, shift1, gain2, shift2 = self.modulation(goal)[:, None].chunk(4, -1)
        qkv = self.qkv(self.norm1(x) * (1 + gain1) + shift1)
        query, key, value = qkv.unflatten(-1, (3, -1, self.head_size)).unbind(2)
        x = x + self.out(self.attend(query, key, value, allowed).flatten(2))
        return x + self.mlp(self.norm2(x) * (1 + gain2) + shift2)


class Head(nn.Module):
    """Makes an action of each token."""

    def __init__(self, action_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, action_size)
        # Untrained, it then acts at random; with small outputs Hopper would only stand for some
        # time.
        nn.init.normal_(self.linear.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class DecisionTransformer(nn.Module):
    """Predicts the action of each step of a window.

    Args:
        observation_size: Elements of an observation.
        action_size: Elements of an action, each in [-1, 1].
        context: Steps of a window.
        width: Of the transformer.
        layers: Blocks.
        heads: Of attention.
        has_goal: Whether the episode's whole return, in bins, replaces the return-to-go: where
            episodes of several policies are mixed, it separates their behaviours.
        sees_return: False for behaviour cloning: both are hidden.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        context: int,
        width: int = WIDTH,
        layers: int = 2,
        heads: int = 4,
        has_goal: bool = False,
        sees_return: bool = True,
    ) -> None:
        super().__init__()
        embedding = Embedding(observation_size, action_size, context, width, has_goal, sees_return)
        blocks = [Block(width, heads, has_goal) for _ in range(layers)]
        self.layers = nn.ModuleList([embedding, *blocks, Head(action_size, width)])

    @property
    def blocks(self) -> list[Block]:
        return list(self.layers[1:-1])

    def forward(self, batch: Mapping[str, Tensor], real: Tensor) -> Tensor:
        """Return actions. [B, T, action_size].

        Args:
            batch: "observation" [B, T, n] and "action" [B, T, m]; "goal" [B], the episode's return
                in thousands, or "return_to_go" [B, T] in thousands and "timestep" [B, T]. Where T
                is a slice of the window, "before" [B, T, m], the actions one step before, in place
                of "action", and "position" [B, T], the steps' places in the window.
            real: Which steps exist, of the whole window. [B, T], bool.
        """
        x, goal = self.layers[0](batch, real)
        allowed = attention_mask(real)
        for block in self.blocks:
            x = block(x, allowed, goal)
        return self.layers[-1](x)

"""Addition of two numbers of two digits as a language: the problems, a small GPT-2, its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

PLUS = 10
EQUALS = 11
EOS = 12
PAD = 13
VOCABULARY = 14
WIDTH = 64
LAYERS = 2
HEADS = 4
# tokens
PROMPT = 6
MOST_RESPONSE = 4


class Problems:
    """Prompts "ab+cd=" and their right answers: the digits of the sum from the last one, then the
    end.
    """

    def draw(self, count: int, seed: int) -> Tensor:
        """Return prompts. [count, 6], int64."""
        digits = torch.randint(0, 10, (count, 4), generator=torch.Generator().manual_seed(seed))
        plus = torch.full((count, 1), PLUS)
        equals = torch.full((count, 1), EQUALS)
        return torch.cat([digits[:, :2], plus, digits[:, 2:], equals], dim=1)

    def answers(self, prompts: Tensor) -> Tensor:
        """Return the right responses, padded. [n, 4], int64."""
        total = prompts[:, 0] * 10 + prompts[:, 1] + prompts[:, 3] * 10 + prompts[:, 4]
        digits = total % 10, total // 10 % 10, total // 100
        return torch.stack([*digits, torch.full_like(total, EOS)], dim=1)

    def solved(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompts with their right answers, and which tokens are of the answer. [n, 10]
        both.
        """
        tokens = torch.cat([prompts, self.answers(prompts)], dim=1)
        mask = (torch.arange(tokens.size(1)) >= PROMPT) & (tokens != PAD)
        return tokens, mask.float()

    def all(self) -> Tensor:
        """Return every prompt. [10,000, 6], int64."""
        a, b, c, d = (
            torch.arange(10_000).div(
                torch.tensor([[1000], [100], [10], [1]]), rounding_mode="floor"
            )
            % 10
        )
        plus = torch.full_like(a, PLUS)
        equals = torch.full_like(a, EQUALS)
        return torch.stack([a, b, plus, c, d, equals], dim=1)

    def rewards(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return 1 for a right response, else 0. [n], float32."""
        return (responses == self.answers(prompts)).all(dim=1).float()


def policy() -> GPT2LMHeadModel:
    """Return a GPT-2 of 104,000 weights, which begin larger than those of a deep one: it learns
    sooner.
    """
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
    }
    first = {"initializer_range": 0.07, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, **drop, **first, bos_token_id=None, eos_token_id=EOS)
    )
    for embedding in (model.transformer.wte, model.transformer.wpe):
        nn.init.normal_(embedding.weight)
    return model


def reward(prompt: Mapping[str, Any], response: Sequence[int]) -> float:
    """Return the reward of a response to a prompt of a data set: for a rollout worker."""
    a, b, _, c, d, _ = prompt["tokens"].tolist()
    total = 10 * a + b + 10 * c + d
    return float(list(response) == [total % 10, total // 10 % 10, total // 100, EOS])


@torch.no_grad()
def sample(
    model: nn.Module, prompts: Tensor, words: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Sample responses; without a generator, take the most likely tokens.

    Returns:
        Tokens (PAD after the end), and their log-probabilities. [n, 4] both.
    """
    tokens = prompts
    logps = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MOST_RESPONSE):
        logp = torch.log_softmax(model(tokens, use_cache=False).logits[:, -1].float(), dim=1)
        if words is None:
            drawn = logp.argmax(1, keepdim=True)
        else:
            drawn = torch.multinomial(logp.exp(), 1, generator=words)
        logps.append(logp.gather(1, drawn))
        drawn = torch.where(ended[:, None], PAD, drawn)
        tokens = torch.cat([tokens, drawn], dim=1)
        ended |= drawn[:, 0] == EOS
    return tokens[:, PROMPT:], torch.cat(logps, dim=1)

"""Addition of two numbers of two digits as a language: the problems, a small transformer, its samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLUS, EQUALS, EOS, PAD = 10, 11, 12, 13
VOCABULARY, WIDTH, LAYERS, HEADS = 14, 64, 2, 4
PROMPT, MOST_RESPONSE = 6, 4  # tokens


class Problems:
    """Prompts "ab+cd=" and their right answers: the digits of the sum from the last one, then the end."""

    def draw(self, count: int, seed: int) -> Tensor:
        """Return prompts. [count, 6], int64."""
        digits = torch.randint(0, 10, (count, 4), generator=torch.Generator().manual_seed(seed))
        plus, equals = torch.full((count, 1), PLUS), torch.full((count, 1), EQUALS)
        return torch.cat([digits[:, :2], plus, digits[:, 2:], equals], dim=1)

    def answers(self, prompts: Tensor) -> Tensor:
        """Return the right responses, padded. [n, 4], int64."""
        total = prompts[:, 0] * 10 + prompts[:, 1] + prompts[:, 3] * 10 + prompts[:, 4]
        digits = total % 10, total // 10 % 10, total // 100
        return torch.stack([*digits, torch.full_like(total, EOS)], dim=1)

    def solved(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return prompts with their right answers, and which tokens are of the answer. [n, 10] both."""
        tokens = torch.cat([prompts, self.answers(prompts)], dim=1)
        mask = (torch.arange(tokens.size(1)) >= PROMPT) & (tokens != PAD)
        return tokens, mask.float()

    def rewards(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return 1 for a right response, else 0. [n], float32."""
        return (responses == self.answers(prompts)).all(dim=1).float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.after(x))


class Adder(nn.Module):
    """A causal transformer over rows of tokens, or over one pack of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return logits. [B, N, 14].

        Args:
            tokens: [B, N].
            position_ids: Of a pack, the place of each token in its sequence; padding may be longer. [1, N].
            mask: Of a pack, which places each place attends to. [1, 1, N, N], bool.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.size(1), device=tokens.device)[None]
        x = self.tokens(tokens) + self.places(position_ids.clamp(max=31))
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, words: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample responses. Returns tokens (PAD after the end) and their log-probabilities. [n, 4] both."""
    tokens, logps = prompts, []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MOST_RESPONSE):
        logp = torch.log_softmax(model(tokens)[:, -1].float(), dim=1)
        drawn = torch.multinomial(logp.exp(), 1, generator=words)
        logps.append(logp.gather(1, drawn))
        drawn = torch.where(ended[:, None], PAD, drawn)
        tokens = torch.cat([tokens, drawn], dim=1)
        ended |= drawn[:, 0] == EOS
    return tokens[:, PROMPT:], torch.cat(logps, dim=1)

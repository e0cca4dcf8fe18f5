"""Draw docs/figures/packed_weights.png: what a token weighs under three rules, and how far
gradients deviate.

    python docs/figures/packed_weights.py

Left: 1,024 responses in micro batches of at most 16,384 tokens. Prompts of 100 to 600 tokens,
responses of log-normal lengths with a mean of 3.1k; the tokens of the responses count in the loss.
Right: the gradient of a small model over 64 such responses, in float32 and micro batch by micro
batch, beside that of the mean over all tokens at once in float64. Long responses use other tokens
than short ones. Some seconds on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deepspeed_gear import Replay
from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.config.options import LossConfig

RESPONSES = 1024
BUDGET = 16384
LONGEST = 12288
LOCAL = 4
TRAINED = 64
SEEDS = range(8)
VOCABULARY = 32
GEAR = "gear: counts over the batch"
MICRO = "means of micro batches"
OWN = f"means over {LOCAL} sequences"


def main() -> None:
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 3.4), layout="constrained", width_ratios=(3, 2)
    )
    draw_weights(left)
    draw_gradients(right)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def workload(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of prompts and of whole trajectories. [count] each, int64."""
    words = np.random.default_rng(seed)
    prompts = words.integers(100, 600, count // 8).repeat(8)
    return prompts, np.minimum(
        prompts + np.exp(words.normal(7.6, 0.9, count)).astype(int) + 1, LONGEST
    )


def filled(lengths: np.ndarray) -> np.ndarray:
    """Return the micro batch of each response, where one is filled after the other. [n], int64."""
    owner = []
    held = 0
    number = 0
    for length in lengths.tolist():
        if held + length > BUDGET:
            held = 0
            number += 1
        held += length
        owner.append(number)
    return np.array(owner)


# ---- weights -------------------------------------------------------------------------------------


def draw_weights(axes: plt.Axes) -> None:
    prompts, lengths = workload(0, RESPONSES)
    counts = lengths - prompts
    index = np.arange(RESPONSES)
    rules = {
        GEAR: loss_weights(LossConfig(), counts, index, index),
        MICRO: mean_of_means(counts, filled(lengths)),
        OWN: mean_of_means(counts, index // LOCAL),
    }
    bins = np.geomspace(0.2, 8, 60)
    for name, weights in rules.items():
        ratio = weights * counts.sum()
        span = f"{ratio.min():.2g} to {ratio.max():.2g}" if np.ptp(ratio) > 1e-9 else "1"
        print(f"{name}: {span} times the intended weight")
        axes.hist(ratio, bins, weights=counts / counts.sum(), label=f"{name}: {span}", alpha=0.7)
    axes.set(
        xscale="log", xlabel="weight of a token / its weight in the mean of all", ylabel="tokens"
    )
    axes.minorticks_off()
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(ylim=(0, 1.45), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def mean_of_means(counts: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return each token's weight where the loss is the mean of the means of its owners. [n]."""
    tokens = np.bincount(owner, counts)
    return np.asarray(1 / (len(np.unique(owner)) * tokens[owner]))


# ---- gradients -----------------------------------------------------------------------------------


class Bigram(nn.Module):
    """Logits of the next token from the last one: packs need no attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self(tokens), targets, reduction="none")

    def gradient(self, losses: Iterator[Tensor]) -> Tensor:
        """Return the gradient of a sum of losses, each of which goes backward by itself.
        [parameters].
        """
        self.zero_grad()
        for loss in losses:
            loss.backward()
        return torch.cat(
            [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        ).double()


def draw_gradients(axes: plt.Axes) -> None:
    found: dict[str, list[float]] = {GEAR: [], MICRO: [], OWN: []}
    for seed in SEEDS:
        prompts, lengths = workload(seed, TRAINED)
        responses = [tokens_of(seed, length) for length in lengths.tolist()]
        model = Bigram()
        exact = Bigram().double()
        total = int((lengths - prompts).sum())
        ones = [np.array([number]) for number in range(TRAINED)]
        wanted = exact.gradient(
            loss.sum() / total for loss in each(exact, responses, prompts, ones)
        )
        gradients = {GEAR: model.gradient(packed(model, responses, prompts))}
        for name, owner in ((MICRO, filled(lengths)), (OWN, np.arange(TRAINED) // LOCAL)):
            parts = [np.nonzero(owner == number)[0] for number in range(owner.max() + 1)]
            means = (loss.mean() / len(parts) for loss in each(model, responses, prompts, parts))
            gradients[name] = model.gradient(means)
        for name, gradient in gradients.items():
            found[name].append(float((gradient - wanted).norm() / wanted.norm()))
    for number, (name, deviations) in enumerate(found.items()):
        print(f"{name}: gradients deviate by {min(deviations):.2g} to {max(deviations):.2g}")
        axes.plot(deviations, np.full(len(deviations), -number), "o", alpha=0.6, color=f"C{number}")
        label = f"{min(deviations):.1g} to {max(deviations):.1g}"
        axes.annotate(label, (float(np.median(deviations)), -number + 0.2), ha="center", fontsize=9)
    axes.set(
        xscale="log",
        xlim=(1e-8, 10),
        ylim=(-2.6, 0.6),
        xlabel="|gradient - exact| / |exact|, eight batches",
    )
    axes.set_yticks([0, -1, -2], ["gear", "micro\nbatches", f"{LOCAL} se-\nquences"])


def tokens_of(seed: int, length: int) -> Tensor:
    """Return a trajectory: the longer it is, the higher its tokens. [length], int64."""
    words = np.random.default_rng((seed, length))
    drawn = words.beta(1 + 4 * length / LONGEST, 2, length)
    return torch.from_numpy((drawn * VOCABULARY).astype(np.int64))


def each(
    model: Bigram, responses: list[Tensor], prompts: np.ndarray, parts: list[np.ndarray]
) -> Iterator[Tensor]:
    """Yield the losses of the response tokens of each part's trajectories. [tokens]."""
    for part in parts:
        losses = [
            model.losses(responses[i][prompts[i] - 1 : -1], responses[i][prompts[i] :])
            for i in part
        ]
        yield torch.cat(losses)


def packed(model: Bigram, responses: list[Tensor], prompts: np.ndarray) -> Iterator[Tensor]:
    """Yield the loss of each micro batch of a Replay's step."""
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "mask": {"dtype": "bool", "role": "loss_mask"},
    }
    steps = sum(len(tokens) for tokens in responses)
    section = {
        "tables": {
            "main": {"capacity_steps": steps, "max_length": LONGEST, "schema": {"columns": columns}}
        },
        "sampler": {"kind": "fifo"},
        "fields": {"tokens": {}},
        "pack": {"tokens": BUDGET},
        "batch": {"trajectories": len(responses)},
    }
    with Replay(section) as replay:
        for tokens, prompt in zip(responses, prompts.tolist(), strict=True):
            replay.add({"tokens": tokens.int().numpy(), "mask": np.arange(len(tokens)) >= prompt})
        for micro in replay.step():
            assert micro.targets is not None
            yield micro.sum(model.losses(micro["tokens"][0], micro.targets[0]))


if __name__ == "__main__":
    main()

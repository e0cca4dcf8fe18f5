"""Draw docs/figures/packed_weights.png: what a token weighs under three rules.

    python docs/figures/packed_weights.py

1,024 responses in micro batches of at most 16,384 tokens. Prompts of 100 to 600 tokens, responses of
log-normal lengths with a mean of 3.1k; the tokens of the responses count in the loss.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.config.pack_options import LossConfig

RESPONSES, BUDGET, LONGEST, LOCAL = 1024, 16384, 12288, 4


def main() -> None:
    words = np.random.default_rng(0)
    prompts = words.integers(100, 600, RESPONSES // 8).repeat(8)
    lengths = np.minimum(prompts + np.exp(words.normal(7.6, 0.9, RESPONSES)).astype(int) + 1, LONGEST)
    counts = lengths - prompts
    exact = 1 / counts.sum()
    index = np.arange(RESPONSES)
    local = index // LOCAL
    rules = {
        "gear: quotients of counts over the batch": loss_weights(LossConfig(), counts, index, index),
        "mean of the means of micro batches, filled as they arrive": mean_of_means(counts, filled(lengths)),
        f"mean of local means over {LOCAL} sequences": mean_of_means(counts, local),
    }
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    bins = np.geomspace(0.2, 8, 60)
    for name, weights in rules.items():
        ratio = weights / exact
        print(f"{name}: {ratio.min():.3f} to {ratio.max():.3f} of the intended weight")
        axes.hist(ratio, bins, weights=counts / counts.sum(), label=name, alpha=0.7)
    axes.set(
        xscale="log", xlabel="weight of a token / its weight in the mean over all tokens", ylabel="tokens"
    )
    axes.minorticks_off()
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(ylim=(0, 1.45), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def filled(lengths: np.ndarray) -> np.ndarray:
    """Return the micro batch of each response, where one is filled after the other. [n], int64."""
    owner, held, number = [], 0, 0
    for length in lengths.tolist():
        if held + length > BUDGET:
            held, number = 0, number + 1
        held += length
        owner.append(number)
    return np.array(owner)


def mean_of_means(counts: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return each token's weight where the loss is the mean of the means of its owners. [n]."""
    tokens = np.bincount(owner, counts)
    return np.asarray(1 / (len(np.unique(owner)) * tokens[owner]))


if __name__ == "__main__":
    main()

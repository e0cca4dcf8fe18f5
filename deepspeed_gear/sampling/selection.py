"""A selection: the samples of one global batch, as the ranks of a node read it from the store."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

PASS_SHIFT: Final = 32  # the key of a global batch in an evaluation pass: pass << PASS_SHIFT | batch


class Selection(NamedTuple):
    """The selection of one global batch, as views of the store in this process.

    Args:
        key: Number of the global batch (pass << 32 | number in an evaluation pass).
        head: Position after the selection, and totals: the words of `Head`.
        resolutions: The record of each sample, in the store. [batch, 8], int64; valid until `release`.
        epochs: Epoch (or pass) of each sample, in the store. [batch], int64; likewise.
        origins: Where several nodes hold the table: shard << 32 | slot of each sample's trajectory; its
            resolution holds the place of its rows on this node. [batch], int64; likewise.
    """

    key: int
    head: list[int]
    resolutions: torch.Tensor
    epochs: torch.Tensor
    origins: torch.Tensor | None = None

"""A selection: the samples of one global batch in the store, and the part of it that a rank gathers."""

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


class SelectionPart(NamedTuple):
    """Every num_parts-th sample of a selection, for one micro batch: copies, which outlive the selection.

    Args:
        head: As `Selection`.
        records: The samples' resolutions. [B, 8], int64.
        weights: Their PER weights; None: the stream has no priorities. [B], float32.
        epochs: Their epochs; None: the sampler has none. [B], int64.
        origins: As `Selection`. [B], int64.
    """

    head: list[int]
    records: torch.Tensor
    weights: torch.Tensor | None = None
    epochs: torch.Tensor | None = None
    origins: torch.Tensor | None = None

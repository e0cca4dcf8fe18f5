"""Masks of packs for layers that attend within a window or a chunk of their trajectory.

A mask function says which places a place attends to: (batch, head, query, key) -> bool. Those of a
pack keep its trajectories apart, and let those that share a prefix attend to it. The layers of some
models see less: the last steps of a window, or the steps of one chunk. Both count in steps of the
trajectory (`MicroBatch.position_ids`), since a shared prefix and what follows it are apart in the
pack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MaskMod = Callable[..., torch.Tensor]


def within_window(mask_mod: MaskMod, position_ids: torch.Tensor, window: int) -> MaskMod:
    """Return a mask function for layers with a sliding window.

    Args:
        mask_mod: The pack's, which is causal.
        position_ids: Step of each place in its trajectory. [1, N], int64.
        window: Steps that a place attends to at most, its own included.
    """
    steps = position_ids[0]
    # Compared, not subtracted from each other: a difference takes 8 bytes for each pair of places.
    firsts = steps - window + 1

    def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_mod(batch, head, query, key) & (firsts[query] <= steps[key])

    return attends


def within_chunk(mask_mod: MaskMod, position_ids: torch.Tensor, size: int) -> MaskMod:
    """Return a mask function for layers that attend within chunks of a trajectory.

    Args:
        mask_mod: The pack's, which is causal.
        position_ids: Step of each place in its trajectory. [1, N], int64.
        size: Steps of a chunk: the first one has the steps [0, size).
    """
    chunks = position_ids[0] // size

    def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_mod(batch, head, query, key) & (chunks[query] == chunks[key])

    return attends


def attention_mask(mask_mod: MaskMod, rows: int, attention: str, like: torch.Tensor) -> Any:
    """Return the mask of all places in the form that an attention of transformers takes.

    Args:
        mask_mod: Mask function of the pack.
        rows: N, its places.
        attention: "flex_attention", "sdpa" or "eager".
        like: Tensor of the type of the scores, on the device of `mask_mod`.
    Returns:
        A `BlockMask` for flex attention; for sdpa a bool, for eager what is added to the scores.
        [1, 1, N, N].
    """
    if attention == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(mask_mod, 1, None, rows, rows, like.device)
    places = torch.arange(rows, device=like.device)
    mask = mask_mod(0, 0, places[:, None], places)[None, None]
    if attention == "sdpa":
        return mask
    return (~mask).to(like.dtype) * torch.finfo(like.dtype).min

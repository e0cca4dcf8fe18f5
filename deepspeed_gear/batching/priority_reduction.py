"""Priorities of steps reduced to priorities of samples: [B, T] to [B], over the steps of a mask."""

from __future__ import annotations

from typing import NoReturn

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import ShapeError


def masks_of(batch: Batch, values: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return which steps of [B, T] count: the given mask, else the steps that learn by the batch's
    masks (of which there is one, or they must not differ), else all. ShapeError if the mask has
    another shape.
    """
    if mask is not None:
        if mask.shape != values.shape:
            rule = f"must have the shape of the priorities {list(values.shape)}"
            raise ShapeError("mask", rule, list(mask.shape))
        return [mask]
    names = {
        id(m): name for name, m in batch.mask.items() if m.shape == values.shape
    }  # equal windows: once
    found = [batch.learns(name) for name in names.values()]
    different = [
        mask for at, mask in enumerate(found) if all(mask is not before for before in found[:at])
    ]
    return different or [torch.ones_like(values, dtype=torch.bool)]


def refuse_masks() -> NoReturn:
    rule = "must be given where fields of the same length have different masks"
    raise ShapeError("mask", rule, None, 'as batch.learns("reward")')


def refuse_empty(sample: int) -> NoReturn:
    raise ShapeError(
        f"mask of sample {sample}", "must have a step that counts", None, "give another mask"
    )


def reduce_steps(
    values: torch.Tensor, mask: torch.Tensor, how: str, eta: float, is_checked: bool = True
) -> torch.Tensor:
    """Reduce priorities, [B, T], over the steps that count to [B], of their dtype, at least
    float32.

    A sample without such steps is a ShapeError where it `is_checked`, which waits for the device;
    else NaN.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
    ICLR
        2019, section 2.3: "mix" is p = eta * max_i d_i + (1 - eta) * mean(d).
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # their sum may overflow
    counts = mask.sum(1)
    if is_checked and not bool((counts > 0).all()):
        refuse_empty(int(torch.nonzero(counts == 0)[0]))
    # A NaN outside the mask does not count; one inside stays, and raises later.
    mean = torch.where(mask, values, 0).sum(1) / counts
    if how == "mean":
        return mean
    highest = torch.where(mask, values, -torch.inf).amax(1)
    return highest if how == "max" else eta * highest + (1 - eta) * mean


def float32_on_device(values: torch.Tensor) -> torch.Tensor:
    """Convert priorities to contiguous float32 without reading them; positive ones stay above 0."""
    rounded = values.to(torch.float32).contiguous()
    if values.dtype == torch.float64:
        tiny = torch.finfo(torch.float32).smallest_normal
        rounded = torch.where((values > 0) & (rounded == 0), tiny, rounded)
    return rounded

"""Priorities of steps reduced to priorities of samples: [B, T] to [B], over the steps of a mask."""

from __future__ import annotations

from typing import NoReturn

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.errors import ShapeError


def masks_of(batch: Batch, values: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the masks of the steps, [B, T], that priorities of steps are reduced over.

    It is the given mask; else the steps that learn, by every mask of the batch that has this shape
    and differs from the others (more than one is the caller's error); else all steps.

    Raises:
        ShapeError: The given mask has another shape.
    """
    if mask is not None:
        if mask.shape != values.shape:
            rule = f"must have the shape of the priorities {list(values.shape)}"
            raise ShapeError("mask", rule, list(mask.shape), "give one bool for each priority")
        return [mask]
    # Fields of equal windows share a mask: it counts once, and so does a mask of those that learn.
    names = {id(m): name for name, m in batch.mask.items() if m.shape == values.shape}
    masks = {id(learns): learns for learns in map(batch.learns, names.values())}
    return [*masks.values()] or [torch.ones_like(values, dtype=torch.bool)]


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
    """Reduce priorities of steps, [B, T], to priorities of samples, [B], over the steps of a mask.

    A sample without a step in the mask is a ShapeError if `is_checked`, which waits for the device;
    else its priority is NaN. The result has the dtype of `values`, at least float32.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
    ICLR 2019, section 2.3: "mix" is p = eta * max_i d_i + (1 - eta) * mean(d).
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

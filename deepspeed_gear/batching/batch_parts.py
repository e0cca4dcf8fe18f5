"""Parts of a batch: by a slice, a mask or indices of a program, and random minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError, ShapeError
from deepspeed_gear.ops.philox import philox
from deepspeed_gear.ops.records import RandomPurpose

Samples = slice | torch.Tensor | np.ndarray | list[Any]  # which samples of a batch


def sample_taker(key: Samples, num_samples: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that takes some of the samples out of a tensor of all."""
    if isinstance(key, slice):
        bounds = (key.start, key.stop, key.step)
        are_numbers = all(bound is None or isinstance(bound, (int, np.integer)) for bound in bounds)
        if not are_numbers or (key.step is not None and key.step < 1):
            rule = "must be a slice of integers with a step of at least 1"
            raise ShapeError("the samples", rule, str(key), "use indices for another order")
        return lambda tensor: tensor[key]
    if isinstance(key, list) and not key:  # would become a float64 array
        key = torch.empty(0, dtype=torch.int64)
    index = _index_of(arguments.tensor("the samples", key), num_samples)
    there = {index.device: index}

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device not in there:
            there[tensor.device] = index.to(tensor.device)
        return tensor.index_select(0, there[tensor.device])

    return take


def _index_of(key: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Return the indices that a mask or indices stand for, at least 0. [n], int64."""
    if key.dtype == torch.bool:
        if key.shape != (num_samples,):
            raise ShapeError(
                "the mask of samples",
                f"must have shape [{num_samples}]",
                list(key.shape),
                "give a mask with one bool for each sample",
            )
        return key.nonzero()[:, 0]
    if key.is_floating_point():
        raise DataError(
            "the samples",
            "must be a slice, a mask of bools, or integers",
            str(key.dtype),
            "convert them with .bool() or .long()",
        )
    if key.dtype == torch.uint8 and key.shape == (num_samples,):
        rule = "must be a mask of bools, or indices of int64"
        given = f"{num_samples} of uint8, for a mask or indices"
        raise DataError("the samples", rule, given, "convert them to bool or to int64")
    if key.dim() != 1:
        remedy = "write batch[i:i + 1] for one sample"
        raise ShapeError("the indices of samples", "must have shape [n]", list(key.shape), remedy)
    index = key.long()
    if not torch.compiler.is_compiling() and key.numel():
        low = index.min().item()
        high = index.max().item()
        if low < -num_samples or high >= num_samples:
            rule = f"must be in [{-num_samples}, {num_samples})"
            raise ShapeError(
                "an index of samples",
                rule,
                low if low < -num_samples else high,
                f"the batch has {num_samples} samples",
            )
    return torch.where(index < 0, index + num_samples, index)


def minibatch_samples(
    numbers: torch.Tensor, size: int, epochs: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yield the indices of each minibatch's samples, in an order of their own in every epoch.

    Args:
        numbers: Sample number of each sample. [B], int64, in host memory.
        size: Samples of a minibatch; the last one of an epoch has the rest.
        epochs: Passes over the samples.
        seed: Seed of the order.
    """
    count = len(numbers)
    if count == 0:
        return
    first = int(numbers[0]) & 0xFFFFFFFF
    places = np.arange(count, dtype=np.uint64) | np.uint64(first << 32)
    for epoch in range(epochs):
        words = philox(seed, places, epoch, np.array([[RandomPurpose.PERMUTATION]], np.uint64))
        order = torch.from_numpy(np.lexsort((words[1][0], words[0][0])))
        for begin in range(0, count, size):
            yield order[begin : begin + size]

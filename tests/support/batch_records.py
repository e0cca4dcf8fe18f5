"""Batches as arrays: what each rank has seen, joined to global batches, and what one process sees
alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear import Batch, Replay

PLAN_WIDTH = 4  # ranks that packs are planned for
SAMPLES = ("sample_number", "trajectory_id", "anchor")
Arrays = dict[str, np.ndarray]


def priorities(batch: Batch) -> torch.Tensor:
    """Return priorities that depend on item and sample number alone. [B], float64."""
    word = batch.trajectory_id * 7919 + batch.anchor * 104729 + batch.sample_number * 31
    return (word % 1009 + 1).double() / 100


def record(batch: Batch, names: Sequence[str] = SAMPLES) -> Arrays:
    """Return attributes of a batch, its fields, and their masks as `mask.NAME`, in memory of their
    own.
    """
    tensors = {**{name: getattr(batch, name) for name in names}, **batch}
    tensors |= {f"mask.{name}": mask for name, mask in batch.mask.items()}
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().copy()
        for name, tensor in tensors.items()
    }


def joined(records: Sequence[Arrays], axis: int = 0) -> Arrays:
    """Put records one after the other."""
    return {name: np.concatenate([each[name] for each in records], axis) for name in records[0]}


def stacked(records: Sequence[Arrays]) -> Arrays:
    """Make each record a row."""
    return {name: np.stack([each[name] for each in records]) for name in records[0]}


def alone(
    section: dict[str, Any],
    count: int,
    names: Sequence[str] = SAMPLES,
    transform: Any = None,
    state: dict[str, Any] | None = None,
) -> Arrays:
    """Return the global batches of a Replay in this process, without an engine. [count, B, ...]
    each.

    Args:
        section: With `batch_size`.
        count: Batches.
        names: Of attributes.
        transform: Of the replay.
        state: The position to begin at.
    """
    rows = []
    with Replay(section) as replay:
        replay.transform = transform
        if state is not None:
            replay.load_state_dict(state)
        for _ in range(count):
            batch = replay.sample()
            rows.append(record(batch, names))
            if replay.config.sampler.kind == "prioritized":
                replay.update_priorities(batch, priorities(batch))
    return stacked(rows)


def in_order(parts: Sequence[Arrays], size: int | None = None) -> Arrays:
    """Join what ranks saw to global batches, their samples in the order of their numbers.

    No two ranks may have had the same sample.

    Args:
        parts: Of each rank, [rows, micro, ...].
        size: Of a global batch, where a row of all ranks is a part of it.
    """
    rows = joined(parts, axis=1)
    numbers = rows["sample_number"]
    assert len(np.unique(numbers)) == numbers.size, "ranks share samples"
    whole = {
        name: array.reshape(-1, size or numbers.shape[1], *array.shape[2:])
        for name, array in rows.items()
    }
    order = np.argsort(whole["sample_number"], axis=1)
    return {name: array[np.arange(len(order))[:, None], order] for name, array in whole.items()}


def in_plan_order(ranks: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Return the packs of each step, micro step by micro step of the plan and rank by rank of it.

    Args:
        ranks: The packs of each step of each rank.
    """
    per_rank = PLAN_WIDTH // len(ranks)
    steps = []
    for of_ranks in zip(*ranks, strict=True):
        firsts = range(0, len(of_ranks[0]), per_rank)
        steps.append(
            [pack for first in firsts for own in of_ranks for pack in own[first : first + per_rank]]
        )
    return steps


def samples_of(arrays: Arrays) -> np.ndarray:
    """Return number, trajectory and anchor of each sample. [..., 3]."""
    return np.stack([arrays[name] for name in SAMPLES], axis=-1)


def assert_same(found: Arrays, wanted: Arrays, what: str = "") -> None:
    """Compare every bit."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, f"{what}: {name}"
        assert found[name].shape == array.shape, f"{what}: {name}"
        assert found[name].tobytes() == array.tobytes(), f"{what}: {name}"

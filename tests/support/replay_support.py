"""Replays in one process, of a small data set or of what is added, and their batches."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gear_support import SCHEMA, config_of, lengths_of, trajectory

from deepspeed_gear import Batch, Replay
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates
from deepspeed_gear.sampling.batch_stream import BatchStream

LENGTHS = lengths_of(40)
FIELDS = {"code": {"offset": -2, "length": 4}, "observation": {"normalize": "mean_std"}, "task": {}}
SPLIT = {"eval": 0.2, "test": 0.1}


def offline(data: Path, /, **options: Any) -> Replay:
    return Replay(config_of(data, **{"batch_size": 16, "fields": FIELDS, **options}))


def online(**options: Any) -> Replay:
    return Replay(config_of(**{"batch_size": 8, **options}), schemas={"main": SCHEMA})


def filled(lengths: Iterable[int], /, **options: Any) -> Replay:
    """Return a replay that holds trajectories 0, 1, ... of these lengths."""
    replay = online(**options)
    for number, steps in enumerate(lengths):
        replay.add(trajectory(number, steps))
    return replay


def streams_of(replay: Replay) -> dict[str, BatchStream]:
    """Return the batch streams of the first sampled table by name: "train", and one for
    each split.
    """
    return replay._parts.streams[replay.config.sampled_tables[0]]


def late_updates_of(replay: Replay) -> AsyncPriorityUpdates:
    """Return the priorities that are still being computed on a device."""
    return replay._parts.late_updates


def take(replay: Replay, count: int) -> list[Batch]:
    return [replay.sample().clone() for _ in range(count)]


def same(a: Batch, b: Batch) -> bool:
    parts = (
        "trajectory_id",
        "anchor",
        "sample_number",
        "probability",
        "is_weight",
        "epoch",
        "valid",
    )
    fields = list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)
    return fields and all(torch.equal(getattr(a, p), getattr(b, p)) for p in parts)


def split(data: Path, /, **options: Any) -> Replay:
    return offline(data, data={"path": str(data), "split": SPLIT}, batch_size=8, **options)

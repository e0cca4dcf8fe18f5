"""Replays in one process, of a small data set or of what is added, and their batches."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gear_support import SCHEMA, config_of, lengths_of, trajectory

from deepspeed_gear import Batch, Replay
from deepspeed_gear.replay.replay_parts import ReplayParts
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


def parts_of(replay: Replay) -> ReplayParts:
    """Return what a replay is built of, for states that no call shows."""
    return replay._parts


def streams_of(replay: Replay, table: str | None = None) -> dict[str, BatchStream]:
    """Return the batch streams of a table by name: "train", and one for each split.

    Without a table, of the first sampled one.
    """
    return parts_of(replay).streams[table or replay.config.sampled_tables[0]]


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cpu = False
    is_cuda = True


def read_late(replay: Replay, blocks: Any) -> None:
    """Fetch priorities from a device by `blocks`, in place of pinned memory."""
    parts_of(replay).late_updates._blocks = blocks


def add_in_python(replay: Replay) -> None:
    """Add the trajectories of a replay without the native calls that add whole ones."""
    replay._inserter(None)._adds_natively = False


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

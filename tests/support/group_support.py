"""Replays of groups, and the rules of groups written down a second time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gear_support import prefix
from replay_support import streams_of
from store_support import check_whole

from deepspeed_gear import Replay
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.records import Head

COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "prompt": {"dtype": "int64", "rows": "1"},
    "sample": {"dtype": "int32", "rows": "1"},
    "weight": {"dtype": "float32", "rows": "1"},
    "reward": {"dtype": "float32", "rows": "1", "late": True},
}
GROUP = {"column": "prompt", "size": 3}
MOST = 20  # steps


def section(
    group: Mapping[str, Any] = GROUP, sampler: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return a gear section with a table of groups; `options` of the table or of the section."""
    table = {
        "capacity_steps": 4000,
        "capacity_trajectories": 200,
        "max_length": MOST,
        "group": dict(group),
    }
    own = ("remove", "keep_best", "max_age", "max_times_sampled", "rate_limiter", "writers", *table)
    table.update({name: options.pop(name) for name in own if name in options})
    fields = {name: {} for name in ("tokens", "prompt", "sample")}
    return {
        "tables": {"main": {**table, "schema": {"columns": COLUMNS}}},
        "sampler": {"kind": "fifo", "unit": "group", **(sampler or {})},
        "fields": fields,
        "pack": {"tokens": 64, "pad": {"multiple": 8}},
        "batch": {"groups": 4},
        "shared_memory": {"prefix": prefix()},
        **options,
    }


def train(replay: Replay, table: str = "main") -> BatchStream:
    return streams_of(replay, table)["train"]


def add(
    replay: Replay, prompt: int, sample: int = 0, steps: int = 3, weight: float = 1.0, **to: Any
) -> int:
    """Add a trajectory; its tokens are its number of steps."""
    tokens = np.full(steps, steps, np.int32)
    row = {"prompt": np.int64(prompt), "sample": np.int32(sample), "weight": np.float32(weight)}
    return replay.add({"tokens": tokens, **row}, **to)


def add_groups(replay: Replay, numbers: Any, size: int = 3, **options: Any) -> dict[int, list[int]]:
    """Add whole groups; return the ids of each."""
    return {number: [add(replay, number, m, **options) for m in range(size)] for number in numbers}


def drawn(selection: Selection) -> list[list[int]]:
    """Return the ids of each drawn group, and check the words that its records share."""
    records = selection.resolutions[: selection.head[Head.COUNT]].numpy()
    numbers = records[:, Resolution.SAMPLE_NUMBER]
    assert (np.diff(numbers) >= 0).all()
    assert len(np.unique(numbers)) == len(range(int(numbers[0]), selection.head[Head.SAMPLES]))
    found = [records[numbers == number] for number in np.unique(numbers)]
    assert all(len(set(one[:, Resolution.MASS])) == 1 for one in found)
    return [one[:, Resolution.ID].tolist() for one in found]


def take(stream: BatchStream, key: int) -> list[list[int]]:
    """Return the groups of a selection, and release it."""
    stream.state.ask(key)
    found = drawn(stream.get(key))
    stream.release(key)
    return found


def trained(replay: Replay) -> list[list[int]]:
    """Return the groups of the next rollout batch, after training it."""
    rollout = replay.rollout()
    ids = rollout.trajectory_id
    group = rollout.group
    seen = [number for step in rollout for micro in step for number in micro.trajectory_id.tolist()]
    assert sorted(seen) == sorted(ids.tolist())
    return [ids[group == index].tolist() for index in range(rollout.num_items)]


def stored(replay: Replay) -> set[int]:
    """Return the ids of the stored trajectories."""
    slots = train(replay).table.slots
    return set(slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist())


def check_groups(replay: Replay) -> None:
    """Check that groups and what is derived from them agree with the slot table."""
    stream = train(replay)
    check_whole(stream.table, [stream])
    table = stream.table
    groups = stream.table.groups
    assert groups is not None
    with table.lock:
        held = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        leaders = held[groups.is_leader(held)]
        assert groups.statistics["complete"] == len(leaders)
        complete = held[groups.is_complete(held)]
        slots, index = groups.trajectories(leaders)
        assert sorted(slots.tolist()) == sorted(complete.tolist())
        assert (groups.numbers(slots) == groups.numbers(leaders)[index]).all()
        assert len(set(groups.numbers(leaders).tolist())) == len(leaders)
        steps = np.bincount(index, table.slots[slots, Slot.NUM_STEPS], len(leaders))
        assert (groups.steps(leaders) == steps).all()

"""The gate of a table of several nodes, and the reach of their writers: all their stores in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gear_support import trajectory
from store_support import StoreScene, reserve, stream_spec

from deepspeed_gear.context import Context
from deepspeed_gear.errors import NotReadyError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.sampling.rate_limiting import JointSelectionLimiter, NodeRate
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.records import Control, Head, Position
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table_spec import Shard
from deepspeed_gear.writer.inserter import Inserter

Make = Callable[..., list[StoreScene]]
BATCH = 4


@pytest.fixture
def make() -> Iterator[Make]:
    """Return what makes the stores of some nodes."""
    made: list[StoreScene] = []

    def of(count: int, **retention: Any) -> list[StoreScene]:
        for index in range(count):
            spec = stream_spec(batch=BATCH, num_shards=count)
            shard = Shard(index, count)
            made.append(StoreScene([spec], retention=Retention("fifo", **retention), shard=shard))
        meet(made)
        return made

    yield of
    for scene in made:
        scene.close()


def joint(scene: StoreScene) -> JointSelectionLimiter:
    found = scene.streams[0].state.joint_limiter
    assert found is not None
    return found


def say(scenes: list[StoreScene]) -> np.ndarray:
    return np.stack([joint(scene).record(BATCH) for scene in scenes])


def meet(scenes: list[StoreScene]) -> bool:
    """Let the nodes meet; a batch is drawn if they may."""
    said = say(scenes)
    found = {joint(scene).apply(said, BATCH) for scene in scenes}
    assert len(found) == 1
    if found == {True}:
        for scene in scenes:
            scene.streams[0].position[Head.SAMPLES] += BATCH
    return found.pop()


def fill(scene: StoreScene, num_steps: int = 1) -> int:
    """Add until it is refused; return how often it was not."""
    by = Inserter(scene.table, SelectionPins(scene.table), Context(timeout_s=0.0))
    for number in range(1000):
        try:
            by.add(trajectory(number, num_steps))
        except NotReadyError:
            return number
    raise AssertionError("nothing holds it back")


@pytest.mark.parametrize("count", [2, 3])
def test_a_queue_of_all_nodes(count: int, make: Make) -> None:
    """So many wait at most, whoever adds them."""
    scenes = make(count, rate_limiter=RateLimiter.queue("trajectory", 10))
    assert sum(fill(scene) for scene in scenes) == 10
    assert sum(fill(scene) for scene in scenes) == 0
    assert [meet(scenes) for _ in range(3)] == [True, True, False]
    last, added = scenes[-1], 0
    for _ in range(8):
        added += fill(last)
        joint(last).apply(say(scenes), BATCH)
    assert added <= 8


def test_one_node_gets_all_if_only_one_adds(make: Make) -> None:
    scenes = make(3, rate_limiter=RateLimiter.queue("trajectory", 9))
    assert fill(scenes[1]) == 3
    found = 3
    while not meet(scenes):
        found += fill(scenes[1])
    assert found >= BATCH
    for _ in range(20):
        found += fill(scenes[1])
        meet(scenes)
    batches = int(scenes[1].streams[0].position[Head.SAMPLES]) // BATCH
    assert batches >= 8
    assert found - batches * BATCH <= 9


def test_a_trajectory_longer_than_a_part_gets_through_in_its_turn(make: Make) -> None:
    """Together there is room for one of 12 steps, which no third is."""
    scenes = make(3, rate_limiter=RateLimiter("step", 1, 1.0, -100.0, 14.0))
    assert [fill(scene, 12) for scene in scenes] == [0, 0, 0]
    assert all(scene.table.control[Control.WANTED] == 12 for scene in scenes)
    added = []
    for _ in range(3):
        said = say(scenes)
        for scene in scenes:
            joint(scene)._is_open = False
            joint(scene).apply(said, 1000)
        added.append(sum(fill(scene, 12) for scene in scenes))
    assert sum(added) == 1


def test_what_is_being_written_counts(make: Make) -> None:
    scenes = make(2, rate_limiter=RateLimiter.queue("trajectory", 4))
    slot = reserve(scenes[0].table, 3)
    added = 0
    for _ in range(3):
        said = say(scenes)
        assert not any(joint(scene).apply(said, 1000) for scene in scenes)
        added += sum(fill(scene) for scene in scenes)
    assert added == 3
    scenes[0].table.commit(slot)
    assert meet(scenes)


def test_what_the_dead_have_reserved_holds_nobody_back(make: Make) -> None:
    scenes = make(2, rate_limiter=RateLimiter.queue("trajectory", 4))
    table = scenes[0].table
    slot = reserve(table, 3)
    table.slots[slot, Slot.OWNER] = 3  # a process that is not attached
    assert sum(fill(scene) for scene in scenes) == 3
    assert table.control[Control.PENDING] == 1
    assert not meet(scenes)
    assert table.control[Control.PENDING] == 0
    assert sum(fill(scene) for scene in scenes) == 1
    assert meet(scenes)


def test_a_node_that_would_wait_for_itself_ends_the_wait_of_all(make: Make) -> None:
    """As it does where the one process of each node waits, so that none is left that may add."""
    scenes = make(2, max_times_sampled=2)
    assert all(joint(scene).given_up(say(scenes), 0, BATCH) for scene in scenes)
    others = say(scenes)
    others[1, NodeRate.MAY_BE_FILLED] = 1
    assert all(joint(scene).given_up(others, 0, BATCH) is None for scene in scenes)
    scenes[1].streams[0].position[Position.WRITES] = 1
    said = say(scenes)
    said[:, NodeRate.MAY_BE_FILLED] = 1
    for scene in scenes:
        assert isinstance(joint(scene).given_up(said, 0, BATCH), NotReadyError)
        assert not joint(scene).apply(said, BATCH)
    assert joint(scenes[0]).apply(said, 0)

"""Groups whose writers and readers die at any instruction: they are whole, or not complete."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from gear_support import trajectory
from group_support import GROUP, add, check_groups, section, stored, trained
from process_support import exit_status, in_child
from store_support import (
    StoreScene,
    check_whole,
    every_death,
    priority_rule,
    store_trajectory,
    stream_spec,
)

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.mass_rules import Decay
from deepspeed_gear.store.group_spec import GroupCondition, GroupCount, GroupSpec
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.retention import Retention

STRIDE = int(os.environ.get("GEAR_TEST_STRIDE", "17"))
FOREVER = 1 << 60  # a request of batches up to this one: no selection waits for updates
SPEC = GroupSpec("task", 2, where=(GroupCondition("task", "mean", None, 8.0),), max_trajectories=2)
TASKS = [
    0,
    1,
    9,
    0,
    2,
    1,
    0,
    9,
]  # 0 and 1 are complete, with a late one; 9 fails the condition; 2 lacks one


def spec_of(kind: str, **options: Any) -> Any:
    return stream_spec(kind, "group", 2, most_trajectories=2, **options)


def groups_of(table: Any) -> dict[int, list[int]]:
    """Return the ids of each task's stored trajectories."""
    slots = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
    slots = slots[np.argsort(table.slots[slots, Slot.ID])]
    found: dict[int, list[int]] = {}
    for slot in slots.tolist():
        found.setdefault(int(table.columns["task"][slot]), []).append(
            int(table.slots[slot, Slot.ID])
        )
    return found


def sampled(stream: Any, number: int) -> list[list[int]]:
    stream.state.ask(FOREVER)  # no process reports priorities: none waits for them
    selection = stream.get(number)
    stream.release(number)
    words = [Resolution.ID, Resolution.MASS, Resolution.SAMPLE_NUMBER]
    return selection.resolutions[: selection.head[Head.COUNT]].numpy()[:, words].tolist()


@pytest.mark.parametrize("kind", ["random", "epoch", "fifo", "priorities"])
def test_death_while_groups_are_formed(kind: str) -> None:
    """A selection evicts late members and a group that fails, forms two groups, and draws."""
    options = {"priorities": priority_rule(lag=9, decay=Decay(0.4))} if kind == "priorities" else {}
    spec = spec_of("random" if options else kind, **options)

    def make() -> StoreScene:
        scene = StoreScene([spec], group=SPEC)
        scene.streams[0].state.ask(FOREVER)
        for task in TASKS:
            scene.add(2, task)
        return scene

    def act(table: Any, streams: Any) -> None:
        sampled(streams[0], 0)
        sampled(streams[0], 1)

    with make() as whole:
        wanted = [sampled(whole.streams[0], number) for number in range(3)]
    assert len(wanted[0]) == 4
    for scene in every_death(make, act, STRIDE):
        assert [sampled(scene.streams[0], number) for number in range(3)] == wanted
        check_whole(scene.table, scene.streams)
        assert groups_of(scene.table) == {0: [0, 3], 1: [1, 5], 2: [4]}
        counts = scene.table.groups.counts
        assert counts[GroupCount.HELD] == counts[GroupCount.INSERTED] == 2
        scene.add(2, 2)
        sampled(scene.streams[0], 3)
        assert counts[GroupCount.HELD] == 3


@pytest.mark.parametrize("remove", ["fifo", "lifo", "uniform"])
def test_death_while_groups_are_evicted(remove: str) -> None:
    """A writer evicts groups for its own: each is there as a whole, or not at all."""

    def make() -> StoreScene:
        retention = Retention(eviction=remove)
        scene = StoreScene([spec_of("random")], num_slots=8, retention=retention, group=SPEC)
        for task in (0, 0, 1, 1, 2, 2, 3):
            scene.add(2, task)
        sampled(scene.streams[0], 0)
        return scene

    def act(table: Any, streams: Any) -> None:
        streams[0].release(0)  # its groups are evicted too
        for task in (3, 4, 4):
            store_trajectory(table, streams, {**trajectory(9, 2), "task": np.int64(task)}, None)
        table_access.remove(table, [2, 7])

    for scene in every_death(make, act, STRIDE):
        check_whole(scene.table, scene.streams)
        found = groups_of(scene.table)
        assert all(len(found.get(task, [0, 0])) == 2 for task in (0, 1, 2))
        for number in (1, 2):
            rows = sampled(scene.streams[0], number)
            assert all(
                a[2] == b[2] and a[0] + 1 == b[0]
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            )
        for _ in range(4):
            for _ in range(2):
                scene.add(2, 7)
            table_access.remove(scene.table, [int(scene.table.slots[:, Slot.ID].max())])
        check_whole(scene.table, scene.streams)


# ---- processes -----------------------------------------------------------------------------------


def writing(config: dict[str, Any], samples: list[int], prompts: int, pause_s: float) -> None:
    """Add members of the same groups as other processes."""
    with TrajectoryWriter.attach(config) as writer:
        for prompt in range(prompts):
            for sample in samples:
                row = {
                    "prompt": np.int64(prompt),
                    "sample": np.int32(sample),
                    "weight": np.float32(1),
                }
                writer.add({"tokens": np.full(2, sample, np.int32), **row})
                time.sleep(pause_s)


def test_processes_write_members_of_the_same_groups() -> None:
    config = section(
        {**GROUP, "size": 4}, batch={"groups": 10}, writers=2, rate_limiter={"queue": 10}
    )
    with Replay(config) as replay:
        children = [in_child(lambda s=s: writing(config, s, 30, 0.0)) for s in ([0, 1], [2, 3])]
        seen: set[int] = set()
        for _ in range(3):
            for ids in trained(replay):
                assert len(ids) == 4
                seen.update(ids)
            check_groups(replay)
        assert len(seen) == 120
        assert [exit_status(child) for child in children] == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_is_killed_in_the_middle_of_a_group(seed: int) -> None:
    """What it has added stays; another process adds the missing members, and the group
    is complete.
    """
    config = section({**GROUP, "size": 5}, batch={"groups": 1}, writers=1, max_times_sampled=1)
    with Replay(config) as replay:
        child = in_child(lambda: writing(config, list(range(5)), 40, 0.002))
        words = np.random.default_rng(seed)
        while len(stored(replay)) < 6:
            time.sleep(0.001)
        time.sleep(float(words.random()) * 0.03)
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) == -signal.SIGKILL
        check_groups(replay)
        held = sorted(stored(replay))
        count, rest = divmod(len(held), 5)
        found = replay.statistics()["groups"]["main"]
        assert (found["complete"], found["incomplete"]) == (count, int(rest > 0))
        for index in range(count):
            assert trained(replay) == [held[5 * index : 5 * index + 5]]
        assert not replay.can_sample()
        added = [add(replay, count, sample) for sample in range(rest, 5)]
        assert trained(replay) == [held[5 * count :] + added]

"""Rates, queues and how often a trajectory may be drawn, through a Replay."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of, wait_until
from gear_support import trajectory as plain_trajectory
from process_support import exit_status, in_child
from replay_support import streams_of
from store_support import StoreScene, reserve, stream_spec

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.cli.table_contents import of_living
from deepspeed_gear.errors import ConfigError, NotReadyError, StoreError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.sampling.batch_admission import NodeRate
from deepspeed_gear.store.group_spec import GroupSpec
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.records import Control, Head, Peer, Position
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table_spec import Shard
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.inserter import Inserter

SCHEMA = Schema(
    [Column("observation", "float32", (2,), "observation", "T+1"), Column("which", "int64")]
)


def trajectory(number: int, steps: int = 3) -> dict[str, Any]:
    observation = np.full((steps + 1, 2), number, np.float32)
    return {"observation": observation, "which": np.full(steps, number, np.int64)}


def replay(
    batch: int = 1,
    sampler: str = "uniform",
    count: int = 0,
    prefetch: int = 0,
    unit: Any = None,
    **table: Any,
) -> Replay:
    """Return a replay that holds the trajectories 0 to `count`."""
    section: dict[str, Any] = {
        "tables": {"main": {"capacity_steps": 300, "capacity_trajectories": 40, **table}},
        "sampler": {"kind": sampler} if unit is None else {"kind": sampler, "unit": unit},
        "fields": {"which": {}},
        "batch_size": batch,
        "prefetch": prefetch,
        "timeout_s": 5.0,
    }
    made = Replay(section, schemas={"main": SCHEMA})
    for number in range(count):
        made.add(trajectory(number))
    return made


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["which"].tolist()
    return found


def test_each_is_drawn_as_often_as_it_may_be() -> None:
    """Three times eight items: exactly 24 draws, the same whatever the batch; then all of them are
    gone.
    """
    drawn: dict[int, list[int]] = {}
    for batch in (1, 4, 24):
        with replay(batch, count=8, max_times_sampled=3) as found:
            drawn[batch] = []
            for _ in range(24 // batch):
                assert found.can_sample()
                drawn[batch] += numbers(found.sample())
            assert not found.can_sample()
            assert len(found) == 0
            found.writer()
            with pytest.raises(NotReadyError, match=r"call can_sample\(\) first"):
                found.sample()
            for number in range(8, 16):
                found.add(trajectory(number))
            assert set(numbers(found.sample())) <= set(range(8, 16))
    assert Counter(drawn[1]) == dict.fromkeys(range(8), 3)
    assert drawn[1] == drawn[4] == drawn[24]


def test_priorities_outlive_a_batch_that_is_not_admitted() -> None:
    with replay(4, "prioritized", 4, unit="trajectory", max_times_sampled=2) as found:
        found.set_priorities([0, 1, 2], torch.zeros(3))
        for _ in range(2):
            with pytest.raises(StoreError, match="must hold what the sampler admits first"):
                found.sample()
            assert found.priorities([0, 1, 2, 3]).tolist() == [0, 0, 0, 1]
        found.set_priorities([0], torch.ones(1))
        assert sorted(numbers(found.sample())) == [0, 0, 3, 3]


def test_a_queue_gives_each_once_in_order() -> None:
    """What it gave can be read until more is added."""
    with replay(2, "fifo", 6, rate_limiter={"queue": 6}, capacity_trajectories=7) as found:
        with pytest.raises(
            NotReadyError, match="sample, or raise"
        ):  # this process samples: it must not wait
            found.add(trajectory(6))
        batch = found.sample()
        assert numbers(batch) == [0, 1]
        assert len(found) == 4
        assert [int(one["which"][0]) for one in found.read(batch.trajectory_id)] == [0, 1]
        found.add(trajectory(6))
        found.add(trajectory(7))
        with pytest.raises(StoreError, match="before adding more"):
            found.read(batch.trajectory_id)
        with pytest.raises(NotReadyError):
            found.add(trajectory(8))
        assert [numbers(found.sample()) for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
        assert not found.can_sample()
        found.add(trajectory(8))
        assert not found.can_sample(), "a batch needs two"
        found.add(trajectory(9))
        assert numbers(found.sample()) == [8, 9]


def test_the_longest_gets_through_with_the_least_buffer() -> None:
    """One item of `min_size` is missing, and who adds has nothing but the longest trajectories."""
    rate = {"min_size": 10, "samples_per_insert": 1.0}
    with pytest.raises(ConfigError, match="must be at least 19"):
        replay(2, unit="step", max_length=20, rate_limiter={**rate, "error_buffer": 18.9})
    with replay(
        2, unit="step", max_length=20, rate_limiter={**rate, "error_buffer": 19.0}
    ) as found:
        found.add(trajectory(0, 9))
        found.add(trajectory(1, 20))
        assert found.can_sample()


def test_a_wait_ends_with_an_error_or_goes_on_when_items_come() -> None:
    with replay(count=1, rate_limiter={"min_size": 2, "timeout_s": 0.2}, writers=1) as found:
        with pytest.raises(
            NotReadyError, match=r"must be filled within 0\.2.*check that the actors run"
        ):
            found.sample()
        wait = streams_of(found)["train"].state.limiter_wait
        wait.timeout_s = 10.0
        before = wait.total_s
        adder = threading.Timer(0.4, lambda: found.add(trajectory(1)))
        adder.start()
        found.sample()
        adder.join()
        assert wait.total_s - before > 0.2


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "table",
    [
        {"rate_limiter": {"min_size": 3}},
        {"rate_limiter": {"min_size": 2, "samples_per_insert": 1.0}, "remove": "fifo"},
        {"max_times_sampled": 1},
        {"max_times_sampled": 1, "rate_limiter": {"min_size": 1}},
    ],
    ids=str,
)
def test_the_only_process_that_can_add_does_not_wait(table: dict[str, Any], prefetch: int) -> None:
    """It gets an error at once, with any limiter; and never one from before its latest addition."""
    with replay(prefetch=prefetch, **table) as found:
        drawn = 0
        for number in range(6):
            found.add(trajectory(number))
            if found.can_sample():
                found.sample()
                drawn += 1
            else:
                with pytest.raises(NotReadyError, match=r"must be filled first.*call can_sample"):
                    found.sample()
        assert drawn >= 4
        if "max_times_sampled" in table:
            limit = "rate limiter" if "rate_limiter" in table else "max_times_sampled"
            with pytest.raises(NotReadyError, match=f"first, as its {limit} requires") as caught:
                found.sample()
            assert "actors" not in str(caught.value)


def of_writers(**options: Any) -> dict[str, Any]:
    """Return the section of a table that takes writers."""
    columns = {"which": {"dtype": "int64"}, "late": {"dtype": "int64", "late": True}}
    table = {"capacity_steps": 90, "writers": 2, "remove": "fifo", "schema": {"columns": columns}}
    return config_of(
        tables={"main": table}, **{"fields": {"which": {}}, "batch_size": 4, **options}
    )


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_empty_table_waits_for_a_writer_that_lives(prefetch: int) -> None:
    section = of_writers(timeout_s=200.0, prefetch=prefetch)
    (told, tell) = os.pipe()

    def write() -> None:
        os.read(told, 1)
        with TrajectoryWriter.attach(section, wait_s=60) as writer:
            time.sleep(0.3)
            writer.add({"which": np.full(3, 0)})
            os.read(told, 1)

    child = in_child(write)
    with Replay(section) as found:
        with pytest.raises(
            NotReadyError, match=r"must hold what the sampler admits first.*0 trajectories"
        ):
            found.sample()  # no writer
        os.write(tell, b".")
        wait_until(lambda: (found.tables["main"].peers[:, Peer.PID] == child).any(), "attaching")
        assert numbers(found.sample()) == [0] * 4
        found.clear()
        for _ in range(prefetch + 1):  # the batches that were prefetched
            with contextlib.suppress(NotReadyError):
                streams_of(found)["train"].state.limiter_wait.timeout_s = 0.3
                found.sample()
        with pytest.raises(NotReadyError, match=r"must hold what the sampler admits within \d"):
            found.sample()  # it lives, but adds no more
        os.write(tell, b".")
        assert exit_status(child) == 0
        with pytest.raises(NotReadyError, match="must hold what the sampler admits first"):
            found.sample()
        found.add({"which": np.full(3, 7)})
        assert numbers(found.sample()) == [7] * 4


@pytest.mark.parametrize("rate_limiter", [None, {"min_size": 10, "timeout_s": 0.2}])
def test_a_late_column_that_lacks_is_named(rate_limiter: dict[str, Any] | None) -> None:
    section = of_writers(fields={"which": {}, "late": {}})
    section["tables"]["main"] |= {} if rate_limiter is None else {"rate_limiter": rate_limiter}
    with Replay(section) as found:
        ids = [found.add({"which": np.full(3, 7)}) for _ in range(10)]
        text = (
            r"10 trajectories, 30 steps held; 10 trajectories \(30 steps\) without the late "
            r""
            r"column late"
        )
        with pytest.raises(NotReadyError, match=text):
            found.sample()
        living = [
            of_living(store) for store in living_stores(os.getpid()) if store.run.id == found.run
        ]
        seen = [
            (one["trajectories"], one["reason"]) for store in living for one in store["excluded"]
        ]
        assert (10, "without the late column late") in seen
        del living
        found.fill(ids[3], late=np.arange(3))
        assert set(found.sample().trajectory_id.tolist()) == {ids[3]}


def test_each_reason_is_counted() -> None:
    columns = {"which": {"dtype": "int64"}, "task": {"dtype": "int64", "rows": "1"}}
    table = {"capacity_steps": 900, "schema": {"columns": columns}}
    sampler = {"kind": "prioritized", "unit": "step", "where": {"task": {"min": 1}}}
    fields = {"which": {"offset": 0, "length": 4}}
    sampler["anchors"] = "fits"
    section = config_of(tables={"main": table}, fields=fields, sampler=sampler, batch_size=4)
    with Replay(section) as found:
        for number, steps in enumerate([3, 3, 9, 9]):
            found.add({"which": np.full(steps, number), "task": np.array(number % 2)})
        found.sample()
        found.set_priorities([3] * 6, [0.0] * 6, range(6))
        with pytest.raises(StoreError) as caught:
            found.sample()
        assert str(caught.value.value) == (
            "4 trajectories, 24 steps held; 2 trajectories (12 steps) outside of "
            "sampler.where.task; "
            '1 trajectories (3 steps) without an anchor (too short for the windows of "fields"); '
            "1 trajectories (6 steps) of priority 0"
        )


@pytest.mark.parametrize("kind", ["rate_limiter", "times"])
def test_a_restart_keeps_the_counters(kind: str, tmp_path: Any) -> None:
    rate = {"min_size": 2, "samples_per_insert": 2.0, "error_buffer": 3.0}
    options: dict[str, Any] = (
        {"rate_limiter": rate} if kind == "rate_limiter" else {"max_times_sampled": 2}
    )

    def rest(found: Replay) -> list[int]:
        drawn = []
        while found.can_sample():
            drawn += numbers(found.sample())
        return drawn

    with replay(count=3, **options) as first:
        first.sample()
        first.sample()
        state = first.save(tmp_path / "saved")
        wanted = rest(first)
    assert len(wanted) == {"rate_limiter": 3, "times": 4}[kind]
    with replay(**options) as second:
        second.load(tmp_path / "saved", state)
        assert rest(second) == wanted


@pytest.mark.parametrize(
    ("sampler", "table", "text"),
    [
        ("uniform", {"rate_limiter": {"queue": 4}}, 'needs sampler.kind = "fifo"'),
        ("fifo", {"rate_limiter": {"queue": 1}}, "must be at least a global batch"),
        (
            "fifo",
            {"rate_limiter": {"queue": 9, "min_size": 3}},
            "min_size must not be given together with",
        ),
        ("uniform", {"rate_limiter": {"error_buffer": 3.0}}, "must not be given without"),
        (
            "uniform",
            {"rate_limiter": {"samples_per_insert": 0.0}},
            "insert must be a finite number > 0",
        ),
        (
            "uniform",
            {"rate_limiter": {"samples_per_insert": 4.0, "error_buffer": 2.9}},
            "must be at least 3",
        ),
        ("uniform", {"rate_limiter": {"min_size": 41}}, "must be at most what the table holds"),
        ("uniform", {"remove": "keep_best"}, 'must be given with remove = "keep_best"'),
        ("uniform", {"keep_best": "which"}, 'must be given with remove = "keep_best"'),
        ("uniform", {"remove": "lowest_priority"}, "without priorities"),
    ],
)
def test_wrong_options_are_refused(sampler: str, table: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replay(2, sampler, **table)


# ---- over nodes ----------------------------------------------------------------------------------

Make = Callable[..., list[StoreScene]]
BATCH = 4


@pytest.fixture
def make(scenes: Any) -> Make:
    """Return what makes the stores of some nodes."""

    def of(count: int, group: GroupSpec | None = None, **retention: Any) -> list[StoreScene]:
        unit = "trajectory" if group is None else "group"
        spec = stream_spec(unit=unit, batch=BATCH, num_shards=count)
        kept = Retention("fifo", **retention)
        made = [
            scenes(spec, retention=kept, shard=Shard(index, count), group=group)
            for index in range(count)
        ]
        meet(made)
        return made

    return of


def joint(scene: StoreScene) -> Any:
    return scene.streams[0].state.joint_limiter


def say(scenes: list[StoreScene]) -> np.ndarray:
    return np.stack([joint(scene).rate(BATCH) for scene in scenes])


def meet(scenes: list[StoreScene]) -> bool:
    """Let the nodes meet; a batch is drawn if they may."""
    said = say(scenes)
    found = {joint(scene).apply(said, BATCH) for scene in scenes}
    assert len(found) == 1
    if found == {True}:
        for scene in scenes:
            scene.streams[0].position[Head.SAMPLES] += BATCH
    return found.pop()


def fill(scene: StoreScene, num_steps: int = 1, most: int = 1000, size: int = 1) -> int:
    """Add groups of a size until one is refused, `most` trajectories at most; return how many."""
    by = Inserter(scene.table, Context(timeout_s=0.001))
    first = int(scene.table.control[Control.INSERTED])
    for number in range(most):
        try:
            by.add(plain_trajectory((first + number) // size, num_steps))
        except NotReadyError as error:
            if "must be sampled from within 0.001 s, as its rate limiter" not in str(error):
                raise
            return number
    assert most < 1000, "nothing holds it back"
    return most


@pytest.mark.parametrize("count", [2, 3])
def test_a_queue_of_all_nodes(count: int, make: Make) -> None:
    """The limit holds for additions of every process."""
    scenes = make(count, rate_limiter=RateLimiter.queue("trajectory", 10))
    assert sum(fill(scene) for scene in scenes) == 10
    assert sum(fill(scene) for scene in scenes) == 0
    assert [meet(scenes) for _ in range(3)] == [True, True, False]
    last = scenes[-1]
    added = 0
    for _ in range(8):
        added += fill(last)
        joint(last).apply(say(scenes), BATCH)
    assert added <= 8


def test_a_queue_of_all_nodes_counts_groups(make: Make) -> None:
    """Batches wait for groups, and writers for places of groups: not for their trajectories."""
    scenes = make(
        2, GroupSpec("task", 2, max_trajectories=2), rate_limiter=RateLimiter.queue("group", 10)
    )
    assert fill(scenes[0], most=BATCH, size=2) == BATCH
    assert not meet(scenes), "half of a batch"
    assert say(scenes)[:, [NodeRate.SIZE, NodeRate.INSERTED]].tolist() == [[2, 2], [0, 0]]
    assert not meet(scenes)
    assert sum(fill(scene, size=2) for scene in scenes) == 2 * 10 - BATCH
    assert sum(fill(scene, size=2) for scene in scenes) == 0
    assert [meet(scenes) for _ in range(3)] == [True, True, False]


def test_a_trajectory_longer_than_a_part_gets_through_in_its_turn(make: Make) -> None:
    """Together there is room for one of 12 steps, which no third is."""
    scenes = make(3, rate_limiter=RateLimiter("step", 1, 1.0, -100.0, 14.0))
    assert [fill(scene, 12) for scene in scenes] == [0, 0, 0]
    assert all(scene.table.control[Control.WANTED] == 12 for scene in scenes)
    added = []
    for _ in range(3):
        said = say(scenes)
        for scene in scenes:
            joint(scene).apply(said, 1000)
        added.append(sum(fill(scene, 12) for scene in scenes))
    assert sum(added) == 1


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

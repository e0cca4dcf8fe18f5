"""Writers that die at any instruction of the native store: what they leave is whole.

Deaths at lines of Python: tests/crash/test_crash.py. At random times: tests/crash/test_programs.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, STEP, trajectory
from instruction_deaths import states_left
from store_support import StoreScene, check_whole, priority_rule, stream_spec

from deepspeed_gear import Column, Schema
from deepspeed_gear.data.statistics.running_moments import Moment
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.replay import table_access
from deepspeed_gear.store.eviction import NO_LATEST, Evictor
from deepspeed_gear.store.group_spec import GroupSpec, SlotGroup
from deepspeed_gear.store.native_store import trajectory_reader
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.inserter import Inserter
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

#: Columns that tables count moments of: 3 elements of each state, and 1 of each step.
COUNTED = ("observation", "reward")


def scene_of(lengths: list[int], removal: str, **options: Any) -> StoreScene:
    """Make a store of trajectories whose steps have priorities that say of which trajectory they
    are.
    """
    spec = stream_spec(unit="step", batch=6, priorities=priority_rule(normalize="table", alpha=1.0))
    if "group" in options:
        spec = stream_spec("fifo", "group", 1, most_trajectories=3)
    options = {"num_slots": 9, "num_rows": 28, **options}
    scene = StoreScene([spec], lengths, retention=Retention(removal), **options)
    if "group" in options:
        return scene
    stream = scene.streams[0]
    stream.state.ask(0)
    stream.get(0)
    stream.release(0)
    for number, first, steps in committed(scene.table):
        stream.masses.values[first : first + steps] = 1 + number + np.arange(steps) / 8
    stream.masses.recover()
    return scene


def committed(table: Any) -> list[list[int]]:
    """Return id, first row and number of steps of each stored trajectory."""
    records = table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED]
    found: list[list[int]] = records[:, [Slot.ID, Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist()
    return found


def free_retired(scene: StoreScene) -> None:
    with scene.table.lock:
        Evictor(scene.table, Context()).free_retired()


def check_state(scene: StoreScene, number: int, stays: set[int]) -> Any:
    """Check what the next process finds: all that `stays` is whole, with the priorities of its
    steps.
    """
    table, streams = scene.attach(2)
    stream = streams[0]
    check_whole(table, streams)
    found = committed(table)
    assert stays <= {number for number, *_ in found}
    for number, first, steps in found:
        rows = slice(first, first + steps)
        assert table.columns["code"][rows].tolist() == [number * STEP + i for i in range(steps)]
        assert stream.masses.values[rows].tolist() == [1 + number + i / 8 for i in range(steps)]
        slot = int(table.slots_of(np.array([number]))[0])
        assert (table.views["stream/train/row_slots"][rows] == slot).all()
    if number % 16 == 0:
        stream.state.ask(1)
        drawn = set(stream.get(1).records[:, 0].tolist())
        assert drawn <= {number for number, *_ in found}
        stream.release(1)
        Inserter(table, Context(timeout_s=5.0)).add(trajectory(50, 20))  # no row is lost
        check_whole(table, streams)
    table.close()
    return table


def reserve(table: Any, num_steps: int, latest: tuple[int, int] = NO_LATEST) -> Callable[[], Any]:
    """Return a call that reserves rows, by a process that has released the first selection."""
    table.views["stream/train/consumed"][table.memory.peer] = 1
    rows = table.rows_for(num_steps)
    wanted = (rows, num_steps, num_steps, latest, False, True, False, True)
    return partial(table.extents.handle.reserve_with_removal, *wanted)


@pytest.mark.parametrize(("to", "spare_rows"), [(0, 3), (4, 3), (4, 9)])
def test_a_move_is_finished(to: int, spare_rows: int) -> None:
    """An extent moves by its whole length, by less in pieces through spare rows, or by less at
    once.
    """
    scene = scene_of([5, 5, 5], "fifo", spare_rows=spare_rows)
    table_access.remove(scene.table, [0])
    free_retired(scene)
    num_moving = 0
    for number in states_left(scene, lambda table: partial(table.extents.handle.slide, 1, to)):
        is_moving = scene.table.control[Control.MOVING] != 0
        num_moving += is_moving
        check_state(scene, number, {1, 2})
        first = scene.table.slots[1, Slot.FIRST_ROW]
        assert first == to or (first == 6 and not is_moving)
    assert num_moving > 10
    scene.close()


@pytest.mark.parametrize(("removal", "spare_rows"), [("uniform", 8), ("uniform", 3), ("fifo", 3)])
def test_extents_move_and_others_are_evicted(removal: str, spare_rows: int) -> None:
    scene = scene_of([5, 3, 7, 3, 5], removal, spare_rows=spare_rows)
    table_access.remove(scene.table, [1, 3])  # 8 of 28 rows, at two places
    num_moving = 0
    for number in states_left(scene, lambda table: reserve(table, 7)):
        num_moving += scene.table.control[Control.MOVING] != 0
        check_state(scene, number, {0, 2, 4})
    assert num_moving > 10
    scene.close()


def test_a_short_extent_moves_out() -> None:
    """In a table of many, the latest trajectory of a writer leaves the rows that follow it."""
    scene = scene_of([1] * 130, "fifo", num_slots=140, num_rows=2 * 130 + 14, spare_rows=3)
    latest = int(scene.table.slots_of(np.array([129]))[0])
    places = set()

    def prepare(table: Any) -> Callable[[], Any]:
        table.extents.end(latest, truncated=False, returns=True)
        return reserve(table, 12, (latest, int(table.slots[latest, Slot.GENERATION])))

    for number in states_left(scene, prepare):
        check_state(scene, number, {*range(1, 130)})
        places.add(int(scene.table.slots[latest, Slot.FIRST_ROW]))
    assert places == {2 * 129, 0}
    scene.close()


def test_evicted_rows_have_no_priorities() -> None:
    scene = scene_of([5, 3, 7, 3], "lowest_priority")
    for number in states_left(scene, lambda table: reserve(table, 9)):
        check_state(scene, number, {2, 3})
    scene.close()


@pytest.mark.parametrize("call", ["commit", "grow", "end"])
def test_steps_are_published_or_not(call: str) -> None:
    """A slot that grows, of a dead process: it ends with what is published."""
    scene = scene_of([5], "fifo", normalized=COUNTED)

    def prepare(table: Any) -> Callable[[], Any]:
        extents = table.extents
        slot = int(extents.reserve(7, 3))
        table.write(slot, trajectory(1, 6), 0, 4)
        extents.open(slot, 2)
        if call == "commit":
            return partial(extents.commit, slot, 2, 7, 0, 0)
        extents.commit(slot, 2, 7, 0, 0)
        if call == "grow":
            return partial(extents.grow, slot, 4)
        return partial(extents.handle.end, slot, True, True)

    found = set()
    for _ in states_left(scene, prepare):
        found |= check_published(scene)
    assert found == {(0, 5), (1, 2)} | ({(1, 4)} if call == "grow" else set())
    scene.close()


#: Steps of the dead writer's trajectory that one call may leave.
LEFT = {
    "add": {6},
    "step that ends it": {4},
    "step that publishes its first": {4},
    "step that publishes more": {3, 4},
    "step that ends the published": {3, 4},
}


@pytest.mark.parametrize("call", LEFT)
def test_rows_are_written_before_they_are_published(call: str) -> None:
    """Calls that copy rows take the store's lock themselves, some after the copy."""
    scene = scene_of([5], "fifo", normalized=COUNTED, return_to_go=False)

    def prepare(table: Any) -> Callable[[], Any]:
        inserter = Inserter(table, Context(timeout_s=5.0), max_length=7)
        rows = trajectory(1, 6, truncated=True)
        if call == "add":
            return adding(table, inserter, rows)
        vector = TrajectoryWriter(table, inserter).vector_writer(1, "disabled")
        vector.reset(observation=rows["observation"][:1], task=rows["task"][None])
        for step in range(3):
            vector.step(**step_of(rows, step), publish=step == 2 and LEFT[call] == {3, 4})
        columns = step_of(rows, 3, ends="ends" in call)
        publishes = "published" in call or "publishes" in call
        take_step = vector._vector_step  # the closure keeps its writer alive
        return lambda: take_step(vector._steps_address, columns, None, None, publishes)

    found = set()
    for _ in states_left(scene, prepare, holds_lock=False):
        found |= check_published(scene)
    assert found == {(0, 5), *((1, steps) for steps in LEFT[call])}
    scene.close()


def adding(table: Any, inserter: Inserter, rows: dict[str, Any]) -> Callable[[], Any]:
    """Return the native call that adds a trajectory; it keeps what the call refers to."""
    reader = reader_of(table, inserter)
    return lambda: table.ops.native.store_add(reader.address, rows, 5.0)


def reader_of(table: Any, inserter: Inserter) -> Any:
    """Return the native reader of trajectories that an inserter has one of."""
    native = table.ops.native
    return trajectory_reader(native, table.spec, table.extents.handle, inserter.max_length)


def test_a_member_of_a_group_is_there_or_not() -> None:
    """Its words are those of a group that forms anew, also in a slot that was another group's."""
    scene = scene_of([5, 2], "fifo", num_slots=2, group=GroupSpec("task", 2), return_to_go=False)
    table_access.remove(scene.table, [0])
    free_retired(scene)
    assert scene.table.groups is not None
    scene.table.groups.words[0] = 7  # of a group that used the slot before

    def prepare(table: Any) -> Callable[[], Any]:
        inserter = Inserter(table, Context(timeout_s=5.0), max_length=7)
        return adding(table, inserter, trajectory(2, 6))

    found = set()
    for _ in states_left(scene, prepare, holds_lock=False):
        table, streams = scene.attach(2)
        with table.lock:
            table.extents.end_abandoned()
        check_whole(table, streams)
        stored = {number: steps for number, _, steps in committed(table)}
        assert stored in ({1: 2}, {1: 2, 2: 6})
        if 2 in stored:
            slot = int(table.slots_of(np.array([2]))[0])
            wanted = trajectory(2, 6)
            assert all(
                np.array_equal(rows, wanted[n])
                for n, rows in table.rows(slot).items()
                if n in wanted
            )
            words = table.groups.words[slot]
            assert not np.delete(words, SlotGroup.TIME).any()
            assert words[SlotGroup.TIME] > 7
        found.add(len(stored))
        table.close()
    assert found == {1, 2}
    scene.close()


@pytest.mark.parametrize("call", ["write", "commit"])
def test_the_group_of_a_lease_is_whole_or_absent(call: str) -> None:
    """A worker that dies while it writes or commits a group of two members and three trajectories:
    the next lease of its prompt has all rows to itself, and its group is the only one.
    """
    prompts = PromptSpec(
        "", "", 1000, groups=1, size=3, lease_s=600.0, attempts=9, max_lag=4, seed=0, random_key=0
    )
    options: dict[str, Any] = {"schema": Schema([*SCHEMA, Column("member", "int64", rows="1")])}
    options["group"] = GroupSpec("task", 2, member="member", max_trajectories=3)
    scene = scene_of([], "fifo", prompts=prompts, return_to_go=False, **options)
    rows = [
        {**trajectory(number, 4), "task": np.int64(0), "member": np.int64(number // 2)}
        for number in range(3)
    ]

    def prepare(table: Any) -> Callable[[], Any]:
        inserter = Inserter(table, Context(timeout_s=5.0))
        reader = reader_of(table, inserter)
        native = table.ops.native
        made = np.full((2, 3), -1, np.int64)
        if call == "write":
            with table.lock:
                (lease,) = table.ledger.lease(1)
            apart = np.zeros(1 + len(table.schema.names), np.int64)
            group = (rows, lease.number, made, apart)
            return lambda: native.group_write(reader.address, *group, 5.0)
        (lease,) = table.ledger.lease(1)
        for member, one in enumerate(rows):
            made[0, member] = table.extents.reserve(5, 4)
            table.write(int(made[0, member]), one)
        made[1] = 0
        table.ledger.committing(lease, made[0]).__enter__()
        return partial(native.group_commit, table.extents.handle.address, *made, 0, 0)

    num_partly = 0
    for _ in states_left(scene, prepare, holds_lock=call == "commit"):
        table, streams = scene.attach(2)
        num_partly += 0 < len(committed(table)) < 3
        with table.lock:
            table.extents.end_abandoned()
            table.groups.update()
            (again,) = table.ledger.lease(1)
            assert (again.number, committed(table)) == (0, [])
        check_whole(table, streams)
        ids = Inserter(table, Context(timeout_s=5.0)).add_group(again, [rows[:2], rows[2]])
        with table.lock:
            table.groups.update()
            assert table.ledger.account.report()["waiting"] == 1
        for number, one in zip(ids, rows, strict=True):
            stored = table.rows(int(table.slots_of(np.array([number]))[0]))
            assert all(np.array_equal(stored[name], one[name]) for name in one)
        check_whole(table, streams)
        table.close()
    assert num_partly > 0 or call == "write"
    scene.close()


def step_of(rows: dict[str, Any], step: int, ends: bool = False) -> dict[str, Any]:
    """Return the columns of a trajectory's step for `VectorWriter.step`, of one environment."""
    columns = {name: rows[name][step : step + 1] for name in ("action", "reward", "code")}
    state = rows["observation"][step + 1 : step + 2]
    flags = {"terminated": np.full(1, ends), "truncated": np.zeros(1, bool)}
    return {**columns, "observation": state, **flags}


def check_published(scene: StoreScene) -> set[tuple[int, int]]:
    """Check what the next process has of trajectory 1, whose writer is dead, and of the others.

    Returns:
        Id and number of steps of each stored trajectory.
    """
    table, streams = scene.attach(2)
    with table.lock:
        table.extents.end_abandoned()
        moments = table.extents.moments[Moment.COUNT].tolist()
    check_whole(table, streams)
    assert not table.views["retention"][:, SlotRetention.OPEN].any()
    assert not table.control[Control.PENDING]
    found = committed(table)
    for number, _, steps in found:
        wanted = trajectory(number, steps, truncated=number == 1)
        slot = int(table.slots_of(np.array([number]))[0])
        rows = table.rows(slot)
        rows["truncated"] = rows["truncated"] | rows["terminated"]
        for name in set(rows) - {"terminated"}:
            assert np.array_equal(rows[name], wanted[name]), name
    num_steps = sum(steps for *_, steps in found)
    assert moments == [num_steps + len(found)] * 3 + [num_steps]
    table.close()
    return {(number, steps) for number, _, steps in found}

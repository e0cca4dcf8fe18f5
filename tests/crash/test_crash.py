"""A process may die at any instruction: the others go on with a whole store and the batches that
come next.

Deaths are placed twice: by tracing a child and killing it before its k-th line, for every n-th k (n
is GEAR_TEST_STRIDE, 17 unless given); and at GEAR_TEST_DEATHS random times of processes that run
freely. GEAR_LONG_TESTS=1: four processes that report priorities for a minute, fifty of them killed.
"""

import contextlib
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import STEP, trajectory, wait_until
from process_support import exit_status, in_child, kill
from store_support import (
    StoreScene,
    check_whole,
    every_death,
    priority_rule,
    store_trajectory,
    stream_spec,
)

from deepspeed_gear.errors import StoreError, StoreFullError
from deepspeed_gear.ops.constants import tree_levels
from deepspeed_gear.ops.records import LogEntry, Slot, SlotState
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.priority_log import LogEnds
from deepspeed_gear.store.eviction import Evictor
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.inserter import Inserter

LENGTHS = [3, 1, 4, 2, 5]
LONG = bool(os.environ.get("GEAR_LONG_TESTS"))
STRIDE = int(os.environ.get("GEAR_TEST_STRIDE", "9" if LONG else "17"))
DEATHS = int(os.environ.get("GEAR_TEST_DEATHS", "50" if LONG else "10"))
FOREVER = 1 << 60
Item = tuple[int, int]


def sampled(stream: Any, number: int) -> list[list[int]]:
    """Return trajectory, step, mass and number of each sample of a selection, and release it."""
    stream.state.ask(number)
    found: list[list[int]] = stream.get(number).resolutions[:, [0, 5, 6, 7]].tolist()
    stream.release(number)
    return found


def stored(table: Any) -> set[int]:
    """Return the ids of the stored trajectories."""
    return set(table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist())


def evictor(table: Any) -> Evictor:
    return Evictor(table, Context(timeout_s=5.0))


def inserter(table: Any) -> Inserter:
    return Inserter(table, Context(timeout_s=5.0))


@pytest.mark.parametrize(("adds", "num_slots"), [(True, 7), (False, 5)])
def test_death_while_adding_or_removing(adds: bool, num_slots: int) -> None:
    def make() -> StoreScene:
        return StoreScene([stream_spec(batch=6)], LENGTHS, num_slots=num_slots)

    def act(table: Any, streams: Any) -> None:
        if adds:
            store_trajectory(table, streams, trajectory(5, 6), None)
        else:
            table_access.remove(table, [1, 3])

    for scene in every_death(make, act, STRIDE):
        check_whole(scene.table, scene.streams)
        ids = stored(scene.table)
        assert (
            ids in ({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5})
            if adds
            else {0, 2, 4} <= ids <= {0, 1, 2, 3, 4}
        )
        if 5 in ids:
            rows = scene.table.rows(int(scene.table.slots_of(np.array([5]))[0]))
            assert rows["code"].tolist() == [5 * STEP + step for step in range(6)]
        assert {found[0] for found in sampled(scene.streams[0], 0)} <= ids
        for _ in range(num_slots - len(ids)):  # no slot and no row is lost
            scene.add(2)
        check_whole(scene.table, scene.streams)


def changed(kind: str) -> StoreScene:
    """Return a store whose next selection applies removals and an addition, inside an epoch."""
    scene = StoreScene([stream_spec(kind, "step", 10)], LENGTHS)  # 15 steps
    sampled(scene.streams[0], 0)
    scene.add(3)
    table_access.remove(scene.table, [0, 4])
    return scene


@pytest.mark.parametrize("kind", ["random", "epoch"])
def test_death_while_cutting(kind: str) -> None:
    """Changes are queued, and an epoch ends inside: the next process makes exactly the same
    selections.
    """

    def act(table: Any, streams: Any) -> None:
        sampled(streams[0], 1)
        sampled(streams[0], 2)

    with changed(kind) as whole:
        wanted = [sampled(whole.streams[0], number) for number in (1, 2, 3)]
    for scene in every_death(lambda: changed(kind), act, STRIDE):
        assert [sampled(scene.streams[0], number) for number in (1, 2, 3)] == wanted
        check_whole(scene.table, scene.streams)


# ---- reports of priorities -----------------------------------------------------------------------


def scene_of(unit: str = "step", **options: Any) -> StoreScene:
    sizes = {
        name: options.pop(name)
        for name in ("num_slots", "num_rows", "num_peers")
        if name in options
    }
    rule = priority_rule(normalize="table", **options)
    return StoreScene([stream_spec(unit=unit, batch=10, priorities=rule)], LENGTHS, **sizes)


def handles(table: Any, items: list[Item]) -> np.ndarray:
    """Return slot, generation and anchor of items that are stored. [n, 3]."""
    slots = table.slots_of(np.array([number for number, _ in items]))
    found = np.stack([slots, table.slots[slots, Slot.GENERATION], [a for _, a in items]], axis=1)
    return found[slots >= 0]


def report(
    stream: Any, items: list[Item], priorities: list[float], order: Any = LogEntry.BY_ID
) -> None:
    stream.masses.reports.add_items(
        handles(stream.table, items), np.array(priorities, np.float32), order
    )


def contradicted(unit: str) -> StoreScene:
    """Return a store whose next selection applies reports of two processes, new and removed items,
    alpha.
    """
    scene = scene_of(unit, alpha=lambda number: 1 - number / 2)
    stream = scene.streams[0]
    table, (other,) = scene.attach(2)
    other.state.ask(0)
    sampled(stream, 0)
    report(stream, [(0, 0), (2, 1), (4, 3)], [9, 8, 7], [5, 1, 6])
    report(other, [(0, 0), (2, 1), (3, 1)], [2, 3, 4], [4, 7, 8])
    report(other, [(2, 0)], [6])
    table.close()
    scene.add(3)
    table_access.remove(scene.table, [1, 4])
    stream.state.ask(FOREVER)
    return scene


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_death_while_reports_are_applied(unit: str) -> None:
    """Who comes next makes the very same selections; in them the last report of each
    item has won.
    """

    def act(table: Any, streams: Any) -> None:
        sampled(streams[0], 1)

    def cuts(scene: StoreScene) -> list[Any]:
        found = [sampled(scene.streams[0], number) for number in (1, 2)]
        return [*found, scene.streams[0].masses.values.tolist()]

    with contradicted(unit) as whole:
        wanted = cuts(whole)
    for scene in every_death(lambda: contradicted(unit), act, STRIDE):
        check_whole(scene.table, scene.streams)
        scene.streams[0].state.ask(FOREVER)
        assert cuts(scene) == wanted
        check_whole(scene.table, scene.streams)


def test_death_while_reporting() -> None:
    """All of a report is accepted, or nothing."""

    def make() -> StoreScene:
        scene = scene_of(log_size=8)
        sampled(scene.streams[0], 0)
        report(scene.streams[0], [(0, 0)], [3])
        return scene

    def act(table: Any, streams: Any) -> None:
        streams[0].state.ask(0)
        for value in (5.0, 6.0):
            report(streams[0], [(2, 0), (2, 1), (2, 2)], [value] * 3)

    seen = set()
    for scene in every_death(make, act, STRIDE // 2):
        stream = scene.streams[0]
        sampled(stream, 1)
        first = scene.table.slots[2, Slot.FIRST_ROW]
        found = stream.masses.values[first : first + 3].tolist()
        assert found in ([1.0] * 3, [5.0] * 3, [6.0] * 3)
        assert stream.masses.values[scene.table.slots[0, Slot.FIRST_ROW]] == 3
        seen.add(found[0])
        check_whole(scene.table, scene.streams)
    assert seen == {1.0, 5.0, 6.0}


# ---- inside an op --------------------------------------------------------------------------------


PLAIN = ("slot_masses_", "tree_update_")
WITH_PRIORITIES = ("prioritize_", "slot_priorities_", "mass_")
WITH_PRIORITIES += ("tree_update_", "minima_update_")


@pytest.mark.parametrize(
    ("make", "op"),
    [*((changed, op) for op in PLAIN), *((contradicted, op) for op in WITH_PRIORITIES)],
    ids=[*(f"epoch {op}" for op in PLAIN), *(f"priorities {op}" for op in WITH_PRIORITIES)],
)
def test_death_inside_an_op(make: Callable[[str], StoreScene], op: str) -> None:
    """Sums, minima, masses and some of the priorities are changed when their writer dies."""
    kind = "epoch" if make is changed else "step"
    with make(kind) as whole:
        wanted = sampled(whole.streams[0], 1)
    scene = make(kind)

    def die() -> None:
        _, (other,) = scene.attach(1)
        masses = other.masses
        if op not in (
            "prioritize_",
            "slot_priorities_",
            "slot_masses_",
        ):  # slots that no single op handles
            masses._plain_unit = None
        real = getattr(masses.ops, op)

        def torn(*arguments: Any) -> None:
            if op == "prioritize_":
                first = [a[:1] if i == 5 else a for i, a in enumerate(arguments)]
                real(*first)
            if op == "slot_priorities_":
                begin, end = arguments[10:12]
                assert end - begin > 1
                real(*arguments[:11], (begin + end) // 2, *arguments[12:])
            masses.sums[tree_levels(masses.num_items)[1][0] :] = 12345
            masses.sums[4] = 0
            if other.state.priorities is not None:
                masses._minima[:] = 7
                masses.leaves[::3] = 99
                masses.counts[4] = -5
            os.kill(os.getpid(), signal.SIGKILL)

        object.__setattr__(masses.ops, op, torn)
        sampled(other, 1)

    assert exit_status(in_child(die)) == -signal.SIGKILL
    scene.streams[0].state.ask(FOREVER)
    assert sampled(scene.streams[0], 1) == wanted
    check_whole(scene.table, scene.streams)
    scene.close()


# ---- eviction and moves --------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_death_while_others_are_let_go(unit: str) -> None:
    def make() -> StoreScene:
        spec = stream_spec(unit=unit, batch=6, priorities=priority_rule(normalize="table"))
        retention = Retention("uniform")
        scene = StoreScene([spec], LENGTHS, num_slots=6, num_rows=24, retention=retention)
        scene.streams[0].state.ask(0)
        sampled(scene.streams[0], 0)
        return scene

    def act(table: Any, streams: Any) -> None:
        streams[0].release(0)  # else it waits for itself
        inserter(table).add(trajectory(5, 9))

    for scene in every_death(make, act, 60):
        check_whole(scene.table, scene.streams)
        stream = scene.streams[0]
        stream.state.ask(1)
        ids = stored(scene.table)
        assert {found[0] for found in sampled(stream, 1)} <= ids
        inserter(scene.table).add(trajectory(6, 20))  # no row is lost
        check_whole(scene.table, scene.streams)


# ---- at random times
# ---------------------------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "unit"),
    [("random", "step"), ("epoch", "step"), ("prioritized", "step"), ("prioritized", "trajectory")],
)
def test_random_deaths(kind: str, unit: str) -> None:
    """Processes draw, report, add and remove; one after the other is killed and replaced.

    Trajectory `peer` belongs to one process, which counts its first item's priority up. What was
    accepted before a kill stands in an anonymous map, and must be in the store after the next
    selections.
    """
    peers = 4 if LONG else 2
    has_priorities = kind == "prioritized"
    sizes = {"num_slots": 14, "num_rows": 120, "num_peers": peers + 1}
    if has_priorities:
        scene = scene_of(unit, alpha=lambda number: 0.4 + number // 50 % 2 * 0.2, **sizes)
    else:
        scene = StoreScene([stream_spec(kind, unit, 16)], LENGTHS, **sizes)
    stream = scene.streams[0]
    chance = random.Random(0)
    stream.state.ask(FOREVER)  # this process only looks on: no process waits for it
    stream.release(FOREVER)
    accepted = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def live(peer: int, seed: int) -> None:
        table, (mine,) = scene.attach(peer)
        random_ = random.Random(seed)
        number = 10
        count = int(accepted[peer]) + 2
        while True:
            latest = int(mine.position[0])
            mine.state.ask(latest)
            mine.release(latest - 1)  # it always wants the newest
            # Another process may have made newer ones meanwhile, or the table is empty for a
            # moment.
            with contextlib.suppress(StoreError):
                records = mine.get(latest).resolutions.numpy().copy()
                mine.release(latest)
                if has_priorities:
                    values = np.exp(np.random.default_rng(latest).normal(size=len(records))).astype(
                        np.float32
                    )
                    keep = records[:, 0] >= peers + 1
                    mine.masses.reports.add_items(
                        records[keep][:, [1, 2, 5]], values[keep], records[keep, 7]
                    )
            if has_priorities:
                report(mine, [(peer, 0)], [float(count)])
            accepted[peer] = count
            count += 1
            if random_.random() < (0.3 if has_priorities else 0.8):
                with contextlib.suppress(StoreFullError):
                    number = store_trajectory(
                        table, [mine], trajectory(number, random_.randint(1, 9)), None
                    )
                lowest = peers + 1 if has_priorities else 0
                table_access.remove(table, [random_.randint(max(lowest, number - 9), number + 1)])

    def value(peer: int) -> float:
        with scene.table.lock:
            slot = int(scene.table.slots_of(np.array([peer]))[0])
            item = scene.table.slots[slot, Slot.FIRST_ROW] if unit == "step" else slot
            return float(stream.masses.values[item])

    def start(peer: int, seed: int) -> int:
        return in_child(lambda: live(peer, seed))

    children = {peer: start(peer, peer) for peer in range(1, peers + 1)}
    begin = stream.position[0]
    for death in range(DEATHS):
        time.sleep(chance.uniform(0, 2.4 if LONG else 0.05))
        peer = 1 + death % peers
        kill(children[peer])
        before = int(stream.position[0])
        known = int(accepted[peer])
        check_whole(scene.table, scene.streams)
        wait_until(lambda before=before: stream.position[0] > before + 2, "sampling of the others")
        if has_priorities:
            assert value(peer) in ((known, known + 1) if known else (1, 2)), "a report is lost"
        children[peer] = start(peer, death + 9)
        wait_until(lambda peer=peer, known=known: accepted[peer] > known, "work of the new one")
    for child in children.values():
        kill(child)
    check_whole(scene.table, scene.streams)
    assert stream.position[0] > begin + DEATHS
    if has_priorities:
        found = sampled(
            stream, int(stream.position[0])
        )  # the lock is free, and all reports are applied
        assert all(ends[LogEnds.HEAD] == ends[LogEnds.TAIL] for ends in stream.masses.reports.ends)
        assert len(found) == 10
        for peer in range(1, peers + 1):
            assert value(peer) in (accepted[peer], accepted[peer] + 1)
        assert stream.masses.total == int(torch.from_numpy(stream.masses.leaves.copy()).sum())
    table_access.clear(scene.table, scene.streams)
    check_whole(scene.table, scene.streams)
    scene.add(80)
    number = int(stream.position[0])
    newest = int(scene.table.control[1]) - 1
    assert {found[0] for found in sampled(stream, number)} == {newest}
    scene.close()

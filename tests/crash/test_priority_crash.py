"""A process may die at any instruction of a report or a selection: no mass is lost or torn, none hangs.

As in test_crash.py, deaths are placed by tracing (every GEAR_TEST_STRIDE-th line) and at random times.
GEAR_LONG_TESTS=1: four processes for a minute, fifty of them killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import trajectory, wait_until
from process_support import exit_status, in_child, kill
from store_support import StoreScene, check_whole, every_death, priority_rule, stream_spec

from deepspeed_gear.errors import StoreError, StoreFullError
from deepspeed_gear.ops.constants import tree_levels
from deepspeed_gear.ops.records import LogEntry, Slot
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.priority_log import LogEnds

LONG = bool(os.environ.get("GEAR_LONG_TESTS"))
STRIDE = int(os.environ.get("GEAR_TEST_STRIDE", "9" if LONG else "19"))
LENGTHS = [3, 1, 4, 2, 5]
FOREVER = 1 << 60
Item = tuple[int, int]


def scene_of(unit: str = "step", **options: Any) -> StoreScene:
    sizes = {name: options.pop(name) for name in ("num_slots", "num_rows", "num_peers") if name in options}
    rule = priority_rule(normalize="table", **options)
    return StoreScene([stream_spec(unit=unit, batch=10, priorities=rule)], LENGTHS, **sizes)


def handles(table: Any, items: list[Item]) -> np.ndarray:
    """Return slot, generation and anchor of items that are stored. [n, 3]."""
    slots = table.slots_of(np.array([number for number, _ in items]))
    found = np.stack([slots, table.slots[slots, Slot.GENERATION], [a for _, a in items]], axis=1)
    return found[slots >= 0]


def report(stream: Any, items: list[Item], priorities: list[float], order: Any = LogEntry.BY_ID) -> None:
    stream.masses.reports.add_items(handles(stream.table, items), np.array(priorities, np.float32), order)


def sampled(stream: Any, key: int) -> list[list[int]]:
    stream.state.ask(key)
    found = stream.get(key).resolutions[:, [0, 5, 6, 7]].tolist()
    stream.release(key)
    return found


def contradicted(unit: str) -> StoreScene:
    """Return a store whose next selection applies reports of two processes, new and removed items, alpha."""
    scene = scene_of(unit, alpha=lambda key: 1 - key / 2)
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
    """Who comes next makes the very same selections; in them the last report of each item has won."""

    def act(table: Any, streams: Any) -> None:
        sampled(streams[0], 1)

    def cuts(scene: StoreScene) -> list[Any]:
        found = [sampled(scene.streams[0], key) for key in (1, 2)]
        return [*found, scene.streams[0].masses.values.tolist()]

    whole = contradicted(unit)
    wanted = cuts(whole)
    whole.close()
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
    for scene in every_death(make, act, max(1, STRIDE // 2)):
        stream = scene.streams[0]
        sampled(stream, 1)
        first = scene.table.slots[2, Slot.FIRST_ROW]
        found = stream.masses.values[first : first + 3].tolist()
        assert found in ([1.0] * 3, [5.0] * 3, [6.0] * 3)
        assert stream.masses.values[scene.table.slots[0, Slot.FIRST_ROW]] == 3
        seen.add(found[0])
        check_whole(scene.table, scene.streams)
    assert seen == {1.0, 5.0, 6.0}


@pytest.mark.parametrize("op", ["prioritize_", "slot_priorities_", "tree_update_", "minima_update_", "mass_"])
def test_death_inside_an_op(op: str) -> None:
    """Sums, minima, masses and some of the priorities are changed when their writer dies."""
    whole = contradicted("step")
    wanted = sampled(whole.streams[0], 1)
    whole.close()
    scene = contradicted("step")

    def die() -> None:
        _, (other,) = scene.attach(1)
        masses = other.masses
        if op not in ("prioritize_", "slot_priorities_"):  # those of slots that no single op handles
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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_random_deaths(unit: str) -> None:
    """Processes report, draw, add and remove; one after the other is killed and replaced.

    Trajectory `peer` belongs to one process, which counts its first item's priority up. What was accepted
    before a kill stands in an anonymous map, and must be in the store after the next selections.
    """
    peers, deaths, seconds = (4, 50, 60.0) if LONG else (2, 8, 0.4)
    sizes = {"num_slots": 14, "num_rows": 120, "num_peers": peers + 1}
    scene = scene_of(unit, alpha=lambda key: 0.4 + key // 50 % 2 * 0.2, **sizes)
    stream, chance = scene.streams[0], random.Random(0)
    stream.state.ask(FOREVER)  # this process only looks on: no process waits for it
    stream.release(FOREVER)
    accepted = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def live(peer: int, seed: int) -> None:
        table, (mine,) = scene.attach(peer)
        random_, number, count = random.Random(seed), 10, int(accepted[peer]) + 2
        while True:
            key = int(mine.position[0])
            mine.state.ask(key)
            mine.release(key - 1)  # it always wants the newest
            with contextlib.suppress(StoreError):  # another process may have made newer ones meanwhile
                records = mine.get(key).resolutions.numpy().copy()
                mine.release(key)
                values = np.exp(np.random.default_rng(key).normal(size=len(records))).astype(np.float32)
                keep = records[:, 0] >= peers + 1
                mine.masses.reports.add_items(records[keep][:, [1, 2, 5]], values[keep], records[keep, 7])
            report(mine, [(peer, 0)], [float(count)])
            accepted[peer] = count
            count += 1
            if random_.random() < 0.3:
                with contextlib.suppress(StoreFullError):
                    number = table_access.add(table, [mine], trajectory(number, random_.randint(1, 9)), None)
                table_access.remove(table, [random_.randint(max(peers + 1, number - 9), number + 1)])

    def value(peer: int) -> float:
        with scene.table.lock:
            slot = int(scene.table.slots_of(np.array([peer]))[0])
            item = scene.table.slots[slot, Slot.FIRST_ROW] if unit == "step" else slot
            return float(stream.masses.values[item])

    children = {
        peer: in_child(lambda peer=peer: live(peer, peer))  # type: ignore[misc]
        for peer in range(1, peers + 1)
    }
    begin = stream.position[0]
    for death in range(deaths):
        time.sleep(chance.uniform(0, 2 * seconds / deaths))
        peer = 1 + death % peers
        kill(children[peer])
        before, known = int(stream.position[0]), int(accepted[peer])
        check_whole(scene.table, scene.streams)
        wait_until(lambda before=before: stream.position[0] > before + 2, "sampling of the others", 30)
        assert value(peer) in ((known, known + 1) if known else (1, 2)), "a report is lost"
        children[peer] = in_child(
            lambda peer=peer, seed=death + 9: live(peer, seed)  # type: ignore[misc]
        )
        wait_until(lambda peer=peer, known=known: accepted[peer] > known, "reporting of the new one", 30)
    for child in children.values():
        kill(child)
    check_whole(scene.table, scene.streams)
    assert stream.position[0] > begin + deaths
    found = sampled(stream, int(stream.position[0]))  # the lock is free, and all reports are applied
    check_whole(scene.table, scene.streams)
    assert all(ends[LogEnds.HEAD] == ends[LogEnds.TAIL] for ends in np.asarray(stream.masses.reports.ends))
    assert len(found) == 10
    for peer in range(1, peers + 1):
        assert value(peer) in (accepted[peer], accepted[peer] + 1)
    total = torch.from_numpy(stream.masses.leaves.copy()).sum()
    assert stream.masses.total == int(total)
    scene.close()

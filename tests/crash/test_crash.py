"""A process may die at any instruction: the others go on with a whole store and the batches that come next.

Deaths are placed twice: by tracing a child and killing it before its k-th line, for every n-th k (n is
GEAR_TEST_STRIDE, 17 unless given); and at GEAR_TEST_DEATHS random times of processes that run freely.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from gear_support import STEP, trajectory, wait_until
from process_support import exit_status, in_child, kill
from store_support import StoreScene, check_whole, every_death, priority_rule, stream_spec

from deepspeed_gear.context import Context
from deepspeed_gear.errors import StoreError, StoreFullError
from deepspeed_gear.ops.constants import tree_levels
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.replay import table_access
from deepspeed_gear.store.compaction import slide
from deepspeed_gear.store.eviction import Evictor
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.writer.inserter import Inserter

LENGTHS = [3, 1, 4, 2, 5]
STRIDE = int(os.environ.get("GEAR_TEST_STRIDE", "17"))
DEATHS = int(os.environ.get("GEAR_TEST_DEATHS", "14"))


def sampled(stream: Any, key: int) -> list[list[int]]:
    """Return trajectory, step and number of each sample."""
    found: list[list[int]] = stream.get(key).resolutions[:, [0, 5, 7]].tolist()
    stream.release(key)
    return found


def stored(table: Any) -> set[int]:
    """Return the ids of the stored trajectories."""
    return set(table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist())


def evictor(table: Any) -> Evictor:
    return Evictor(table, SelectionPins(table), Context(timeout_s=5.0))


def inserter(table: Any) -> Inserter:
    return Inserter(table, SelectionPins(table), Context(timeout_s=5.0))


def test_death_while_adding() -> None:
    def make() -> StoreScene:
        return StoreScene([stream_spec(batch=6)], LENGTHS, num_slots=7)

    def act(table: Any, streams: Any) -> None:
        table_access.add(table, streams, trajectory(5, 6), None)

    for scene in every_death(make, act, STRIDE):
        check_whole(scene.table, scene.streams)
        ids = stored(scene.table)
        assert sorted(ids) in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
        if 5 in ids:
            rows = scene.table.rows(int(scene.table.slots_of(np.array([5]))[0]))
            assert rows["code"].tolist() == [5 * STEP + step for step in range(6)]
        assert {found[0] for found in sampled(scene.streams[0], 0)} <= ids
        for _ in range(7 - len(ids)):  # no slot and no row is lost
            scene.add(2)
        check_whole(scene.table, scene.streams)


def test_death_while_removing() -> None:
    def make() -> StoreScene:
        return StoreScene([stream_spec(batch=6)], LENGTHS, num_slots=5)

    def act(table: Any, streams: Any) -> None:
        table_access.remove(table, [1, 3])

    for scene in every_death(make, act, STRIDE):
        check_whole(scene.table, scene.streams)
        ids = stored(scene.table)
        assert {0, 2, 4} <= ids <= {0, 1, 2, 3, 4}
        assert {found[0] for found in sampled(scene.streams[0], 0)} <= ids
        for _ in range(5 - len(ids)):
            scene.add(2)


@pytest.mark.parametrize("kind", ["random", "epoch"])
def test_death_while_cutting(kind: str) -> None:
    """Changes are queued, and an epoch ends inside: the next process makes exactly the same selections."""

    def make() -> StoreScene:
        scene = StoreScene([stream_spec(kind, "step", 10)], LENGTHS)  # 15 steps
        sampled(scene.streams[0], 0)
        scene.add(3)
        table_access.remove(scene.table, [0, 4])
        return scene

    def act(table: Any, streams: Any) -> None:
        sampled(streams[0], 1)
        sampled(streams[0], 2)

    whole = make()
    wanted = [sampled(whole.streams[0], key) for key in (1, 2, 3)]
    whole.close()
    for scene in every_death(make, act, STRIDE):
        assert [sampled(scene.streams[0], key) for key in (1, 2, 3)] == wanted
        check_whole(scene.table, scene.streams)


@pytest.mark.parametrize("op", ["slot_masses_", "tree_update_"])
def test_death_inside_an_op(op: str) -> None:
    """The tree is half changed when its writer dies."""
    scene = StoreScene([stream_spec("epoch", "step", 10)], LENGTHS)
    stream = scene.streams[0]
    before = sampled(stream, 0)
    scene.add(3)
    table_access.remove(scene.table, [0, 4])

    def die() -> None:
        _, (other,) = scene.attach(1)

        def update(sums: Any, *_: Any) -> None:
            sums[4] = 0
            sums[tree_levels(other.masses.num_items)[1][0] :] = 12345
            os.kill(os.getpid(), signal.SIGKILL)

        object.__setattr__(other.state.ops, op, update)
        if op == "tree_update_":  # as where masses do not follow from lengths alone
            other.masses._plain_unit = None
        other.get(1)

    assert exit_status(in_child(die)) == -signal.SIGKILL
    after = sampled(stream, 1)
    check_whole(scene.table, scene.streams)
    drawn, rest = ([(n, s) for n, s, _ in samples] for samples in (before, after))
    stays = [(n, s) for n, steps in enumerate(LENGTHS) for s in range(steps) if n not in (0, 4)]
    left = [item for item in stays if item not in drawn]  # the epoch skips what was removed
    assert sorted(rest[: len(left)]) == left
    assert {n for n, _ in rest[len(left) :]} <= {1, 2, 3, 5}
    scene.close()


@pytest.mark.parametrize("kind", ["random", "epoch"])
def test_random_deaths(kind: str) -> None:
    """Two processes add, remove and sample; one after the other is killed at a random time and replaced."""
    scene = StoreScene([stream_spec(kind, "step", 16)], LENGTHS, num_slots=12, num_rows=100)
    stream, chance = scene.streams[0], random.Random(0)
    stream.release(1 << 60)  # this process only looks on: no process waits for it

    def live(peer: int, seed: int) -> None:
        table, streams = scene.attach(peer)
        mine, number = random.Random(seed), 0
        while True:
            with contextlib.suppress(StoreFullError):
                number = table_access.add(table, streams, trajectory(number, mine.randint(1, 9)), None)
            if mine.random() < 0.8:
                table_access.remove(table, [mine.randint(max(0, number - 12), number)])
            for _ in range(3):
                key = int(streams[0].position[0])
                streams[0].release(key - 1)  # it always wants the newest
                with contextlib.suppress(StoreError):  # the table may be empty for a moment
                    streams[0].get(key)
                    streams[0].release(key)

    children = {peer: in_child(lambda peer=peer: live(peer, peer)) for peer in (1, 2)}
    for death in range(DEATHS):
        time.sleep(chance.uniform(0.0, 0.03))
        peer = 1 + death % 2
        kill(children[peer])
        check_whole(scene.table, scene.streams)
        position = int(stream.position[0])
        children[peer] = in_child(lambda peer=peer, seed=death + 3: live(peer, seed))
        wait_until(lambda before=position: stream.position[0] > before, "sampling")
    for child in children.values():
        kill(child)
    check_whole(scene.table, scene.streams)
    assert stream.position[0] > DEATHS
    table_access.clear(scene.table, scene.streams)
    check_whole(scene.table, scene.streams)
    scene.add(80)
    assert {found[0] for found in sampled(stream, int(stream.position[0]))} == {
        int(scene.table.control[1]) - 1
    }
    scene.close()


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


@pytest.mark.parametrize(("removal", "spare_rows"), [("uniform", 8), ("uniform", 3), ("fifo", 3)])
def test_death_while_extents_move(removal: str, spare_rows: int) -> None:
    """Wherever it strikes, each trajectory is whole in one place, with the priorities of its steps.

    Extents have up to 8 rows: they move through the spare rows as a whole, or in pieces.
    """
    rule = priority_rule(normalize="table", alpha=1.0)

    def make() -> StoreScene:
        spec, retention = stream_spec(unit="step", batch=6, priorities=rule), Retention(removal)
        sizes = {"num_slots": 9, "num_rows": 28, "spare_rows": spare_rows}
        scene = StoreScene([spec], [5, 3, 7, 3, 5], retention=retention, **sizes)
        stream = scene.streams[0]
        stream.state.ask(0)
        sampled(stream, 0)
        for number, first, steps in scene.table.slots[:5, [Slot.ID, Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist():
            stream.masses.values[first : first + steps] = 1 + number + np.arange(steps) / 8
        stream.masses.recover()
        table_access.remove(scene.table, [1, 3])
        evictor(scene.table).free_retired()
        return scene

    def act(table: Any, streams: Any) -> None:
        streams[0].release(0)
        inserter(table).add(trajectory(5, 7))

    num_moving = 0
    for scene in every_death(make, act, 28):
        table, stream = scene.table, scene.streams[0]
        num_moving += table.control[Control.MOVING] != 0
        with table.lock:  # who locks it after a death repairs it
            stored = table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED]
        check_whole(table, scene.streams)
        assert {0, 2, 4} <= set(stored[:, Slot.ID].tolist()) <= {0, 2, 4, 5}
        stream.state.ask(1)
        assert {found[0] for found in sampled(stream, 1)} <= {0, 2, 4, 5}
        for number, first, steps in stored[:, [Slot.ID, Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist():
            rows = slice(first, first + steps)
            assert table.columns["code"][rows].tolist() == [number * STEP + step for step in range(steps)]
            if number != 5:
                assert stream.masses.values[rows].tolist() == [1 + number + step / 8 for step in range(steps)]
        inserter(table).add(trajectory(6, 20))
        check_whole(table, scene.streams)
    assert num_moving > 1, "no death came while an extent was moved"


@pytest.mark.parametrize("step", ["copy", "replace"])
@pytest.mark.parametrize("to", [0, 4])
def test_death_beside_the_point_of_a_move(step: str, to: int) -> None:
    """Before the last piece is copied, or after the place is published: the next owner of the lock finishes.

    No row that is free has a priority. The extent moves by its whole length, or by less and in pieces.
    """
    spec = stream_spec(unit="step", batch=6, priorities=priority_rule(normalize="table"))
    sizes = {"num_slots": 9, "num_rows": 30, "spare_rows": 3}
    scene = StoreScene([spec], [5, 5, 5], retention=Retention("fifo"), **sizes)
    scene.streams[0].state.ask(0)
    sampled(scene.streams[0], 0)
    scene.streams[0].release(0)
    with scene.table.lock:
        scene.table.extents.retire(0)
        evictor(scene.table).free_retired()

    def die() -> None:
        table, _ = scene.attach(1)
        readers = SelectionPins(table)
        plain = table.extents._copy

        def copy(source: int, first: int, count: int) -> None:
            if first + count == to + 6:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(source, first, count)

        if step == "copy":
            table.extents._copy = copy
        else:
            readers.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with table.lock:
            slide(table, readers, 1, to)

    assert exit_status(in_child(die)) == -signal.SIGKILL
    assert scene.table.slots[1, Slot.FIRST_ROW] == (6 if step == "copy" else to)
    with scene.table.lock:
        assert scene.table.slots[1, Slot.FIRST_ROW] == to
    assert scene.table.rows(1)["code"].tolist() == [STEP + step for step in range(5)]
    check_whole(scene.table, scene.streams)
    row_slots = scene.table.views["stream/train/row_slots"]
    first = int(scene.table.slots[1, Slot.FIRST_ROW])
    assert (row_slots[first : first + 6] == 1).all()
    scene.close()

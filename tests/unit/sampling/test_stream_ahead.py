"""Draws that are made before their selection: never seen, except that ranks wait less for each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from process_support import exit_status, in_child
from store_support import StoreScene, check_whole, stream_spec

from deepspeed_gear.errors import StoreError
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.records import NOTHING, Head, Position

LENGTHS = [1, 2, 7, 33, 5, 64, 12, 100]


@pytest.fixture
def pair() -> Iterator[tuple[StoreScene, BatchStream, BatchStream]]:
    """A store with two processes' view of one stream."""
    scene = StoreScene([stream_spec(unit="step", batch=16)], lengths=LENGTHS, num_peers=2)
    table, (other,) = scene.attach(1)
    yield scene, scene.streams[0], other
    table.close()
    scene.close()


def rows(stream: BatchStream, key: int) -> np.ndarray:
    """Take a selection and have done with it."""
    found = stream.get(key).resolutions.numpy().copy()
    stream.release(key)
    return found


def alone(steps: list[Any]) -> list[np.ndarray]:
    """Make the selections with one process that does each step (a function of the scene, or None) before."""
    scene = StoreScene([stream_spec(unit="step", batch=16)], lengths=LENGTHS, num_peers=1)
    found = []
    for key, step in enumerate(steps):
        if step is not None:
            step(scene)
        found.append(rows(scene.streams[0], key))
        assert scene.streams[0].position[Position.AHEAD] == NOTHING
    scene.close()
    return found


def test_peers_draw_ahead_in_turn(pair: Any) -> None:
    _, first, second = pair
    wanted = alone([None] * 12)
    for key in range(12):
        mine = key % 2 == 1  # the next selection is the first peer's to draw
        assert (rows(first, key) == wanted[key]).all()
        assert first.position[Position.AHEAD] == (key + 1 if mine else key if key else NOTHING)
        assert (rows(second, key) == wanted[key]).all()
        assert first.position[Position.AHEAD] == key + 1
        assert first.position[Head.KEY] == key + 1, "what is drawn ahead is no cut yet"


@pytest.mark.parametrize("what", ["add", "remove", "clear"])
def test_a_change_forgets_what_was_drawn(pair: Any, what: str) -> None:
    def change(scene: StoreScene) -> None:
        if what == "add":
            scene.add(500)
        elif what == "remove":
            table_access.remove(scene.table, [7])
        else:
            table_access.clear(scene.table, scene.streams)
            scene.add(3)

    scene, first, second = pair
    wanted = alone([None, None, change, None])
    for key in range(2):
        rows(first, key)
        rows(second, key)
    assert first.position[Position.AHEAD] == 2
    change(scene)
    assert first.masses.waiting
    assert (rows(second, 2) == wanted[2]).all()
    assert (rows(first, 2) == wanted[2]).all()
    assert (rows(second, 3) == wanted[3]).all()


def test_nothing_is_drawn_over_a_cut_that_a_peer_reads(pair: Any) -> None:
    _, first, second = pair
    for key in range(3):
        rows(first, key)
    late = second.get(0)
    kept = late.resolutions.numpy().copy()
    rows(first, 3)
    assert (second.get(3).resolutions.numpy() == rows(first, 3)).all()
    assert first.position[Position.AHEAD] != 4, "the ring has no room for cut 4"
    assert (late.resolutions.numpy() == kept).all()


def test_a_cut_that_is_drawn_over_is_gone(pair: Any) -> None:
    _, first, second = pair
    for key in range(4):
        rows(first, key)
        rows(second, key)
    assert first.position[Position.AHEAD] == 4
    with pytest.raises(StoreError, match="global batch 0 must be the next one or in the ring"):
        first.get(0)


def test_seek_forgets_what_was_drawn(pair: Any) -> None:
    scene, first, second = pair
    wanted = alone([None] * 3)
    for key in range(2):
        rows(first, key)
        rows(second, key)
    assert first.position[Position.AHEAD] == 2
    with scene.table.lock:
        first.state.seek(2, 0, 0, 0, 0)  # another position: the samples of the first selection come again
    assert (rows(first, 2)[:, :7] == wanted[0][:, :7]).all()


@pytest.mark.parametrize("kind", ["epoch", "pass"])
def test_orders_are_not_drawn_ahead(kind: str) -> None:
    scene = StoreScene([stream_spec(kind, unit="step", batch=16)], lengths=LENGTHS)
    table, (other,) = scene.attach(1)
    for key in range(3):
        assert (rows(scene.streams[0], key) == rows(other, key)).all()
    assert other.position[Position.AHEAD] == NOTHING
    table.close()
    scene.close()


def test_a_death_while_drawing_ahead_leaves_a_whole_stream() -> None:
    scene = StoreScene([stream_spec(unit="step", batch=16)], lengths=LENGTHS, num_peers=2)
    wanted = alone([None] * 4)
    stream = scene.streams[0]

    def die() -> None:
        _, (mine,) = scene.attach(1)

        def draw(*_: Any) -> None:
            mine.state.ring[1] = -7  # half of it is written
            os.kill(os.getpid(), signal.SIGKILL)

        mine.selector._coordinates_of = draw  # type: ignore[method-assign]
        mine.get(0)

    assert (rows(stream, 0) == wanted[0]).all()
    child = in_child(die)
    assert exit_status(child) == -signal.SIGKILL
    for key in range(1, 4):
        assert (rows(stream, key) == wanted[key]).all()
    check_whole(scene.table, scene.streams)
    scene.close()


def test_a_table_of_a_mixture_may_have_no_sample_in_the_next_batch() -> None:
    spec = replace(stream_spec("stratified", unit="step", batch=16), count=lambda key: 16 * (key % 2))
    scene = StoreScene([spec], lengths=LENGTHS, num_peers=2)
    table, (other,) = scene.attach(1)
    for key in range(6):
        assert (rows(scene.streams[0], key) == rows(other, key)).all()
        assert scene.streams[0].state.heads[key % 4, 6] == 16 * (key % 2)
    table.close()
    scene.close()

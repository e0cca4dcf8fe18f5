"""Streams: epochs, passes, the ring of selections, and selections that are begun again."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gear_support import wait_until
from process_support import exit_status, in_child, kill
from store_support import StoreScene, check_whole, stream_spec

from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import PASS_SHIFT, Selection
from deepspeed_gear.store.records import NOTHING, Head, Position

LENGTHS = [1, 2, 7, 33, 5, 64, 12, 100]
ITEMS = {(number, step) for number, steps in enumerate(LENGTHS) for step in range(steps)}


def rows(stream: BatchStream, number: int) -> np.ndarray:
    """Return the resolutions of a selection, and release it."""
    found = stream.get(number).resolutions.numpy().copy()
    stream.release(number)
    return found


def draws(stream: BatchStream, first: int, count: int) -> np.ndarray:
    """Take selections; return id, anchor and sample number of each sample. [n, 3]."""
    return np.concatenate(
        [rows(stream, number)[:, [0, 5, 7]] for number in range(first, first + count)]
    )


def items(cut: Selection) -> list[tuple[int, int]]:
    return [(int(r[0]), int(r[5])) for r in cut.resolutions.numpy()]


def test_changes_take_effect_at_the_next_selection(scenes: Any) -> None:
    """Also more of them than there are slots, so that the log of changes does not hold them."""
    scene = scenes(stream_spec(batch=500), lengths=[3, 4])
    assert set(draws(scene.streams[0], 0, 1)[:, 0]) == {0, 1}
    scene.add(5)
    table_access.remove(scene.table, [0])
    assert set(draws(scene.streams[0], 1, 1)[:, 0]) == {1, 2}
    for _ in range(100):
        table_access.remove(scene.table, [scene.add(2)])
    assert set(draws(scene.streams[0], 2, 1)[:, 0]) == {1, 2}
    check_whole(scene.table, scene.streams)


def test_an_epoch_skips_items_that_go(scenes: Any) -> None:
    """What it visits: tests/property/test_online_machine.py."""
    scene = scenes(stream_spec("epoch", "step", 4), lengths=[3, 6], num_slots=3)
    stream = scene.streams[0]
    visited = (draws(stream, 0, 1)[:, 0] == 0).sum()
    table_access.remove(scene.table, [0])
    assert [scene.add(1), scene.add(2)] == [2, 3]  # the slot of the removed one is used again
    draws(stream, 1, 4)
    assert stream.state.words[Head.SKIPPED] == 3 - visited
    check_whole(scene.table, scene.streams)


# ---- epochs --------------------------------------------------------------------------------------


def test_a_dropped_tail_may_be_of_skipped_items(scenes: Any) -> None:
    """Each batch is of one epoch, and no item is in two batches of it."""
    scene = scenes(stream_spec("epoch", batch=3, drop=True), lengths=[1] * 12, num_slots=12)
    seen: dict[int, list[int]] = {}
    for number in range(20):
        cut = scene.streams[0].get(number)
        assert len(set(cut.epochs[:3].tolist())) == 1
        seen.setdefault(int(cut.epochs[0]), []).extend(cut.resolutions[:, 0].tolist())
        scene.streams[0].release(number)
        oldest = min(scene.table.slots[scene.table.slots[:, 0] == 2, 2].tolist())
        table_access.remove(scene.table, [oldest] * (number % 2))
        assert scene.add(1) > 11 if number % 2 else True
    assert all(len(visited) == len(set(visited)) for visited in seen.values())
    assert len(seen) > 4
    check_whole(scene.table, scene.streams)


def test_items_before_the_end_of_an_epoch_are_kept_while_its_selection_is_made(
    scenes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that makes it may die in between, and another one completes it."""
    scene = scenes(stream_spec("epoch", batch=4), lengths=[1] * 6, num_slots=8)
    stream = scene.streams[0]
    table = scene.table
    rows(stream, 0)
    scene.add(1)
    with monkeypatch.context() as patch:
        patch.setattr(stream.masses, "apply", raised)
        with pytest.raises(KeyboardInterrupt):
            stream.get(1)
    done = stream.state.words[Position.DONE] - 1
    table_access.remove(table, range(6))
    for _ in range(3):
        scene.add(1)
    found = rows(stream, 1)
    assert done == 2
    assert (table.slots[found[:, Resolution.SLOT], Slot.ID] == found[:, Resolution.ID]).all()


def raised(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch", [1, 7, len(ITEMS) - 1, len(ITEMS), len(ITEMS) + 1, 3 * len(ITEMS)]
)
def test_a_pass_visits_in_stored_order(scenes: Any, batch: int) -> None:
    stream = scenes(stream_spec("pass", "step", batch), lengths=LENGTHS).streams[0]
    ordered = sorted(ITEMS)
    for number in range(2):
        found = []
        index = 0
        size = 1
        while index * batch < size:
            cut = stream.get(number << PASS_SHIFT | index)
            size = int(cut.head[4])
            found += zip(items(cut), cut.resolutions[:, 7].tolist(), strict=True)
            assert set(cut.epochs.tolist()) == {number}
            stream.release(number << PASS_SHIFT | index)
            index += 1
        assert size == len(ITEMS)
        assert [item for item, n in found if n < size] == ordered
        assert [n for _, n in found] == list(range(index * batch))
        fillers = [item for item, n in found if n >= size]
        assert fillers == (ordered * 3)[: len(fillers)]


def test_a_pass_may_be_left(scenes: Any) -> None:
    stream = scenes(stream_spec("pass", "step", 10), lengths=LENGTHS).streams[0]
    whole = rows(stream, 0)
    rows(stream, 1)
    for number in (1, 5):
        assert (rows(stream, number << PASS_SHIFT) == whole).all()
    with pytest.raises(StoreError, match="must be the next one or in the ring of selections"):
        stream.get(2)


# ---- the ring ------------------------------------------------------------------------------------


def test_batches_are_asked_for_in_order(scenes: Any) -> None:
    stream = scenes(stream_spec(depth=4), lengths=LENGTHS).streams[0]
    with pytest.raises(
        StoreError, match=r"global batch 1 must be the next one .* 'the stream is at 0'"
    ):
        stream.get(1)
    draws(stream, 0, 6)
    assert items(stream.get(2)) == items(stream.get(2))  # in the ring: 2, 3, 4, 5
    with pytest.raises(StoreError, match="global batch 1 must be the next one"):
        stream.get(1)


def test_a_late_peer_is_waited_for_and_named(scenes: Any) -> None:
    scene = scenes(stream_spec(depth=4), lengths=LENGTHS, timeout_s=0.3)
    table, _ = scene.attach(1)
    draws(scene.streams[0], 0, 4)
    text = (
        r"stream train: global batch 4 must find room in the ring of 4 selections in "
        r"gear.timeout_s = 0.3 s, got "
        rf"'local rank 1 \(process {os.getpid()}\) still needs an older one'"
    )
    with pytest.raises(PeerError, match=text):
        scene.streams[0].get(4)
    table.close()
    draws(scene.streams[0], 4, 1)  # who has left is not waited for


@pytest.mark.parametrize("how", ["it catches up", "it dies", "this stream stops"])
def test_a_wait_for_a_late_peer_ends(scenes: Any, how: str) -> None:
    scene = scenes(stream_spec(depth=4), lengths=LENGTHS)
    stream = scene.streams[0]
    late = list[np.ndarray]()

    def attach() -> None:
        scene.attach(1)
        signal.pause()

    if how == "it dies":
        child = in_child(attach)
        wait_until(lambda: scene.table.peers[1, 0] == child, "attaching")
        end: Callable[[], Any] = lambda: kill(child)  # noqa: E731
    else:
        table, (other,) = scene.attach(1)
        end = (
            stream.state.stop.set
            if how == "this stream stops"
            else lambda: late.append(rows(other, 0))
        )
    wanted = rows(stream, 0)
    draws(stream, 1, 3)
    timer = threading.Timer(0.1, end)
    timer.start()
    if how == "this stream stops":
        with pytest.raises(StoreError, match="it was closed while it waited"):
            stream.get(4)
    else:
        draws(stream, 4, 1)
    timer.join()
    assert how != "it catches up" or (late[0] == wanted).all()
    if how != "it dies":
        table.close()


# ---- draws made before their selection -----------------------------------------------------------


@pytest.fixture
def pair(scenes: Any) -> Iterator[tuple[StoreScene, BatchStream, BatchStream]]:
    """A store with two processes' view of one stream."""
    scene = scenes(stream_spec(unit="step", batch=16), lengths=LENGTHS, num_peers=2)
    table, (other,) = scene.attach(1)
    yield scene, scene.streams[0], other
    table.close()


@pytest.fixture
def alone(scenes: Any) -> Any:
    """Make selections with one process that changes the store before one of them."""

    def make(count: int, change: Any = None, at: int = 0) -> list[np.ndarray]:
        scene = scenes(stream_spec(unit="step", batch=16), lengths=LENGTHS, num_peers=1)
        found = []
        for number in range(count):
            if change is not None and number == at:
                change(scene)
            found.append(rows(scene.streams[0], number))
            assert scene.streams[0].position[Position.AHEAD] == NOTHING
        return found

    return make


def test_peers_draw_ahead_in_turn(pair: Any, alone: Any) -> None:
    _, first, second = pair
    wanted = alone(12)
    for number in range(12):
        mine = number % 2 == 1  # the next selection is the first peer's to draw
        assert (rows(first, number) == wanted[number]).all()
        assert first.position[Position.AHEAD] == (
            number + 1 if mine else number if number else NOTHING
        )
        assert (rows(second, number) == wanted[number]).all()
        assert first.position[Position.AHEAD] == number + 1
        assert first.position[Head.NUMBER] == number + 1, "what is drawn ahead is no cut yet"


@pytest.mark.parametrize("what", ["add", "remove", "clear", "seek"])
def test_a_change_forgets_what_was_drawn(pair: Any, alone: Any, what: str) -> None:
    def change(scene: StoreScene) -> None:
        if what == "add":
            scene.add(500)
        elif what == "remove":
            table_access.remove(scene.table, [7])
        elif what == "seek":  # the samples of the first selection come again
            with scene.table.lock:
                scene.streams[0].state.seek(2, 0, 0, 0, 0)
        else:
            table_access.clear(scene.table, scene.streams)
            scene.add(3)

    scene, first, second = pair
    wanted = alone(4, change, 2)
    assert what != "seek" or (wanted[2][:, :7] == wanted[0][:, :7]).all()
    for number in range(2):
        rows(first, number)
        rows(second, number)
    assert first.position[Position.AHEAD] == 2
    change(scene)
    assert what == "seek" or first.masses.waiting
    for stream, number in ((second, 2), (first, 2), (second, 3)):
        assert (rows(stream, number) == wanted[number]).all()


def test_nothing_is_drawn_over_a_cut_that_a_peer_reads(pair: Any) -> None:
    _, first, second = pair
    for number in range(3):
        rows(first, number)
    late = second.get(0)
    kept = late.resolutions.numpy().copy()
    rows(first, 3)
    assert (second.get(3).resolutions.numpy() == rows(first, 3)).all()
    assert first.position[Position.AHEAD] != 4, "the ring has no room for cut 4"
    assert (late.resolutions.numpy() == kept).all()


def test_a_death_while_drawing_ahead_leaves_a_whole_stream(scenes: Any, alone: Any) -> None:
    scene = scenes(stream_spec(unit="step", batch=16), lengths=LENGTHS, num_peers=2)
    wanted = alone(4)
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
    for number in range(1, 4):
        assert (rows(stream, number) == wanted[number]).all()
    check_whole(scene.table, scene.streams)


@pytest.mark.parametrize("kind", ["epoch", "pass", "mixture"])
def test_what_is_not_drawn_ahead(scenes: Any, kind: str) -> None:
    """Orders; and a table of a mixture, which may have no sample in the next batch."""
    spec = stream_spec("stratified" if kind == "mixture" else kind, unit="step", batch=16)
    if kind == "mixture":
        spec = replace(spec, count=lambda number: 16 * (number % 2))
    scene = scenes(spec, lengths=LENGTHS)
    table, (other,) = scene.attach(1)
    for number in range(6):
        assert (rows(scene.streams[0], number) == rows(other, number)).all()
        assert other.state.heads[number % 4, Head.COUNT] == spec.num_samples(number)
    assert other.position[Position.AHEAD] == NOTHING
    table.close()

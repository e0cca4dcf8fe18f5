"""Ring entries on a device, releases of what it reads: what waits for which event."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory

from deepspeed_gear import Replay
from deepspeed_gear.batching.gather import GatherOptions
from deepspeed_gear.batching.transfer.cuda_streams import (
    ALIGNMENT,
    DeferredRelease,
    Event,
    HostEvent,
    HostStream,
    Packing,
)
from deepspeed_gear.batching.transfer.device_gather import (
    DIRECT,
    PINNED,
    STAGED,
    DeviceGatherer,
    FieldTransfer,
)
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.replay import device_transfer

KEEP = 2
DEPTH = 5


class Recorded(HostStream):
    """A lane that remembers what it was told to wait for; its user gives work to a stream of a
    name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.user = "user"
        self.events: list[Event] = []  # of the user, in order
        self.waits: list[int | str] = []  # number of an event of the user, or a user

    def consumer(self) -> tuple[Any, Event]:
        self.events.append(HostStream().record())
        return self.user, self.events[-1]

    def wait(self, event: Event) -> None:
        self.waits.append(self.events.index(event))

    def wait_for(self, consumer: Any) -> None:
        self.waits.append(consumer)


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(config_of(fields={"code": {}}, batch_size=2), schemas={"main": SCHEMA}) as made:
        made.add(trajectory(3, 9))
        yield made


def gatherer_of(
    replay: Replay, lane: HostStream, way: str = DIRECT
) -> tuple[DeviceGatherer, torch.Tensor]:
    """Return a gatherer, and resolutions of two samples."""
    table = replay.tables["main"]
    first = int(table.slots[0, Slot.FIRST_ROW])
    records = torch.tensor([[0, 0, 0, first, 9, anchor, 1, 0] for anchor in (2, 5)])
    transfer = FieldTransfer(lane, table.ops, way, lambda name: True, True, KEEP)
    options = GatherOptions(replay.fields, {}, None, 2, torch.float32, 1)
    reach = {"code": table.gather_source("code")}
    return DeviceGatherer(transfer, reach, options, table, DEPTH), records


@pytest.fixture
def ring(replay: Replay) -> tuple[Recorded, DeviceGatherer, torch.Tensor]:
    lane = Recorded()
    return lane, *gatherer_of(replay, lane)


def gather(ring: Any, count: int, and_hand_over: bool = False) -> list[int | str]:
    """Gather batches, and take them; return what the lane was told to wait for meanwhile."""
    lane, gatherer, records = ring
    lane.waits.clear()
    for _ in range(count):
        gatherer.gather(records)
        if and_hand_over:
            gatherer.hand_over(gatherer.made)
    return list(lane.waits)


def test_an_entry_waits_for_who_used_it(ring: Any) -> None:
    """Batch j may be used until batch j + KEEP is taken: what its user was given by then is all."""
    for number in range(4 * DEPTH):
        waits = gather(ring, 1, and_hand_over=True)
        assert waits == ([number - DEPTH + KEEP] if number >= DEPTH else [])


def test_prepared_batches_that_are_dropped(ring: Any) -> None:
    """Their entries wait for nothing; an entry whose batch may still be used waits for its user's
    work.
    """
    _, gatherer, _ = ring
    gather(ring, 3, and_hand_over=True)  # of which the last two may be used
    assert gather(ring, 2) == []
    assert gather(ring, 3) == [2, "user", "user"]  # they take the entries of the first three
    gatherer.hand_over(gatherer.made)  # what was known of the old batches frees no new one
    assert gather(ring, DEPTH) == ["user"]


def test_an_entry_that_is_used_again_is_not_freed_for_its_older_batch(ring: Any) -> None:
    _, gatherer, _ = ring
    gather(ring, 3, and_hand_over=True)
    gather(ring, DEPTH - 1)  # dropped, but for the last, which has the entry of the second
    assert gatherer.made == 1
    gatherer.hand_over(1)
    assert gather(ring, DEPTH) == [
        "user",
        "user",
    ]  # for the third, and for the one handed over again


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 2}, {"prefetch": 1, "gradient_accumulation_steps": 3}]
)
def test_a_ring_is_deep_enough(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """No batch waits for more of its user's work than it must."""
    lane = Recorded()
    monkeypatch.setattr(device_transfer, "lane_of", lambda device: lane)
    section = config_of(fields={"code": {}}, batch_size=6, transfer={"way": DIRECT}, **options)
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        replay.add(trajectory(3, 9))
        for _ in range(30):
            replay.sample()
    assert len(lane.waits) > 20
    assert "user" not in lane.waits


def test_another_stream_is_waited_for_as_a_whole(ring: Any) -> None:
    lane, _, _ = ring
    for number in range(DEPTH):
        lane.user = "first" if number == 0 else "second"
        gather(ring, 1, and_hand_over=True)
    assert gather(ring, 1) == ["first"]


class Late(HostStream):
    def __init__(self) -> None:
        super().__init__()
        self.copies: list[HostEvent] = []

    def record(self) -> Event:
        self.copies.append(HostEvent())
        return self.copies[-1]


def test_pinned_memory_is_written_again_when_its_copy_is_done(replay: Replay) -> None:
    lane = Late()
    gatherer, records = gatherer_of(replay, lane, STAGED)
    for _ in range(PINNED):
        gatherer.gather(records)
    thread = threading.Thread(target=gatherer.gather, args=(records,), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    lane.copies[0].finish()
    thread.join()


def test_packed_tensors_are_aligned_and_apart() -> None:
    shapes = [
        ((3, 5), torch.float32),
        ((0, 4), torch.int64),
        ((7,), torch.bool),
        ((), torch.float64),
    ]
    packing = Packing(shapes)
    flat = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    views = packing.views(flat)
    assert [(tuple(view.shape), view.dtype) for view in views] == shapes
    assert all(
        (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0 for view in views if view.numel()
    )
    for view in views:
        view.fill_(1)
    assert int(flat.count_nonzero()) == 15 * 2 + 7 + 2  # 1.0 has two bytes that are not 0
    assert [view.sum().item() for view in views] == [15, 0, 7, 1]


def test_a_selection_is_released_by_its_event() -> None:
    guards = DeferredRelease()
    released = list[int]()
    events = [HostEvent() for _ in range(3)]
    for key, event in enumerate(events):
        guards.hold(event, released.append, key)
    guards.settle()
    assert released == []
    for finished, expected in (
        (1, []),
        (0, [0, 1]),
        (2, [0, 1, 2]),
    ):  # the first one of the lane comes first
        events[finished].finish()
        guards.settle()
        assert released == expected
        assert len(guards) == 3 - len(released)

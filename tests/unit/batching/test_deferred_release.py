"""Cuts that a device still reads are released by their events, in order, without a wait."""

from __future__ import annotations

import threading

from deepspeed_gear.batching.transfer.cuda_streams import HostEvent, HostStream
from deepspeed_gear.batching.transfer.deferred_release import DeferredRelease


def test_a_cut_is_released_by_its_event() -> None:
    guards, released = DeferredRelease(), list[int]()
    events = [HostEvent() for _ in range(3)]
    for key, event in enumerate(events):
        guards.hold(event, released.append, key)
    guards.settle()
    assert released == []
    events[1].finish()
    guards.settle()
    assert released == []  # the first one of the lane is not done
    events[0].finish()
    guards.settle()
    assert released == [0, 1]
    assert len(guards) == 1
    events[2].finish()
    guards.settle()
    assert released == [0, 1, 2]


def test_settle_does_not_wait() -> None:
    """For what never happens, so that it would not return."""
    guards = DeferredRelease()
    guards.hold(HostEvent(), lambda key: None, 0)
    guards.settle()
    assert len(guards) == 1


def test_drain_waits_for_every_event() -> None:
    guards, released, event = DeferredRelease(), list[int](), HostEvent()
    guards.hold(HostStream().record(), released.append, 4)
    guards.hold(event, released.append, 5)
    thread = threading.Thread(target=guards.drain)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert released == [4]
    event.finish()
    thread.join(20)
    assert released == [4, 5]
    assert len(guards) == 0

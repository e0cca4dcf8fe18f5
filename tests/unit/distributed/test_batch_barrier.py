"""The times at batch barriers: which rank the others wait for."""

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.distributed.batch_barrier import BarrierWord, BatchBarrier


def views_of(count: int) -> dict[str, np.ndarray]:
    """Return the memory of the barriers of a node's ranks."""
    regions = BatchBarrier.regions(count)
    return {region.name: np.zeros(region.shape, np.int64) for region in regions}


def barriers(
    count: int,
    reads: tuple[bool, ...] | None = None,
    views: dict[str, np.ndarray] | None = None,
) -> list[BatchBarrier]:
    """Return the barriers of ranks 3, 4, ... of one node, over the same words."""
    views = views or views_of(count)
    ranks = list(range(3, 3 + count))
    reads = reads or (True,) * count
    places = [SimpleNamespace(data_rank=rank, reads=True) for rank in range(3)]
    places += [SimpleNamespace(data_rank=rank, reads=reads[rank - 3]) for rank in ranks]
    found = []
    for peer, rank in enumerate(ranks):
        memory = SimpleNamespace(peer=peer, is_alive=lambda _: True)
        table: Any = SimpleNamespace(memory=memory, views=views, lock=contextlib.nullcontext())
        topology: Any = SimpleNamespace(rank=rank, peers=ranks, places=places)
        found.append(BatchBarrier(table, topology, only_readers=True, timeout_s=1.0))
    return found


def test_lateness_is_that_after_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = barriers(3)
    orders = (((one, 1.0), (two, 1.5), (three, 4.0)), ((three, 5.0), (one, 7.0), (two, 7.0)))
    for arrivals in orders:
        for barrier, now_s in arrivals:
            monkeypatch.setattr(time, "monotonic_ns", lambda now_s=now_s: int(now_s * 1e9))
            barrier.reach()
            barrier.reach()  # a second call is the same arrival
        for barrier in (one, two, three):
            barrier.wait()
    assert one.late_s() == {3: 2.0, 4: 0.5 + 2.0, 5: 3.0}
    one.restart()
    assert one.late_s() == two.late_s() == {3: 2.0, 4: 2.5, 5: 3.0}, "it is a sum over the run"


def test_a_rank_that_asks_late_is_late_where_all_arrive_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for it before their barrier, as a selection needs its priorities."""
    one, two = barriers(2)
    for barrier, now_s in ((one, 1.0), (two, 4.0)):
        monkeypatch.setattr(time, "monotonic_ns", lambda now_s=now_s: int(now_s * 1e9))
        barrier.note_request()
        barrier.note_request()
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(4.5e9))
    for barrier in (two, one):
        barrier.reach()
    assert one.late_s() == {3: 0.0, 4: 3.0}
    one.restart()
    two.restart()
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(9e9))
    two.note_request()
    two.reach()
    assert one.late_s() == {3: 0.0, 4: 3.0}, "requests before a load count no more"


def test_a_rank_that_reads_nothing_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    views = views_of(2)
    one, inner = barriers(2, (True, False), views)
    for barrier, now_s in ((one, 1.0), (inner, 9.0)):
        monkeypatch.setattr(time, "monotonic_ns", lambda now_s=now_s: int(now_s * 1e9))
        barrier.reach()
    assert one.late_s() == {3: 0.0}
    assert views["status/words"][1, BarrierWord.LATE_NS] == 0

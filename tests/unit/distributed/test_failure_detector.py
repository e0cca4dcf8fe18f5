"""Heartbeats and failures of nodes through a real rendezvous store: a node that ends is
not lost.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gear_support import wait_until
from torch.distributed import TCPStore

from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.errors import LostNodeError, PeerError

TIMEOUT_S = 2.0
Place = tuple[Any, dict[str, np.ndarray], Any]  # memory, views and topology of a node


@pytest.fixture
def server() -> list[TCPStore]:
    """The rendezvous store, which goes when it is taken from the list."""
    return [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]


def place(node: int) -> Place:
    """Return the place of one of two nodes of one rank each."""
    regions = FailureDetector.regions(1)
    views = {region.name: np.zeros(region.shape, region.dtype) for region in regions}
    memory = SimpleNamespace(peer=0, is_alive=lambda peer: True)
    topology = SimpleNamespace(
        node=node, rank=node, num_nodes=2, peers=[node], describe=lambda node: f"node {node}"
    )
    return memory, views, topology


@pytest.fixture
def places() -> list[Place]:
    return [place(0), place(1)]


def made_of(
    server: list[TCPStore],
    places: list[Place],
    timeout_s: float = TIMEOUT_S,
) -> list[FailureDetector]:
    """Return the detectors of two nodes."""
    at = server[0].port
    stores = [
        TCPStore("127.0.0.1", at, is_master=False, timeout=timedelta(seconds=60)) for _ in range(2)
    ]
    return [
        FailureDetector(*known, store, "test", timeout_s)
        for known, store in zip(places, stores, strict=True)
    ]


@pytest.fixture
def watches(server: list[TCPStore], places: list[Place]) -> Iterator[list[FailureDetector]]:
    """Two nodes of one rank each."""
    made = made_of(server, places)
    for watch in made:
        watch.start()
    yield made
    for watch in reversed(made):
        watch.end()


def loses(watch: FailureDetector, text: str, by: str = "check") -> None:
    """Wait until a rank or node is found to be lost, and check what its error says."""
    with pytest.raises(LostNodeError, match=text):
        wait_until(lambda: getattr(watch, by)(), "the failure")


def lost(node: int) -> LostNodeError:
    return LostNodeError(f"node {node}", "must answer", "Connection closed by peer")


def test_a_node_that_has_ended_is_not_lost(watches: list[FailureDetector]) -> None:
    watches[1].end()
    assert not watches[0].note(lost(1)), "it has told so by now, or does in a moment"
    watches[0].check()


def test_a_node_that_does_not_answer_is_lost_on_all(watches: list[FailureDetector]) -> None:
    assert watches[0].note(lost(1))
    for watch in watches:
        loses(watch, "node 1")


def test_a_broken_connection_names_a_silent_node_before_its_timeout(
    server: list[TCPStore], places: list[Place]
) -> None:
    """As where the rank is killed that sends the heartbeats of its node: no rank there can report
    it.
    """
    here, _ = made_of(server, places, timeout_s=600.0)  # the other one sends one heartbeat
    here.start()
    try:
        here.check()
        here.note_broken()
        loses(here, "node 1, whose last heartbeat is")
    finally:
        here.end()


def test_a_node_may_go_on_when_the_store_has_ended(
    watches: list[FailureDetector], server: list[TCPStore]
) -> None:
    watches[0].end()
    del server[:]
    time.sleep(1.5 * TIMEOUT_S)
    watches[1].check()


def test_a_node_that_has_lost_the_store_knows_it(
    watches: list[FailureDetector], server: list[TCPStore]
) -> None:
    del server[:]
    loses(watches[1], "node 0, whose rendezvous store node 1 cannot reach")


@pytest.mark.parametrize(("turns", "is_early"), [(9, True), (10, False), (11, False)])
def test_who_ends_early_is_missed(
    turns: int, is_early: bool, watches: list[FailureDetector]
) -> None:
    watches[0].take(10)
    watches[1].take(turns)
    watches[1].end()
    if is_early:
        loses(watches[0], r"rank 1 \(node 1\), which has ended after 9 of 10 batch barriers")
    else:
        watches[0].check_ended()


@pytest.mark.parametrize("by", ["check", "check_ended"])
def test_who_fails_is_named_though_it_ends_early(
    watches: list[FailureDetector],
    places: list[Place],
    by: str,
) -> None:
    """On its own node at once, before others can see that it has ended; on others after its end,
    too.
    """
    here = FailureDetector(*places[1], None, "test", TIMEOUT_S)
    watches[0].take(10)
    watches[1].take(9)
    watches[1].check_ended()
    watches[1].explain(ValueError("of this test\nand more"))
    text = r"rank 1 \(node 1\), which has failed with ValueError: of this test, must run"
    with pytest.raises(LostNodeError, match=text):
        here.check()
    watches[1].end()
    loses(watches[0], text, by)


@pytest.mark.parametrize("error", [PeerError("rank 0", "must live"), KeyboardInterrupt()])
def test_errors_that_all_have_are_nobodys(
    watches: list[FailureDetector], error: BaseException
) -> None:
    watches[1].explain(error)
    watches[1].end()
    assert not watches[0].note(lost(1))
    watches[0].check()

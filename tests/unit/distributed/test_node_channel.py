"""Messages of any size between nodes, over groups in memory that match them as gloo does."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.distributed import node_channel
from deepspeed_gear.distributed.node_channel import FIRST_WORDS, NodeChannel
from deepspeed_gear.errors import LostNodeError

SIZES = st.integers(0, 40) | st.sampled_from([FIRST_WORDS - 2, FIRST_WORDS - 1, FIRST_WORDS, 5000])


class Wire:
    """What has been sent from each rank to each, by tag, and how many receives were
    posted for it.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int], list[torch.Tensor]] = defaultdict(list)
        self.posted: dict[tuple[int, int, int], int] = defaultdict(int)
        self.ended: set[int] = set()


class Group:
    """A rank's end of a group: the i-th receive gets the i-th message, which fits into it."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.wire.sent[self.rank, to, tag].append(tensors[0].clone())
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        if source in self.wire.ended:
            raise RuntimeError("Connection closed by peer")
        key = source, self.rank, tag
        index, self.wire.posted[key] = self.wire.posted[key], self.wire.posted[key] + 1

        def wait(timeout: timedelta) -> None:
            assert timeout > timedelta(0)
            if index >= len(self.wire.sent[key]):
                raise RuntimeError("Timed out waiting")
            part = self.wire.sent[key][index]
            assert len(part) <= len(tensors[0]), "a message must fit into its room"
            tensors[0][: len(part)] = part

        return SimpleNamespace(wait=wait)


def opened(
    node: int, order: list[int], groups: Callable[[str], Any], detector: Any = None
) -> NodeChannel:
    """The channel of a node of one rank, over the groups of each purpose."""
    topology: Any = SimpleNamespace(
        node=node, ranks_of=lambda node: [node], describe=lambda node: f"node {node}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            node_channel, "purpose_group", lambda ranks, purpose, timeout_s: groups(purpose)
        )
        return NodeChannel(topology, order, "test", 1.0, detector=detector)


def links(
    count: int, detector: Any = None, ended: Sequence[int] = ()
) -> tuple[list[NodeChannel], dict[str, Wire]]:
    """Channels between nodes of one rank each, whose order is not that of the ranks. `ended`: ranks
    that have ended before.
    """

    def wire() -> Wire:
        found = Wire()
        found.ended.update(ended)
        return found

    wires: dict[str, Wire] = defaultdict(wire)
    order = list(range(count))[::-1]
    made = [
        opened(node, order, lambda way, at=node: Group(wires[way], at), detector)  # type: ignore[misc]
        for node in range(count)
    ]
    return made[::-1], wires


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 3), st.lists(st.lists(SIZES, min_size=9, max_size=9), min_size=1, max_size=5))
def test_messages_of_any_size_arrive(count: int, turns: list[list[int]]) -> None:
    made, wires = links(count)
    for turn, sizes in enumerate(turns):
        words = [
            [np.arange(sizes[3 * i + j]) + 7 * turn + i for j in range(count)] for i in range(count)
        ]
        waits = [
            link.begin([np.concatenate([[0], part]) for part in of_link])
            for link, of_link in zip(made, words, strict=True)
        ]
        for j, wait in enumerate(waits):
            for i, part in enumerate(wait()):
                assert part.tolist() == words[i][j].tolist()
    assert [link.num_rounds for link in made] == [len(turns)] * count
    assert sum(link.bytes_sent for link in made) == sum(link.bytes_received for link in made)
    for way, wire in wires.items():
        backwards = {(a, b) for a, b, _ in wire.sent if (a < b) == way.endswith("up")}
        assert not backwards, "each way has a group of its own"


def test_the_last_message_of_a_node_that_has_ended_is_heard() -> None:
    made, wires = links(2)
    waits = [link.begin([np.array([0, 5 + index])] * 2) for index, link in enumerate(made)]
    for wire in wires.values():
        wire.ended.update({0, 1})
    assert [[part.tolist() for part in wait()] for wait in waits] == [[[5], [6]]] * 2
    for _ in range(2):  # it stays broken
        text = "must stay connected, got 'Connection closed by peer'"
        with pytest.raises(LostNodeError, match=text):
            made[0].all_gather(np.array([1]))


def test_a_node_that_has_ended_is_called_so() -> None:
    made, _ = links(2, SimpleNamespace(note=lambda error: False, check=lambda: None))
    with pytest.raises(LostNodeError, match="must take as many batches as this rank; it has ended"):
        made[0].all_gather(np.array([1]))


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (True, "must stay connected, got 'Connection closed by peer'"),
        (False, "must answer within 1 s, got 'Timed out waiting'"),
    ],
)
def test_an_error_says_what_has_happened(ends: bool, text: str) -> None:
    """A connection that broke after a moment has not been silent for the timeout."""
    made, _ = links(2, ended=[0, 1] if ends else [])
    with pytest.raises(LostNodeError, match=text):
        made[0].all_gather(np.array([1]))


def test_a_link_that_parts_tells_nobody_of_a_loss() -> None:
    told: Any = lambda *error: pytest.fail("told")  # noqa: E731
    made, _ = links(2, SimpleNamespace(note=told, check=told))
    wait = made[0].begin_all_gather(np.array([1]))
    made[0].part()
    with pytest.raises(LostNodeError, match="Timed out"):
        wait()


def test_links_over_one_group_do_not_hear_each_other() -> None:
    wires: dict[str, Wire] = defaultdict(Wire)
    groups = {
        (way, at): Group(wires[way], at) for way in ("test, up", "test, down") for at in range(2)
    }
    made = {
        (number, node): opened(node, [0, 1], lambda way, at=node: groups[way, at])  # type: ignore[misc]
        for number in range(2)
        for node in range(2)
    }
    waits = {
        key: made[key].begin([np.array([0, key[0]])] * 2)
        for key in ((1, 0), (0, 0), (0, 1), (1, 1))
    }
    assert all(part.tolist() == [key[0]] for key, wait in waits.items() for part in wait())

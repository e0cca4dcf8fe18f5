"""One selector: two nodes, here threads, select what one store with the rows of both does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from store_support import StoreScene, stream_spec
from thread_ranks import ThreadPlane, on_ranks

from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.row_exchange.resolution_exchange import ResolutionSender
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mass_rules import PriorityRule
from deepspeed_gear.sampling.selection_rounds import SelectionRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.table_spec import Shard

LENGTHS = ([3, 1, 4, 1, 5], [9, 2, 6])
BATCHES = 6
COMPARED = [Resolution.NUM_STEPS, Resolution.ANCHOR, Resolution.MASS, Resolution.SAMPLE_NUMBER]


class ThreadChannel(NodeChannel):
    """The node channel of a node that is a thread."""

    def __init__(self, plane: ThreadPlane) -> None:
        self.plane = plane
        self.count = plane.world_size
        self.index = plane.rank
        self.last_wait_s = 0.0
        self.left = False
        self._broken = None
        self._detector = None

    def name(self, index: int) -> str:
        return f"node {index}"

    def begin(self, messages: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
        of_nodes = self.plane.all_gather([words.copy() for words in messages])
        return lambda: [sent[self.index][1:] for sent in of_nodes]


def priorities(normalize: Any) -> PriorityRule:
    return PriorityRule(lambda _: 0.6, lambda _: 0.4, None, normalize, 0, 1 << 10, 40)


def drawn(records: torch.Tensor, slots: np.ndarray, head: list[int]) -> list[Any]:
    """Return what must be equal of a selection: its items, and the words of its weights."""
    rows = records[:, COMPARED].tolist()
    return [slots.tolist(), rows, head[Head.COUNT], head[Head.NUMERATOR : Head.EXPONENT + 1]]


def report(stream: BatchStream, records: torch.Tensor, key: int) -> None:
    """Report a priority of each sample, which follows from its number."""
    numbers = records[:, Resolution.SAMPLE_NUMBER]
    stream.state.reports.add(records, (numbers % 7 + 1).float())  # type: ignore[union-attr]


SPECS = {
    "trajectories": {},
    "steps": {"unit": "step"},
    "epochs": {"kind": "epoch", "unit": "step"},
    "whole epochs": {"kind": "epoch", "drop": True, "batch": 3},
    "of the batch": {"priorities": priorities("batch")},
    "of the table": {"priorities": priorities("table"), "unit": "step"},
    "of all": {"priorities": priorities(None)},
}


@pytest.mark.parametrize("case", SPECS)
def test_two_nodes_select_as_one_store(scenes: Any, case: str) -> None:
    spec = stream_spec(**SPECS[case])  # type: ignore[arg-type]
    whole = scenes(spec, lengths=[*LENGTHS[0], *LENGTHS[1]])
    stream = whole.streams[0]
    wanted = []
    for key in range(BATCHES):
        stream.request(key)
        selection = stream.get(key)
        slots = selection.resolutions[:, Resolution.SLOT].numpy()
        wanted.append(drawn(selection.resolutions, slots, selection.head))
        if spec.priorities is not None:
            report(stream, selection.resolutions.clone(), key)
        stream.release(key)
    over_nodes = replace(spec, num_shards=2, together=True)
    stores = [
        scenes(over_nodes, lengths=lengths, shard=Shard(index, 2))
        for index, lengths in enumerate(LENGTHS)
    ]

    def select(plane: ThreadPlane) -> list[Any]:
        state = stores[plane.rank].streams[0].state
        channel = ThreadChannel(plane)
        exchange = ResolutionSender(state, channel)
        mine = BatchStream(state, Selector(state, SelectionRounds(state, channel), exchange))
        found = []
        for key in range(BATCHES):
            mine.request(key)
            selection = mine.get(key)
            assert selection.origins is not None
            origins = selection.origins[: len(selection.resolutions)]
            shards = (origins >> SHARD_BITS).numpy()
            slots = (origins & ((1 << SHARD_BITS) - 1)).numpy() + shards * len(LENGTHS[0])
            found.append(drawn(selection.resolutions, slots, selection.head))
            # Each node reports what its ranks train on: here every second sample.
            if spec.priorities is not None:
                records = selection.resolutions.clone()
                records[:, Resolution.SLOT] = origins
                report(mine, records[plane.rank :: 2].contiguous(), key)
            mine.release(key)
        return found

    for found in on_ranks(2, select):
        assert found == wanted


def test_a_node_that_fails_ends_the_selection_of_all(scenes: Any) -> None:
    spec = replace(stream_spec(), num_shards=2, together=True)
    stores: list[StoreScene] = [
        scenes(spec, lengths=lengths, shard=Shard(index, 2))
        for index, lengths in enumerate(LENGTHS)
    ]

    def select(plane: ThreadPlane) -> bool:
        state = stores[plane.rank].streams[0].state
        channel = ThreadChannel(plane)
        if plane.rank == 1:

            def fail(key: int) -> None:
                raise StoreError("the tree", "must be whole", key)

            state.masses.apply = fail  # type: ignore[method-assign]
        return Selector(
            state, SelectionRounds(state, channel), ResolutionSender(state, channel)
        ).select(0, 0)

    other, own = on_ranks(2, select)
    assert type(own) is StoreError
    assert type(other) is PeerError
    assert str(own) in str(other)
    assert all(store.streams[0].position[Head.NUMBER] == 0 for store in stores)

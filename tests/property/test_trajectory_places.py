"""Rows of packs over nodes: every node gets what it gathers, once, and all nodes compute the same places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.distributed.row_exchange.exchange_plan import WHOLE
from deepspeed_gear.distributed.row_exchange.row_messages import RowExchange, RowReads, WindowRead
from deepspeed_gear.distributed.row_exchange.trajectory_places import Moves, TrajectoryPlaces
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, Slot

SLOTS, EDGE = 6, 2
READS = RowReads((WindowRead("steps", 0, WHOLE), WindowRead("final", 0, WHOLE, final_row=1)), ("single",))


class Node:
    """A node's store, with codes as rows, and its row exchange; `mapped`: its rows go to the arrivals."""

    def __init__(
        self, index: int, nodes: int, steps: np.ndarray, room: tuple[int, int], mapped: bool
    ) -> None:
        slots = np.zeros((SLOTS, Slot.NUM_WORDS), np.int64)
        slots[:, Slot.NUM_STEPS], slots[:, Slot.FIRST_ROW] = steps, np.cumsum(steps + 1) - steps - 1
        rows = int((steps + 1).sum())
        held = {name: np.full(rows, -1) for name in ("steps", "final")}
        for slot, (first, count) in enumerate(slots[:, [Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist()):
            codes = code(index, slot) + np.arange(count + 1)
            held["steps"][first : first + count], held["final"][first : first + count + 1] = codes[:-1], codes
        held["single"] = code(index, np.arange(SLOTS))
        sizes = {"steps": room[0] + 2 * EDGE, "final": room[0] + 2 * EDGE, "single": room[1]}
        whole = {name: np.concatenate([held[name], np.full(sizes[name], -2)]) for name in held}
        self.arrivals = {name: whole[name][len(held[name]) :] for name in held}
        table: Any = SimpleNamespace(
            ops=load_backend().on_host(),
            columns=held,
            arrivals=self.arrivals,
            slots=slots,
            gathers_own_rows=not mapped,
            first_arrival=(0, 0) if mapped else (rows, SLOTS),
            spec=SimpleNamespace(name="main"),
        )
        channel: Any = SimpleNamespace(count=nodes)
        self.rows = RowExchange(channel, table, [READS], None, (EDGE, room[0]), (0, room[1]))


def code(node: int, slot: Any) -> Any:
    return 10_000 * (node + 1) + 100 * slot


def exchange(nodes: list[Node], moves: list[Moves]) -> None:
    """Send and receive, as `TrajectoryExchange` does on each node."""
    count, sent = len(nodes), []
    for node, its in zip(nodes, moves, strict=True):
        encoded = node.rows.encode(torch.from_numpy(its.outgoing), [1] * count)
        sent.append([words[1:].copy() for words in encoded])
    for index, (node, its) in enumerate(zip(nodes, moves, strict=True)):
        num_incoming = len(its.incoming)
        places = torch.empty(num_incoming, Resolution.NUM_WORDS, dtype=torch.int64)
        received = [words[index] for words in sent]
        incoming, which = torch.from_numpy(its.incoming), torch.arange(num_incoming)
        node.rows.fill(0, places, which, incoming, received, [0] * count, its.used)


@given(st.integers(1, 4), st.integers(0, 25), st.booleans(), st.integers(0, 1 << 31))
def test_every_node_has_what_it_gathers(count: int, size: int, mapped: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = random.integers(1, 9, (count, SLOTS))
    owner, slot = random.integers(0, count, size), random.integers(0, SLOTS, size)
    lengths = random.integers(1, steps[owner, slot] + 1)  # samples of one trajectory while it grows
    distinct = len(set(zip(owner.tolist(), slot.tolist(), strict=True)))
    room = int((steps + 1).sum()), distinct
    nodes = [Node(index, count, steps[index], room, mapped) for index in range(count)]
    places = [
        TrajectoryPlaces(owner << SHARD_BITS | slot, lengths, 1, count, index, mapped)
        for index in range(count)
    ]
    known: list[dict[int, tuple[int, int]]] = [{} for _ in nodes]  # place of each sample that has come
    got: list[set[tuple[int, int]]] = [set() for _ in nodes]
    for _ in range(3):
        needed = random.random((count, size)) < 0.4
        moves = [of_node.move(needed) for of_node in places]
        pairs = list(zip(owner.tolist(), slot.tolist(), strict=True))
        lacking = [
            {pairs[n] for n in np.nonzero(needed[index])[0] if mapped or owner[n] != index} - got[index]
            for index in range(count)
        ]
        if not any(lacking):
            assert moves == [None] * count
            continue
        made = [one for one in moves if one is not None]
        assert len(made) == count
        for of_node, its in zip(places, made, strict=True):
            again = of_node.move(needed)  # nothing has moved yet
            assert again is not None
            np.testing.assert_array_equal(again.incoming, its.incoming)
            assert (again.used, again.end) == (its.used, its.end)
            of_node.moved(its)
        exchange(nodes, made)
        for index, its in enumerate(made):
            assert len(its.incoming) == len(lacking[index])  # each once, and no other
            got[index] |= lacking[index]
            where = zip(its.samples, its.first_row, its.slot, strict=True)
            known[index].update({int(n): (int(row), int(at)) for n, row, at in where})
        for index, node in enumerate(nodes):
            for n in np.nonzero(needed[index])[0].tolist():
                if owner[n] == index and not mapped:
                    continue
                row, at = known[index][n]
                wanted = code(int(owner[n]), int(slot[n])) + np.arange(lengths[n] + 1)
                row += EDGE
                assert (node.arrivals["steps"][row : row + lengths[n]] == wanted[:-1]).all()
                assert (node.arrivals["final"][row : row + lengths[n] + 1] == wanted).all()
                assert node.arrivals["single"][at] == wanted[0]

"""Which rows travel, and where they arrive: of windows, against an oracle that walks row by row; of
packs.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_kit import CPU

from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.row_exchange.exchange_plan import WHOLE
from deepspeed_gear.row_exchange.row_messages import (
    RowExchange,
    RowLayout,
    RowReads,
    WindowRead,
    layout_of,
    most_rows,
)
from deepspeed_gear.row_exchange.trajectory_places import Moves, TrajectoryPlaces

FINAL_ROW = {"a": 0, "b": 1, "c": 0}
ROW_BYTES = {"a": 4, "b": 12, "c": 1, "t": 8, "u": 3}
MOST_N = 4
ROOM = 60  # rows and slots of each node's columns
HEAD = 16  # bytes in front of the rows of a message
HEADS = torch.full((4,), HEAD)
FIRST = 3, 2  # row and slot of what arrives
FIRST_OF_ALL = 1000, 100


class Sample(NamedTuple):
    """A sample whose rows lie on one node and are read on another."""

    holder: int
    reader: int
    need: int
    slot: int
    num_steps: int
    anchor: int
    n_steps: int
    goal: int


class Scene(NamedTuple):
    """Samples of a selection between nodes, and what is read of them."""

    num_nodes: int
    needs: list[RowReads]
    samples: list[Sample]


@st.composite
def reads(draw: st.DrawFn) -> WindowRead:
    column = draw(st.sampled_from(sorted(FINAL_ROW)))
    first = draw(st.integers(-7, 7))
    end = first + draw(st.integers(1, 6))
    return WindowRead(
        column, first, end, draw(st.booleans()), draw(st.booleans()), FINAL_ROW[column]
    )


def goal_of(column: str) -> WindowRead:
    return WindowRead(column, 0, 1, final_row=FINAL_ROW[column], is_goal=True)


needs_of_one = st.builds(
    lambda windows, single, goals: RowReads((*windows, *map(goal_of, goals)), tuple(single)),
    st.lists(reads(), max_size=4, unique=True),
    st.lists(st.sampled_from("tu"), max_size=2, unique=True),
    st.lists(st.sampled_from("ab"), max_size=2, unique=True),
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    num_nodes = draw(st.integers(1, 4))
    needs = draw(st.lists(needs_of_one, max_size=3))
    lengths = draw(
        st.lists(st.integers(1, 9), min_size=1, max_size=3)
    )  # of each node's trajectories
    samples = []
    for _ in range(draw(st.integers(0, 12)) if needs else 0):
        slot = draw(st.integers(0, len(lengths) - 1))
        steps = lengths[slot]
        ends = draw(st.tuples(*[st.integers(0, num_nodes - 1)] * 2))
        need = draw(st.integers(0, len(needs) - 1))
        anchor = draw(st.integers(0, steps - 1))
        goal = draw(st.integers(-1, steps - 1))
        samples.append(
            Sample(
                *ends, need, slot * 5, steps, anchor, draw(st.integers(0, min(MOST_N, steps))), goal
            )
        )
    return Scene(num_nodes, needs, samples)


def rows_of(read: WindowRead, sample: Sample) -> list[int]:
    """Return the rows that a window reads."""
    held = sample.num_steps + read.final_row
    first = sample.anchor + read.first + (sample.n_steps if read.follows else 0)
    real = [row for row in range(first, first + read.end - read.first) if 0 <= row < held]
    return real or ([0 if first < 0 else held - 1] if read.edge else [])


def wanted_by(sample: Sample, needs: Sequence[RowReads]) -> Iterator[tuple[str, int]]:
    """Return column and row of everything that a sample needs of its trajectory's steps."""
    for read in needs[sample.need].reads:
        goal = [] if sample.goal < 0 else [sample.goal]
        yield from ((read.column, row) for row in (goal if read.is_goal else rows_of(read, sample)))


def words_of(samples: Sequence[Sample], peer: str) -> torch.Tensor:
    words = [[getattr(s, peer), s.need, *s[3:]] for s in samples]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 7)


class Taken(NamedTuple):
    """Where rows have arrived."""

    arrivals: list[torch.Tensor]  # bytes of each column
    lies: list[
        list[int]
    ]  # of each sample what, added to a step's number, gives its row, and its slot
    num_rows: int  # that need room
    num_trajectories: int
    sizes: list[int]  # bytes of rows in each message


def taken(
    layout: RowLayout, samples: list[Sample], peer: str, received: list[torch.Tensor]
) -> Taken:
    count = len(samples)
    arrivals = [
        torch.zeros((200 + count) * ROW_BYTES[name], dtype=torch.uint8) for name in layout.names
    ]
    ring = torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64)
    room = FIRST[0], 190, FIRST[1], 50, *FIRST_OF_ALL
    heads = HEADS[: len(received)]
    sizes = torch.zeros_like(heads)
    needed = torch.zeros(2, dtype=torch.int64)
    which = torch.arange(count), words_of(samples, peer)
    CPU.decode_rows_(arrivals, ring, sizes, needed, received, *which, *layout[1:], heads, room)
    lies = (ring[:, (Resolution.FIRST_ROW, Resolution.SLOT)] - torch.tensor(FIRST_OF_ALL)).tolist()
    return Taken(arrivals, lies, *needed.tolist(), sizes.tolist())


def stores_of(scene: Scene, layout: RowLayout) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the slot table of all nodes, and the bytes of each node's columns."""
    slots = torch.zeros(11, Slot.NUM_WORDS, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW] = 1 + 4 * torch.arange(11)
    make = torch.Generator().manual_seed(1)
    sizes = [ROOM * ROW_BYTES[name] for name in layout.names]
    stores = [
        [torch.randint(0, 256, (size,), generator=make, dtype=torch.uint8) for size in sizes]
        for _ in range(scene.num_nodes)
    ]
    return slots, stores


def packed(scene: Scene, layout: RowLayout) -> list[list[torch.Tensor]]:
    """Return the message from each node to each; each row is in it once."""
    slots, stores = stores_of(scene, layout)
    found = []
    for node in range(scene.num_nodes):
        mine = [s for s in scene.samples if s.holder == node]
        heads = HEADS[: scene.num_nodes]
        given = stores[node], words_of(mine, "reader"), *layout[1:], heads, slots
        sizes = torch.zeros_like(heads)
        CPU.encode_rows_(torch.empty(0, dtype=torch.int64), sizes, *given)  # how large they are
        words = [HEAD // 8 - (-size // 8) for size in sizes.tolist()]
        message = torch.zeros(sum(words), dtype=torch.int64)
        CPU.encode_rows_(message, sizes, *given)
        found.append(
            [message[begin:end] for begin, end in pairwise([0, *np.cumsum(words).tolist()])]
        )
        for reader, size in enumerate(sizes.tolist()):
            theirs = [s for s in mine if s.reader == reader]
            rows = {(s.slot, *what) for s in theirs for what in wanted_by(s, scene.needs)}
            rows |= {(s.slot, t, -1) for s in theirs for t in scene.needs[s.need].per_trajectory}
            assert size == sum(ROW_BYTES[column] for _, column, _ in rows)
    return found


@settings(max_examples=200)
@given(scenes(), st.randoms(use_true_random=False))
def test_each_row_travels_once_to_where_windows_look_for_it(scene: Scene, random: object) -> None:
    """Sender and receiver plan from their own samples, in an order of their own."""
    layout = layout_of(scene.needs, ROW_BYTES)
    slots, stores = stores_of(scene, layout)
    messages = packed(scene, layout)
    longest = max((s.num_steps for s in scene.samples), default=1)
    most = most_rows(scene.needs, longest, MOST_N)
    for node in range(scene.num_nodes):
        mine = [s for s in scene.samples if s.reader == node]
        random.shuffle(mine)
        received = [messages[holder][node] for holder in range(scene.num_nodes)]
        plan = taken(layout, mine, "holder", received)
        assert [HEAD // 8 - (-size // 8) for size in plan.sizes] == [len(part) for part in received]
        assert plan.num_rows <= len(mine) * most
        assert plan.num_trajectories == len({(s.holder, s.slot) for s in mine})
        for sample, (shift, which) in zip(mine, plan.lies, strict=True):
            first = int(slots[sample.slot, Slot.FIRST_ROW])
            wanted = [
                (column, shift + row, first + row) for column, row in wanted_by(sample, scene.needs)
            ]
            wanted += [(t, which, sample.slot) for t in scene.needs[sample.need].per_trajectory]
            for column, at, row in wanted:
                size = ROW_BYTES[column]
                index = layout.names.index(column)
                held = stores[sample.holder][index][row * size : (row + 1) * size]
                assert torch.equal(plan.arrivals[index][at * size : (at + 1) * size], held)
            for read in scene.needs[sample.need].reads:  # ops check the row that is nearest
                if read.is_goal:
                    continue
                at = sample.anchor + read.first + (sample.n_steps if read.follows else 0)
                nearest = min(max(at, 0), sample.num_steps + read.final_row - 1)
                assert 0 <= shift + nearest - FIRST[0] < plan.num_rows


def test_overlapping_windows_are_merged_and_distant_ones_are_not() -> None:
    needs = [RowReads((WindowRead("a", 0, 3),))]
    drawn = [Sample(1, 1, 0, 7, 50, anchor, 0, -1) for anchor in (10, 12, 15, 10, 19, 49)]
    received = [torch.zeros(0, dtype=torch.int64), torch.arange(104).byte().view(torch.int64)]
    plan = taken(layout_of(needs, ROW_BYTES), drawn, "holder", received)
    first = 4 * FIRST[0]
    end = 4 * (FIRST[0] + 12)
    assert plan.arrivals[0][first:end].tolist() == list(range(HEAD, HEAD + 48))
    assert not plan.arrivals[0][:first].any()
    assert not plan.arrivals[0][end:].any()
    assert [lies[0] - FIRST[0] for lies in plan.lies] == [-10, -10, -10, -10, -11, -38]
    assert (plan.num_rows, plan.sizes) == (12, [0, 48])


# ---- packs: every node gets what it gathers, once, and all nodes compute the same places ---------

SLOTS = 6
EDGE = 2
READS = RowReads(
    (WindowRead("steps", 0, WHOLE), WindowRead("final", 0, WHOLE, final_row=1)), ("single",)
)


class Node:
    """A node's store, with codes as rows, and its row exchange; `mapped`: its rows go to the
    arrivals.
    """

    def __init__(
        self, index: int, nodes: int, steps: np.ndarray, room: tuple[int, int], mapped: bool
    ) -> None:
        slots = np.zeros((SLOTS, Slot.NUM_WORDS), np.int64)
        slots[:, Slot.NUM_STEPS] = steps
        slots[:, Slot.FIRST_ROW] = np.cumsum(steps + 1) - steps - 1
        rows = int((steps + 1).sum())
        held = {name: np.full(rows, -1) for name in ("steps", "final")}
        for slot, (first, count) in enumerate(slots[:, [Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist()):
            codes = code(index, slot) + np.arange(count + 1)
            held["steps"][first : first + count] = codes[:-1]
            held["final"][first : first + count + 1] = codes
        held["single"] = code(index, np.arange(SLOTS))
        sizes = {"steps": room[0] + 2 * EDGE, "final": room[0] + 2 * EDGE, "single": room[1]}
        whole = {name: np.concatenate([held[name], np.full(sizes[name], -2)]) for name in held}
        self.arrivals = {name: whole[name][len(held[name]) :] for name in held}
        table: Any = SimpleNamespace(
            ops=CPU.on_host(),
            columns=held,
            arrivals=self.arrivals,
            slots=slots,
            gathers_own_rows=not mapped,
            first_arrival=(0, 0) if mapped else (rows, SLOTS),
            spec=SimpleNamespace(name="main"),
            schema=[SimpleNamespace(name=name, row_bytes=8) for name in held],
        )
        channel: Any = SimpleNamespace(count=nodes)
        self.rows = RowExchange(channel, table, [READS], None, (EDGE, room[0]), (0, room[1]))


def code(node: int, slot: Any) -> Any:
    return 10_000 * (node + 1) + 100 * slot


def exchange(nodes: list[Node], moves: list[Moves]) -> None:
    """Send and receive, as `TrajectoryExchange` does on each node."""
    count = len(nodes)
    sent = []
    for node, its in zip(nodes, moves, strict=True):
        encoded = node.rows.encode(torch.from_numpy(its.outgoing), [1] * count)
        sent.append([words[1:].copy() for words in encoded])
    for index, (node, its) in enumerate(zip(nodes, moves, strict=True)):
        num_incoming = len(its.incoming)
        places = torch.empty(num_incoming, Resolution.NUM_WORDS, dtype=torch.int64)
        received = [words[index] for words in sent]
        incoming = torch.from_numpy(its.incoming)
        which = torch.arange(num_incoming)
        node.rows.fill(0, places, which, incoming, received, [0] * count, its.used)


@given(st.integers(1, 4), st.integers(0, 25), st.booleans(), st.integers(0, 1 << 31))
def test_every_node_has_what_it_gathers(count: int, size: int, mapped: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = random.integers(1, 9, (count, SLOTS))
    owner = random.integers(0, count, size)
    slot = random.integers(0, SLOTS, size)
    lengths = random.integers(1, steps[owner, slot] + 1)  # samples of one trajectory while it grows
    distinct = len(set(zip(owner.tolist(), slot.tolist(), strict=True)))
    room = int((steps + 1).sum()), distinct
    nodes = [Node(index, count, steps[index], room, mapped) for index in range(count)]
    places = [
        TrajectoryPlaces(owner << SHARD_BITS | slot, lengths, 1, count, index, mapped)
        for index in range(count)
    ]
    known: list[dict[int, tuple[int, int]]] = [
        {} for _ in nodes
    ]  # place of each sample that has come
    got: list[set[tuple[int, int]]] = [set() for _ in nodes]
    for _ in range(3):
        needed = random.random((count, size)) < 0.4
        moves = [of_node.move(needed) for of_node in places]
        pairs = list(zip(owner.tolist(), slot.tolist(), strict=True))
        lacking = [
            {pairs[n] for n in np.nonzero(needed[index])[0] if mapped or owner[n] != index}
            - got[index]
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

"""Which rows travel, and where they arrive, against an oracle that walks row by row; on both backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import SLOT_FIRST_ROW, SLOT_WORDS
from deepspeed_gear.parallel.carrier import most_rows
from deepspeed_gear.parallel.rows import Read, RowLayout, RowNeeds, RowPlan, RowPlanner, layout_of

FINAL_ROW = {"a": 0, "b": 1, "c": 0}
ROW_BYTES = {"a": 4, "b": 12, "c": 1, "t": 8, "u": 3}
MOST_N = 4
ROOM = 60  # rows and slots of each node's columns
HEAD = 16  # bytes in front of the rows of a message
BACKENDS = [load_backend(name) for name in ("reference", "cpu")]


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
    """Samples of a cut between nodes, and what is read of them."""

    num_nodes: int
    needs: list[RowNeeds]
    samples: list[Sample]


@st.composite
def reads(draw: st.DrawFn) -> Read:
    column, first = draw(st.sampled_from(sorted(FINAL_ROW))), draw(st.integers(-7, 7))
    end = first + draw(st.integers(1, 6))
    return Read(column, first, end, draw(st.booleans()), draw(st.booleans()), FINAL_ROW[column])


needs_of_one = st.builds(
    lambda windows, single, goals: RowNeeds(
        tuple(windows), tuple(single), tuple((column, FINAL_ROW[column]) for column in goals)
    ),
    st.lists(reads(), max_size=4, unique=True),
    st.lists(st.sampled_from("tu"), max_size=2, unique=True),
    st.lists(st.sampled_from("ab"), max_size=2, unique=True),
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    num_nodes, needs = draw(st.integers(1, 4)), draw(st.lists(needs_of_one, min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))  # of each node's trajectories
    samples = []
    for _ in range(draw(st.integers(0, 12))):
        slot = draw(st.integers(0, len(lengths) - 1))
        steps = lengths[slot]
        ends = draw(st.tuples(*[st.integers(0, num_nodes - 1)] * 2))
        need, anchor = draw(st.integers(0, len(needs) - 1)), draw(st.integers(0, steps - 1))
        goal = draw(st.integers(-1, steps - 1))
        samples.append(
            Sample(*ends, need, slot * 5, steps, anchor, draw(st.integers(0, min(MOST_N, steps))), goal)
        )
    return Scene(num_nodes, needs, samples)


def rows_of(read: Read, sample: Sample) -> list[int]:
    """Return the rows that a window reads."""
    held = sample.num_steps + read.final_row
    first = sample.anchor + read.first + (sample.n_steps if read.follows else 0)
    real = [row for row in range(first, first + read.end - read.first) if 0 <= row < held]
    return real or ([0 if first < 0 else held - 1] if read.edge else [])


def wanted_by(sample: Sample, needs: Sequence[RowNeeds]) -> Iterator[tuple[str, int]]:
    """Return column and row of everything that a sample needs of its trajectory's steps."""
    need = needs[sample.need]
    for read in need.reads:
        yield from ((read.column, row) for row in rows_of(read, sample))
    if sample.goal >= 0:
        yield from ((column, sample.goal) for column, _ in need.goals)


def plan_of(
    ops: Ops, scene: Scene, layout: RowLayout, samples: list[Sample], peer: str, slots: torch.Tensor | None
) -> RowPlan:
    words = [[getattr(s, peer), s.need, *s[3:]] for s in samples]
    heads = np.full(scene.num_nodes, HEAD)
    given_samples = torch.tensor(words, dtype=torch.int64).reshape(-1, 7)
    planner = RowPlanner(ops, layout, scene.num_nodes)
    plan = planner.plan(given_samples, heads, slots, (0, 0) if slots is not None else (3, 2))
    last = int(plan.ends[-1, -1]) if plan.ends.numel() else 0
    return plan._replace(pieces=plan.pieces[:last])


def plans_of(
    scene: Scene, layout: RowLayout, samples: list[Sample], peer: str, slots: torch.Tensor | None
) -> RowPlan:
    """Return the plan of every backend, which must be one."""
    plain, fast = (plan_of(ops, scene, layout, samples, peer, slots) for ops in BACKENDS)
    assert torch.equal(plain.pieces, fast.pieces)
    assert torch.equal(plain.ends, fast.ends)
    assert plain.sizes.tolist() == fast.sizes.tolist()
    if slots is None:
        assert plain.lies.tolist() == fast.lies.tolist()
        assert plain[-2:] == fast[-2:]
    return fast


def stores_of(scene: Scene, layout: RowLayout) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Return the slot table of all nodes, and the bytes of each node's columns."""
    slots = torch.zeros(11, SLOT_WORDS, dtype=torch.int64)
    slots[:, SLOT_FIRST_ROW] = 1 + 4 * torch.arange(11)
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
        plan = plans_of(scene, layout, mine, "reader", slots)
        words = [HEAD + -(-size // 8) * 8 for size in plan.sizes.tolist()]
        message = torch.zeros(sum(words), dtype=torch.uint8)
        BACKENDS[1].copy_rows_([message], stores[node], plan.pieces, plan.ends[:, -1:].contiguous())
        found.append([message[begin:end] for begin, end in pairwise([0, *np.cumsum(words).tolist()])])
        for reader, size in enumerate(plan.sizes.tolist()):
            theirs = [s for s in mine if s.reader == reader]
            rows = {(s.slot, *what) for s in theirs for what in wanted_by(s, scene.needs)}
            rows |= {(s.slot, t, -1) for s in theirs for t in scene.needs[s.need].per_trajectory}
            assert size == sum(ROW_BYTES[column] for _, column, _ in rows)
    return found


@settings(max_examples=500)
@given(scenes(), st.randoms(use_true_random=False))
def test_each_row_travels_once_to_where_windows_look_for_it(scene: Scene, random: object) -> None:
    """Sender and receiver plan from their own samples, in an order of their own."""
    layout = layout_of(scene.needs, ROW_BYTES)
    slots, stores = stores_of(scene, layout)
    messages = packed(scene, layout)
    for node in range(scene.num_nodes):
        mine = [s for s in scene.samples if s.reader == node]
        random.shuffle(mine)
        plan = plans_of(scene, layout, mine, "holder", None)
        heard = [messages[holder][node] for holder in range(scene.num_nodes)]
        assert [HEAD + -(-size // 8) * 8 for size in plan.sizes.tolist()] == [len(part) for part in heard]
        assert plan.num_rows <= len(mine) * limit_of(scene)
        assert plan.num_trajectories == len({(s.holder, s.slot) for s in mine})
        arrivals = [
            torch.zeros((200 + len(mine)) * ROW_BYTES[name], dtype=torch.uint8) for name in layout.names
        ]
        BACKENDS[1].copy_rows_(arrivals, heard, plan.pieces, plan.ends)
        for sample, (shift, which) in zip(mine, plan.lies.tolist(), strict=True):
            first = int(slots[sample.slot, SLOT_FIRST_ROW])
            wanted = [
                (column, shift + 3 + row, first + row) for column, row in wanted_by(sample, scene.needs)
            ]
            wanted += [(t, which + 2, sample.slot) for t in scene.needs[sample.need].per_trajectory]
            for column, at, row in wanted:
                size, index = ROW_BYTES[column], layout.names.index(column)
                held = stores[sample.holder][index][row * size : (row + 1) * size]
                assert torch.equal(arrivals[index][at * size : (at + 1) * size], held)
            for read in scene.needs[sample.need].reads:  # ops check the row that is nearest
                at = sample.anchor + read.first + (sample.n_steps if read.follows else 0)
                nearest = min(max(at, 0), sample.num_steps + read.final_row - 1)
                assert 0 <= shift + nearest < plan.num_rows


def limit_of(scene: Scene) -> int:
    longest = max((s.num_steps for s in scene.samples), default=1)
    return most_rows(scene.needs, longest, MOST_N)


@pytest.mark.parametrize("needs", [[], [RowNeeds(())], [RowNeeds((Read("a", 0, 1),), ("t",), (("b", 1),))]])
def test_nothing_needs_nothing(needs: list[RowNeeds]) -> None:
    scene = Scene(3, needs, [])
    for slots in (None, torch.zeros(1, SLOT_WORDS, dtype=torch.int64)):
        plan = plans_of(scene, layout_of(needs, ROW_BYTES), [], "holder", slots)
        assert (len(plan.pieces), plan.sizes.tolist()) == (0, [0, 0, 0])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, -1),
        (0, 2),
        (1, 1),
        (2, 4),
        (2, -1),
        (3, 0),
        (3, 1 << 50),
        (4, 3),
        (4, -1),
        (5, 9),
        (6, 9),
        (6, -2),
    ],
)
def test_samples_outside_are_refused(word: int, value: int) -> None:
    layout = layout_of([RowNeeds((Read("a", 0, 1),))], ROW_BYTES)
    sample = [0, 0, 1, 3, 1, 0, -1]
    sample[word] = value
    planner, heads = RowPlanner(BACKENDS[1], layout, 2), np.zeros(2, np.int64)
    slots = torch.zeros(4, SLOT_WORDS, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="sample 0 must be a step of a trajectory"):
        planner.plan(torch.tensor([sample]), heads, slots)


def test_overlapping_windows_are_merged_and_distant_ones_are_not() -> None:
    needs = [RowNeeds((Read("a", 0, 3),))]
    drawn = [Sample(1, 1, 0, 7, 50, anchor, 0, -1) for anchor in (10, 12, 15, 10, 19, 49)]
    plan = plans_of(Scene(2, needs, drawn), layout_of(needs, ROW_BYTES), drawn, "holder", None)
    assert plan.pieces.tolist() == [[12, HEAD, 32], [44, HEAD + 32, 12], [56, HEAD + 44, 4]]
    assert plan.lies[:, 0].tolist() == [-10, -10, -10, -10, -11, -38]
    assert (plan.num_rows, plan.sizes.tolist()) == (12, [0, 48])


def test_arrivals_have_room_behind_the_end() -> None:
    """A step of each column behind the end: the nearest ones, which ops check, are two different rows."""
    needs = [RowNeeds((Read("a", 3, 4), Read("b", 3, 4, final_row=1)))]
    drawn = [Sample(0, 1, 0, 0, 9, 8, 0, -1)]
    plan = plans_of(Scene(2, needs, drawn), layout_of(needs, ROW_BYTES), drawn, "holder", None)
    assert plan.num_rows <= most_rows(needs, 9, 0)

"""Which rows travel, and where they lie in messages, against an oracle that walks row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.parallel.carrier import most_rows
from deepspeed_gear.parallel.rows import Pieces, Read, RowNeeds, RowPlan, Samples, messages, plan_rows

FINAL_ROW = {"a": 0, "b": 1, "c": 0}
ROW_BYTES = {"a": 4, "b": 12, "c": 1, "t": 8, "u": 3}
MOST_N = 4


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


def as_arrays(samples: Sequence[Sample], peers: Sequence[int]) -> Samples:
    words = np.array([[s.need, *s[3:]] for s in samples], np.int64).reshape(-1, 6)
    return Samples(np.array(peers, np.int64), *words.T)


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


def sent(plan: RowPlan) -> list[tuple[int, int, str, int]]:
    """Return peer, slot, column and row of everything in a plan; row -1 of columns of one row."""
    found = []
    for column, (owner, first, end) in plan.rows.items():
        for which, begin, stop in zip(owner.tolist(), first.tolist(), end.tolist(), strict=True):
            assert begin < stop
            where = int(plan.peer[which]), int(plan.slot[which])
            found += [(*where, column, row) for row in range(begin, stop)]
    for column, which in plan.per_trajectory.items():
        found += [(int(plan.peer[i]), int(plan.slot[i]), column, -1) for i in which]
    return found


@settings(max_examples=400)
@given(scenes())
def test_each_row_is_sent_once(scene: Scene) -> None:
    samples, needs = scene.samples, scene.needs
    plan = plan_rows(as_arrays(samples, [s.reader for s in samples]), needs)
    found = sent(plan)
    assert len(found) == len(set(found))
    wanted = {(s.reader, s.slot, *what) for s in samples for what in wanted_by(s, needs)}
    wanted |= {(s.reader, s.slot, column, -1) for s in samples for column in needs[s.need].per_trajectory}
    assert set(found) == wanted
    trajectories = sorted({(s.reader, s.slot) for s in samples})
    assert list(zip(plan.peer.tolist(), plan.slot.tolist(), strict=True)) == trajectories
    assert [trajectories[i] for i in plan.trajectory] == [(s.reader, s.slot) for s in samples]


@settings(max_examples=400)
@given(scenes())
def test_rows_lie_where_windows_look_for_them(scene: Scene) -> None:
    samples, needs = scene.samples, scene.needs
    plan = plan_rows(as_arrays(samples, [s.holder for s in samples]), needs)
    lying: dict[tuple[str, int], tuple[int, int]] = {}
    for column, (owner, first, end) in plan.rows.items():
        pieces = zip(owner.tolist(), first.tolist(), end.tolist(), plan.place[column].tolist(), strict=True)
        for which, begin, stop, place in pieces:
            for row in range(begin, stop):
                assert (column, place + row - begin) not in lying
                lying[column, place + row - begin] = which, row
    assert all(0 <= place < plan.num_rows for _, place in lying)
    for sample, which, shift in zip(samples, plan.trajectory.tolist(), plan.shift.tolist(), strict=True):
        for column, row in wanted_by(sample, needs):
            assert lying[column, shift + row] == (which, row)
        for read in needs[sample.need].reads:  # ops check the row that is nearest, even if nobody reads it
            at = sample.anchor + read.first + (sample.n_steps if read.follows else 0)
            nearest = min(max(at, 0), sample.num_steps + read.final_row - 1)
            assert 0 <= shift + nearest < plan.num_rows


def content(plan: RowPlan, pieces: dict[str, Pieces], begin: int, end: int) -> list[object]:
    """Return what lies in the bytes [begin, end) of messages: place, size, slot, column and first row."""
    found = []
    for column, (at, size) in pieces.items():
        if column in plan.rows:
            owner, first, _ = plan.rows[column]
        else:
            owner = plan.per_trajectory[column]
            first = np.full(len(owner), -1)
        for place, num_bytes, which, row in zip(at, size, owner, first, strict=True):
            if begin <= place < end:
                part = int(place) - begin, int(num_bytes), int(plan.slot[which]), column, int(row)
                found.append(part)
    return sorted(found)


@settings(max_examples=300)
@given(scenes(), st.randoms(use_true_random=False))
def test_sender_and_receiver_have_one_message_in_mind(scene: Scene, random: object) -> None:
    """Each plans from its own samples, in an order of its own."""
    senders, receivers = [], []
    for node in range(scene.num_nodes):
        for plans, own, peer in ((senders, "holder", "reader"), (receivers, "reader", "holder")):
            mine = [s for s in scene.samples if getattr(s, own) == node]
            random.shuffle(mine)
            plan = plan_rows(as_arrays(mine, [getattr(s, peer) for s in mine]), scene.needs)
            plans.append((plan, *messages(plan, ROW_BYTES, scene.num_nodes)))
    for i, (sends, places, sizes) in enumerate(senders):
        begins = np.cumsum(sizes) - sizes
        assert sizes.sum() == sum(int(pieces.size.sum()) for pieces in places.values())
        for j, (receives, expected, expected_sizes) in enumerate(receivers):
            assert sizes[j] == expected_sizes[i]
            begin = int((np.cumsum(expected_sizes) - expected_sizes)[i])
            message = content(sends, places, int(begins[j]), int(begins[j] + sizes[j]))
            assert message == content(receives, expected, begin, begin + int(sizes[j]))
            ends = np.cumsum([size for _, size, *_ in message])
            assert [at for at, *_ in message] == [0, *ends.tolist()][: len(message)], "no gaps, no overlaps"


def limit_of(scene: Scene) -> int:
    longest = max((s.num_steps for s in scene.samples), default=1)
    return most_rows(scene.needs, longest, MOST_N)


@settings(max_examples=400)
@given(scenes())
def test_arrivals_have_room(scene: Scene) -> None:
    plan = plan_rows(as_arrays(scene.samples, [s.holder for s in scene.samples]), scene.needs)
    assert plan.num_rows <= len(scene.samples) * limit_of(scene)


@pytest.mark.parametrize("needs", [[], [RowNeeds(())], [RowNeeds((Read("a", 0, 1),), ("t",), (("b", 1),))]])
def test_nothing_needs_nothing(needs: list[RowNeeds]) -> None:
    plan = plan_rows(as_arrays([], []), needs)
    pieces, sizes = messages(plan, ROW_BYTES, 3)
    assert sent(plan) == []
    assert (plan.num_rows, sizes.tolist()) == (0, [0, 0, 0])
    assert all(len(part.at) == 0 for part in pieces.values())


def test_overlapping_windows_are_merged_and_distant_ones_are_not() -> None:
    needs = [RowNeeds((Read("a", 0, 3),))]
    drawn = [Sample(0, 1, 0, 7, 50, anchor, 0, -1) for anchor in (10, 12, 15, 10, 19, 49)]
    plan = plan_rows(as_arrays(drawn, [1] * 6), needs)
    owner, first, end = plan.rows["a"]
    assert (owner.tolist(), first.tolist(), end.tolist()) == ([0, 0, 0], [10, 19, 49], [18, 22, 50])
    assert plan.place["a"].tolist() == [0, 8, 11]
    assert (plan.shift.tolist(), plan.num_rows) == ([-10, -10, -10, -10, -11, -38], 12)


def test_arrivals_have_room_behind_the_end() -> None:
    """A step of each column behind the end: the nearest ones, which ops check, are two different rows."""
    scene = Scene(2, [RowNeeds((Read("a", 3, 4), Read("b", 3, 4, final_row=1)))], [])
    samples = [Sample(0, 1, 0, 0, 9, 8, 0, -1)]
    plan = plan_rows(as_arrays(samples, [0]), scene.needs)
    assert plan.num_rows <= len(samples) * most_rows(scene.needs, 9, 0)

"""The table in the memory of one device: every backend gives the reference's bits, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import reference_ops
from ring_op_cases import ONE, Ring, assert_alike
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, ONE_Q62, minima_size
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    PlacedTrajectory,
    Resolution,
    RingState,
    Slot,
    SlotState,
    Source,
    UpdateCount,
)

ALL_ANCHORS, SOME_ANCHORS, FROM_THE_END = [0, 0, 1, 1 << 40, 0], [1, 1, 2, 3, 0], [0, 1, 2, 1 << 40, 1]


STEPS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(-1, 8), min_size=1, max_size=4)),
    st.tuples(st.just("remove"), st.lists(st.integers(-3, 30), max_size=5, unique=True)),
    st.tuples(st.just("select"), st.integers(0, 1 << 20)),
    st.tuples(st.just("limited"), st.integers(0, 1 << 20)),
    st.tuples(st.just("top k"), st.integers(0, 1 << 20)),
    st.tuples(st.just("update"), st.integers(0, 1 << 20)),
)
VALUES = torch.tensor([0.0, 0.5, 1.0, 3.0, 1e9, float("nan"), -1.0, float("inf"), -0.0])


def rings(kind: tuple[Any, ...], ops: Ops) -> Ring:
    unit, rule, prioritized, with_minima, final_row = kind
    return Ring(ops, 50, 9, final_row, 7, unit, rule, prioritized, with_minima)


KINDS = [
    (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 0),
    (MassUnit.STEP, SOME_ANCHORS, False, False, 1),
    (MassUnit.LENGTH, ALL_ANCHORS, False, False, 1),
    (MassUnit.TRAJECTORY, SOME_ANCHORS, True, True, 1),
    (MassUnit.STEP, ALL_ANCHORS, True, True, 1),
    (MassUnit.STEP, FROM_THE_END, True, False, 0),
]


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.lists(STEPS, min_size=1, max_size=14), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_equals_the_reference(
    native: Ops,
    same_bits: Callable[[Tensor, Tensor], bool],
    kind: tuple[Any, ...],
    steps: list[Any],
    seed: int,
) -> None:
    both = [rings(kind, reference_ops()), rings(kind, native)]
    latest: list[list[Tensor]] = []
    for what, argument in steps:
        if what == "remove":
            newest = int(both[0].state[RingState.NEXT])
            found = [ring.remove([newest - number for number in argument]) for ring in both]
            assert torch.equal(*found)
        elif what == "add":
            placed = [ring.add(argument) for ring in both]
            assert torch.equal(*placed)
        elif what == "select":
            draw = [seed, argument % 7, 1 + argument % 2, argument % 2, argument % 3 == 0, argument % 3]
            if draw[5] == Normalize.TABLE and not both[0].with_minima:
                draw[5] = Normalize.BATCH
            found = [ring.select(40, draw, [0, ONE_Q62 // 2, ONE_Q62]) for ring in both]
            assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
            latest.append([pair[0] for pair in found])
        elif (what == "limited" and not both[0].by_row) or (what == "top k" and both[0].prioritized):
            count, draw = (
                1 + argument % 9,
                [seed, argument % 7, 1 + argument % 2, argument % 2, 0, argument % 3],
            )
            if what == "top k":
                found = [ring.top_k(count, draw) for ring in both]
            else:
                draw[5] = draw[5] if both[0].with_minima else Normalize.BATCH
                found = [ring.select_limited(count, draw, [ONE_Q62 // 2], most=3) for ring in both]
            assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
            latest.append([pair[0].repeat(40, 1)[:40] for pair in found])
        elif what == "update" and latest and both[0].prioritized:
            torch.manual_seed(argument)
            values = VALUES[torch.randint(len(VALUES), (40,))]
            which = latest[argument % len(latest)]  # also an old one
            for ring, resolutions in zip(both, which, strict=True):
                ring.update(resolutions, values)
        assert_alike(both)


@pytest.mark.parametrize("kind", KINDS)
@given(adds=st.lists(st.lists(st.integers(-1, 8), min_size=1, max_size=4), max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_newest_trajectories_are_stored_and_nothing_overlaps(
    cpu: Ops, kind: tuple[Any, ...], adds: list[list[int]]
) -> None:
    """Against a list: what is stored is a suffix of what was added, as long as rows and slots allow."""
    ring, lengths, refused = rings(kind, cpu), [], 0
    for argument in adds:
        placed = ring.add(argument)
        lengths += [steps for steps in argument if 0 < steps <= 7]
        refused += sum(not 0 <= steps <= 7 for steps in argument)
        assert (placed[:, PlacedTrajectory.SLOT] >= 0).tolist() == [0 < steps <= 7 for steps in argument]
        state = ring.state.tolist()
        stored = ring.slots[ring.slots[:, Slot.STATE] == SlotState.COMMITTED]
        stored = stored[stored[:, Slot.ID].argsort()]
        assert state[RingState.NEXT] == len(lengths)
        assert stored[:, Slot.ID].tolist() == list(range(state[RingState.TAIL], len(lengths)))
        assert stored[:, Slot.NUM_STEPS].tolist() == lengths[state[RingState.TAIL] :]
        assert state[RingState.STEPS] == sum(lengths[state[RingState.TAIL] :])
        assert state[RingState.REFUSED] == refused
        rows = torch.zeros(50, dtype=torch.int64)
        for first, count in stored[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist():
            rows[first : first + count] += 1
            assert first + count <= 50
        assert int(rows.max()) <= 1
        wanted = sum(steps + kind[4] for steps in lengths[state[RingState.TAIL] :])
        longest = 7 + kind[4]
        assert state[RingState.TAIL] == 0 or len(stored) == 9 or wanted > 50 - 2 * longest
        built = ring.sums.clone()
        items = 50 if ring.by_row else 9
        cpu.tree_build_(built, items)
        assert torch.equal(built, ring.sums)
        assert int((ring.sums[:items] > 0).sum()) == state[RingState.COUNTS + UpdateCount.DRAWABLE]
        if ring.with_minima and minima_size(items):
            least = ring.minima.clone()
            cpu.minima_build_(least, ring.sums, items)
            assert torch.equal(least, ring.minima)


# Slots, longest trajectory, and most of an add and of a batch: all by one launch, and by several.
SMALL, LARGE = (1500, 9, 300, 300), (3000, 30, 1100, 1100)


@pytest.mark.parametrize(("num_slots", "most_steps", "most_added", "count"), [SMALL, LARGE])
@pytest.mark.parametrize("normalize", [Normalize.NONE, Normalize.BATCH, Normalize.TABLE])
def test_a_large_ring_that_is_full_many_times_over(
    native: Ops, cpu: Ops, num_slots: int, most_steps: int, most_added: int, count: int, normalize: int
) -> None:
    """Several levels of the tree, adds of many trajectories, and the end of the ring inside an add."""
    torch.manual_seed(0)
    size = num_slots * most_steps // 2
    both = [
        Ring(ops, size, num_slots, 1, most_steps, MassUnit.STEP, ALL_ANCHORS, True, True)
        for ops in (cpu, native)
    ]
    for _ in range(14 if count == SMALL[3] else 4):
        lengths = torch.randint(0, most_steps + 1, (int(torch.randint(1, most_added, ())),)).tolist()
        placed = [ring.add(lengths) for ring in both]
        assert torch.equal(*placed)
        found = [ring.select(count, [1, 2, 1, 0, 0, normalize], [ONE_Q62]) for ring in both]
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        values = torch.rand(count)
        for ring, (resolutions, _) in zip(both, found, strict=True):
            ring.update(resolutions, values)
    assert_alike(both)


def ids_of(ring: Ring) -> Tensor:
    """The trajectory of each item, -1 where it has no mass."""
    items = torch.arange(ring.num_rows if ring.by_row else ring.num_slots)
    slots = ring.row_slots.long() if ring.by_row else items
    return torch.where(ring.sums[items] > 0, ring.slots[slots, Slot.ID], -1)


@pytest.mark.parametrize("unit", [MassUnit.STEP, MassUnit.TRAJECTORY])
def test_the_highest_of_a_full_ring_begin_with_the_oldest(native: Ops, cpu: Ops, unit: int) -> None:
    """Many equal priorities, on both sides of the end of the ring, against sorting by priority and id."""
    torch.manual_seed(1)
    both = [Ring(ops, 3000, 700, 1, 9, unit, ALL_ANCHORS, True, False) for ops in (cpu, native)]
    for turn in range(14):
        lengths = torch.randint(0, 10, (200,)).tolist()
        assert torch.equal(*[ring.add(lengths, [ONE, HIGHEST_SO_FAR][turn % 2]) for ring in both])
        ids, items = ids_of(both[0]), torch.arange(len(both[0].priorities))
        has_mass = ids >= 0
        keys = zip(-both[0].priorities[has_mass], ids[has_mass], items[has_mass], strict=True)
        expected = sorted((float(p), int(number), int(item)) for p, number, item in keys)
        for count in (1, 33, 600, len(expected), len(expected) + 1):
            found = [ring.top_k(count, [1, 2, 1, 0, 0, 0]) for ring in both]
            assert torch.equal(found[0][0], found[1][0]), count
            assert torch.equal(found[0][1], found[1][1])
            records = found[1][0]
            if count > len(expected):
                assert (records[:, Resolution.ID] == -1).all()
                assert not found[1][1].any()
                break
            assert records[:, Resolution.ID].tolist() == [number for _, number, _ in expected[:count]]
            if unit == MassUnit.STEP:
                rows = records[:, Resolution.FIRST_ROW] + records[:, Resolution.ANCHOR]
                assert rows.tolist() == [item for *_, item in expected[:count]]
            values = torch.randint(0, 3, (count,)).float() / 2
            for ring in both:
                ring.update(records, values)
            ids, expected = (
                ids_of(both[0]),
                sorted(
                    (-float(both[0].priorities[item]), int(number), int(item))
                    for item, number in enumerate(ids_of(both[0]))
                    if number >= 0
                ),
            )
    assert int(both[1].state[RingState.TAIL]) > 700
    assert_alike(both)


@pytest.mark.parametrize("normalize", [Normalize.NONE, Normalize.BATCH, Normalize.TABLE])
@pytest.mark.parametrize("most", [1, 2, 40])
def test_limited_draws_of_a_large_ring(native: Ops, cpu: Ops, most: int, normalize: int) -> None:
    """Several levels, trajectories that are used up in one round and over several, and too few draws."""
    torch.manual_seed(most)
    both = [
        Ring(ops, 20_000, 1500, 0, 9, MassUnit.TRAJECTORY, ALL_ANCHORS, True, True) for ops in (cpu, native)
    ]
    times: dict[int, int] = {}
    for turn in range(9):
        lengths = torch.randint(0, 10, ([7, 300][turn > 1],)).tolist()
        assert torch.equal(*[ring.add(lengths) for ring in both])
        left = sum(most - times.get(number, 0) for number in ids_of(both[0]).tolist() if number >= 0)
        for count in (15, 200):
            found = [ring.select_limited(count, [1, 2, 1, 0, 0, normalize], [ONE_Q62], most) for ring in both]
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
            drawn = found[1][0][:, Resolution.ID].tolist()
            assert (drawn == [-1] * count) == (left < count)
            for number in drawn if left >= count else []:
                times[number] = times.get(number, 0) + 1
                left -= 1
        values = torch.rand(count) ** 4
        for ring, (resolutions, _) in zip(both, found, strict=True):
            ring.update(resolutions, values)
    stored = both[1].slots[both[1].slots[:, Slot.STATE] == SlotState.COMMITTED]
    for number, count in stored[:, [Slot.ID, Slot.TIMES_SAMPLED]].tolist():
        assert times.get(number, 0) == count < most
    assert max(times.values()) == most or most == 40
    assert_alike(both)


@pytest.mark.parametrize("num_rows", [50, 2100])
def test_transitions_of_one_row_evict_as_many(native: Ops, cpu: Ops, num_rows: int) -> None:
    """The most trajectories that rows can evict, and slots left over."""
    torch.manual_seed(0)
    both = [
        Ring(ops, num_rows, num_rows + 9, 0, 1, MassUnit.STEP, ALL_ANCHORS, True, True)
        for ops in (cpu, native)
    ]
    for _ in range(8):
        lengths = torch.randint(0, 2, (int(torch.randint(num_rows // 3, num_rows // 2, ())),)).tolist()
        assert torch.equal(*[ring.add(lengths) for ring in both])
        assert_alike(both)
    assert int(both[1].state[RingState.TAIL]) > 0


@pytest.mark.parametrize(
    ("count", "most_steps", "nodes"),
    [
        (1, 1, (1, 1, 1)),
        (1024, 1, (1, 1, 1)),
        (16, 1000, (1, 1, 1)),
        (1025, 1, (3 + 2, 2, 3 + 2)),  # and a launch for each level above the items
        (17, 1000, (3 + 2, 1, 1)),
    ],
)
def test_nodes_of_a_graph(
    kernels_on_host: Ops,
    launched: Callable[[], list[int]],
    count: int,
    most_steps: int,
    nodes: tuple[int, int, int],
) -> None:
    """Adding, drawing and updating: one launch where one block, or its last one, can do the rest."""
    num_rows = 1024 + (count + 2) * most_steps
    ring = Ring(kernels_on_host, num_rows, 1100, 0, most_steps, MassUnit.STEP, ALL_ANCHORS, True, True)
    assert 1024 < num_rows <= 1024 * 32  # three levels
    ring.add([1] * count)
    added = launched()
    resolutions, _ = ring.select(count, [1, 2, 1, 0, 0, Normalize.BATCH], [ONE_Q62])
    drawn = launched()
    ring.update(resolutions, torch.ones(count))
    assert tuple(map(len, (added, drawn, launched()))) == nodes
    ring.prioritized = False  # without weights there is nothing to do after all have been drawn
    ring.ops.ring_select_(
        *(ring.state, torch.zeros(1500, 8, dtype=torch.int64), torch.zeros(0)),
        *(ring.slots, ring.sums, ring.minima, ring.row_slots, torch.tensor([ONE_Q62])),
        *(ALL_ANCHORS, ring.shape, [1, 2, 1, 0, 0, Normalize.NONE], MassUnit.STEP),
    )
    assert len(launched()) == 1


@pytest.mark.parametrize("added", [0, 100, 900])
def test_nodes_of_limited_draws_and_top_k(
    kernels_on_host: Ops, launched: Callable[[], list[int]], added: int
) -> None:
    """As many in every table: a captured step is one graph, with anything to draw or nothing."""
    ring = Ring(kernels_on_host, 4000, 1000, 0, 4, MassUnit.TRAJECTORY, ALL_ANCHORS, True, True)
    ring.add([1] * added)
    launched()
    ring.ops.ring_select_limited_(
        *(ring.state, torch.zeros(200, 8, dtype=torch.int64), torch.zeros(200), ring.slots, ring.sums),
        *(ring.minima, torch.tensor([0]), ALL_ANCHORS, ring.shape, [1, 2, 1, 0, 0, 1], 0, 2),
    )
    assert launched() == [1]
    ring.top_k(200, [1, 2, 1, 0, 0, 0])
    assert len(launched()) == 21  # two memsets, four for the digits of a pass, four to sort


def empty(ops: Ops, kind: tuple[Any, ...], why: str) -> Ring:
    """A ring in which no item has a mass."""
    ring = rings(kind, ops)
    if why == "only lengths that add nothing":
        ring.add([0, -1, 8])
    elif why == "no priority above 0":
        ring.add([3, 5])
        resolutions, _ = ring.select(400, [0, 0, 1, 0, 0, Normalize.NONE], [0])
        ring.update(resolutions, torch.zeros(400))
    return ring


def some_lengths(count: int, most: int) -> list[int]:
    """Lengths, among them ones that add nothing and ones that are refused."""
    lengths, kind = torch.randint(1, most + 1, (count,)), torch.rand(count)
    lengths[kind < 0.15], lengths[kind > 0.9], lengths[kind > 0.95] = 0, -1, most + 1
    return lengths.tolist()


LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
PLACES = [0, 1, 31, 32, 33, 63, 64, 992, 993, 1023, 1024, 1025, 2047, 2048, 2049, 3072]


COUNTS = [1, 31, 32, 33, 64, 1023, 1025, *([1024, 2081, 4096] if LONG else [])]  # as a block takes them


@pytest.mark.parametrize("count", COUNTS)
def test_many_trajectories_are_placed_at_once(native: Ops, cpu: Ops, reference: Ops, count: int) -> None:
    """Warps and rounds of every fill: the ring's end lies in front of, in and behind each."""
    if native is cpu and count > 64:
        pytest.skip("one after the other, as fewer")
    torch.manual_seed(count)
    most, num_slots, num_rows = 5, count + 40, (count + 2) * 6 + 7
    lengths = some_lengths(count, most)
    ahead = torch.tensor([0, *(steps + 1 if 0 < steps <= most else 0 for steps in lengths)]).cumsum(0)
    places = [place for place in (*PLACES, count) if place <= count]
    for place in places[:: -1 - count // 1000]:
        for rows in (-1, 0, 1):  # of the trajectory at this place that are behind the end
            both = [
                Ring(ops, num_rows, num_slots, 1, most, MassUnit.TRAJECTORY, ALL_ANCHORS, False)
                for ops in (reference if native is cpu else cpu, native)
            ]
            for ring in both:
                ring.state[RingState.HEAD] = 3 * num_rows - int(ahead[place]) + rows
                ring.state[RingState.NEXT] = ring.state[RingState.TAIL] = 2 * num_slots - place
            for added in (lengths, lengths[::-1])[: 1 + (place == count)]:
                assert torch.equal(*[ring.add(added) for ring in both]), (place, rows)
            assert_alike(both)


@pytest.mark.parametrize("why", ["new", "only lengths that add nothing", "no priority above 0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_without_masses_gives_none_and_goes_on(
    native: Ops, same_bits: Callable[[Tensor, Tensor], bool], kind: tuple[Any, ...], why: str
) -> None:
    if why == "no priority above 0" and not kind[2]:
        pytest.skip("such items have no priorities")
    both = [empty(ops, kind, why) for ops in (reference_ops(), native)]
    before = both[0].state.clone()
    for normalize in range(3 if kind[3] else 2):
        draw = [3, 1, 2, 1, normalize == 1, normalize]
        for ring in both:
            first = int(ring.state[RingState.SAMPLES])
            records, weights = ring.select(33, draw, [ONE_Q62 // 2])
            assert (
                records[:, : Resolution.SAMPLE_NUMBER].tolist()
                == [[Resolution.NO_SAMPLE, Resolution.NO_SAMPLE, 0, 0, 0, 0, 0]] * 33
            )
            assert records[:, Resolution.SAMPLE_NUMBER].tolist() == [(first + i) * 2 + 1 for i in range(33)]
            assert same_bits(weights, torch.zeros(33 if kind[2] else 0))
            if kind[2]:
                ring.update(records, torch.ones(33))
    turns = normalize + 1
    for ring in both:
        changed = {RingState.EMPTY: turns}
        changed |= {
            RingState.COUNTS + UpdateCount.STALE: 33 * turns * kind[2],
            RingState.TOTAL: -int(before[RingState.TOTAL]),
        }
        expected = before.clone()
        for word, more in changed.items():
            expected[word] += more
        assert ring.state[:16].tolist() == expected[:16].tolist()
        ring.add([4])
    found = [ring.select(40, [3, 1, 2, 1, 0, 1], [ONE_Q62]) for ring in both]
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert both[1].state[RingState.EMPTY] == turns
    assert (found[1][0][:, 0] >= 0).all()
    assert_alike(both)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([1, 3, 11, 16]), st.integers(0, 3)
)
@settings(max_examples=20, deadline=None)
def test_rows_are_written_to_their_places(native: Ops, lengths: list[int], width: int, shift: int) -> None:
    reference = reference_ops()
    placed = Ring(reference, 60, 20, 1, 5, MassUnit.STEP, ALL_ANCHORS, False).add(lengths)
    n = len(lengths)
    values = [
        torch.randint(0, 256, (n, 5, width), dtype=torch.uint8),
        torch.randn(n, 6, width),
        torch.randn(n, 2, dtype=torch.float64),
    ]
    columns = [torch.zeros(60, width, dtype=torch.uint8), torch.zeros(60, width), torch.zeros(20, 2).double()]
    place = torch.zeros(60 * width + shift, dtype=torch.uint8)[shift:].view(60, width)
    got = [place, columns[1].clone(), columns[2].clone()]
    sources = [Source.STEPS, Source.STEPS_PLUS_ONE, Source.TRAJECTORY]
    reference.scatter_(columns, values, placed, sources)
    native.scatter_(got, values, placed, sources)
    assert all(torch.equal(a, b) for a, b in zip(columns, got, strict=True))


def test_what_cannot_be_is_refused(cpu: Ops, reference: Ops) -> None:
    for ops in (cpu, reference):
        ring = Ring(ops, 50, 9, 1, 7, MassUnit.STEP, ALL_ANCHORS, True)
        with pytest.raises((RuntimeError, ShapeError), match="must fit"):
            ring.add([1] * 6)
        ring.add([3, 5])
        assert set(ring.select(64, [0, 0, 1, 0, 0, 0], [0])[0][:, Resolution.ID].tolist()) == {0, 1}
        column, values = torch.zeros(50, 2), torch.zeros(1, 7, 2)
        with pytest.raises((RuntimeError, ShapeError), match="must lie in the columns"):
            ops.scatter_([column], [values], torch.tensor([[0, 45, 6]]), [Source.STEPS])
        with pytest.raises((RuntimeError, ShapeError), match="must lie in the columns"):
            ops.scatter_([column], [values], torch.tensor([[0, 0, 8]]), [Source.STEPS])

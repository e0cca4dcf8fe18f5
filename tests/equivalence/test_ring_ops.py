"""The table in the memory of one device: every backend gives the reference's bits, and nothing is
lost.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_kit import REFERENCE, REFUSED, at_offset, compare, model_of, same_bits
from op_rings import ONE, Both, Environments, Ring
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, ONE_Q62, minima_size
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    OpenTrajectory,
    PlacedStep,
    PlacedTrajectory,
    Resolution,
    RingState,
    Slot,
    SlotState,
    Source,
    UpdateCount,
)

ALL_ANCHORS = [0, 0, 1, 1 << 40, 0]
SOME_ANCHORS = [1, 1, 2, 3, 0]
FROM_THE_END = [1, 1, 2, 3, 1]
Launched = Callable[[], list[int]]
# unit, anchors, whether it is prioritized, whether it keeps minima, a row more than steps
KINDS = [
    (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 0),
    (MassUnit.STEP, SOME_ANCHORS, False, False, 1),
    (MassUnit.LENGTH, FROM_THE_END, False, False, 1),
    (MassUnit.TRAJECTORY, SOME_ANCHORS, True, True, 1),
    (MassUnit.STEP, ALL_ANCHORS, True, True, 1),
    (MassUnit.STEP, FROM_THE_END, True, False, 0),
]
LONG = os.environ.get("GEAR_LONG_TESTS") == "1"


def ring_of(kind: tuple[Any, ...], ops: Ops) -> Ring:
    unit, rule, prioritized, with_minima, final_row = kind
    return Ring(ops, 50, 9, final_row, 7, unit, rule, prioritized, with_minima)


def both_of(native: Ops, *sizes: Any) -> Both:
    return Both(Ring(model_of(native), *sizes), Ring(native, *sizes))


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(-1, 8), min_size=1, max_size=4)),
    st.tuples(st.just("remove"), st.lists(st.integers(-3, 30), max_size=5, unique=True)),
    st.tuples(st.sampled_from(["select", "limited", "top k", "update"]), st.integers(0, 1 << 20)),
)
VALUES = torch.tensor([0.0, 0.5, 1.0, 3.0, 1e9, float("nan"), -1.0, float("inf"), -0.0])


@pytest.mark.parametrize("kind", KINDS)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=14), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_equals_the_reference(
    native: Ops, kind: tuple[Any, ...], actions: list[Any], seed: int
) -> None:
    both = Both(ring_of(kind, model_of(native)), ring_of(kind, native))
    latest = list[Tensor]()
    for what, number in actions:
        if what == "remove":
            newest = int(both.state[RingState.NEXT])
            both.remove([newest - back for back in number])
            continue
        if what == "add":
            both.add(number)
            continue
        draw = [seed, number % 7, 1 + number % 2, number % 2, number % 3 == 0, number % 3]
        if draw[5] == Normalize.TABLE and not both.with_minima:
            draw[5] = Normalize.BATCH
        if what == "select":
            latest.append(both.select(40, draw, [0, ONE_Q62 // 2, ONE_Q62])[0])
        elif what == "limited" and not both.by_row:
            draw[4] = 0
            found = both.select_limited(1 + number % 9, draw, [ONE_Q62 // 2], most=3)[0]
            latest.append(found.repeat(40, 1)[:40])
        elif what == "top k" and both.prioritized:
            draw[4:] = 0, number % 3
            latest.append(both.top_k(1 + number % 9, draw)[0].repeat(40, 1)[:40])
        elif what == "update" and latest and both.prioritized:
            torch.manual_seed(number)
            values = VALUES[torch.randint(len(VALUES), (40,))]
            both.update(latest[number % len(latest)], values)  # also of an old one
        both.assert_alike()


@pytest.mark.parametrize("kind", KINDS)
@given(adds=st.lists(st.lists(st.integers(-1, 8), min_size=1, max_size=4), max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_newest_trajectories_are_stored_and_nothing_overlaps(
    cpu: Ops, kind: tuple[Any, ...], adds: list[list[int]]
) -> None:
    """Against a list: what is stored is a suffix of what was added, as long as rows and slots
    allow.
    """
    ring = ring_of(kind, cpu)
    lengths = []
    refused = 0
    for argument in adds:
        placed = ring.add(argument)
        lengths += [steps for steps in argument if 0 < steps <= 7]
        refused += sum(not 0 <= steps <= 7 for steps in argument)
        assert (placed[:, PlacedTrajectory.SLOT] >= 0).tolist() == [
            0 < steps <= 7 for steps in argument
        ]
        state = ring.state.tolist()
        stored = ring.slots[ring.slots[:, Slot.STATE] == SlotState.COMMITTED]
        stored = stored[stored[:, Slot.ID].argsort()]
        held = lengths[state[RingState.TAIL] :]
        assert state[RingState.NEXT] == len(lengths)
        assert stored[:, Slot.ID].tolist() == list(range(state[RingState.TAIL], len(lengths)))
        assert stored[:, Slot.NUM_STEPS].tolist() == held
        assert [state[word] for word in (RingState.STEPS, RingState.REFUSED)] == [
            sum(held),
            refused,
        ]
        rows = torch.zeros(50, dtype=torch.int64)
        for first, count in stored[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist():
            rows[first : first + count] += 1
            assert first + count <= 50
        assert int(rows.max()) <= 1
        wanted = sum(steps + kind[4] for steps in held)
        longest = 7 + kind[4]
        assert state[RingState.TAIL] == 0 or len(stored) == 9 or wanted > 50 - 2 * longest
        items = 50 if ring.by_row else 9
        assert torch.equal(compare(cpu, "tree_build_", ring.sums, items)[0], ring.sums)
        assert int((ring.sums[:items] > 0).sum()) == state[RingState.COUNTS + UpdateCount.DRAWABLE]
        if ring.with_minima and minima_size(items):
            assert torch.equal(
                compare(cpu, "minima_build_", ring.minima, ring.sums, items)[0], ring.minima
            )


# Slots, longest trajectory, and most of an add and of a batch: all by one launch, and by several.
SMALL = (1500, 9, 300)
LARGE = (3000, 30, 1100)


@pytest.mark.parametrize(
    ("sizes", "normalize"),
    [(SMALL, Normalize.NONE), (SMALL, Normalize.TABLE), *((LARGE, kind) for kind in range(3))],
)
def test_a_large_ring_that_is_full_many_times_over(
    kernels: Ops, sizes: tuple[int, int, int], normalize: int
) -> None:
    """Several levels of the tree, adds of many trajectories, and the end of the ring
    inside an add.
    """
    torch.manual_seed(0)
    num_slots, longest, count = sizes
    size = num_slots * longest // 2, num_slots, 1, longest
    both = both_of(kernels, *size, MassUnit.STEP, ALL_ANCHORS, True, True)
    for _ in range(14 if sizes == SMALL else 4):
        both.add(torch.randint(0, longest + 1, (int(torch.randint(1, count, ())),)).tolist())
        resolutions, _ = both.select(count, [1, 2, 1, 0, 0, normalize], [ONE_Q62])
        both.update(resolutions, torch.rand(count))
    both.assert_alike()


def ids_of(ring: Any) -> Tensor:
    """The trajectory of each item, -1 where it has no mass."""
    items = torch.arange(ring.num_rows if ring.by_row else ring.num_slots)
    slots = ring.row_slots.long() if ring.by_row else items
    return torch.where(ring.sums[items] > 0, ring.slots[slots, Slot.ID], -1)


@pytest.mark.parametrize("unit", [MassUnit.STEP, MassUnit.TRAJECTORY])
def test_the_highest_of_a_full_ring_begin_with_the_oldest(kernels: Ops, unit: int) -> None:
    """Many equal priorities, on both sides of the end of the ring, against sorting by priority and
    id.
    """
    torch.manual_seed(1)
    both = both_of(kernels, 3000, 700, 1, 9, unit, ALL_ANCHORS, True, False)

    def ranked() -> list[tuple[float, int, int]]:
        rows = zip(both.priorities.tolist(), ids_of(both).tolist(), strict=True)
        return sorted(
            (-value, number, item) for item, (value, number) in enumerate(rows) if number >= 0
        )

    for turn in range(14):
        both.add(torch.randint(0, 10, (200,)).tolist(), [ONE, HIGHEST_SO_FAR][turn % 2])
        for count in (1, 33, 600, len(ranked()), len(ranked()) + 1):
            expected = ranked()
            records, weights = both.top_k(count, [1, 2, 1, 0, 0, 0])
            if count > len(expected):
                assert (records[:, Resolution.ID] == -1).all()
                assert not weights.any()
                break
            assert records[:, Resolution.ID].tolist() == [
                number for _, number, _ in expected[:count]
            ]
            if unit == MassUnit.STEP:
                rows = records[:, Resolution.FIRST_ROW] + records[:, Resolution.ANCHOR]
                assert rows.tolist() == [item for *_, item in expected[:count]]
            both.update(records, torch.randint(0, 3, (count,)).float() / 2)
    assert int(both.state[RingState.TAIL]) > 700
    both.assert_alike()


@pytest.mark.parametrize(
    ("most", "normalize"), [(1, Normalize.BATCH), (2, Normalize.TABLE), (40, Normalize.NONE)]
)
def test_limited_draws_of_a_large_ring(kernels: Ops, most: int, normalize: int) -> None:
    """Several levels, trajectories that are used up in one round and over several, and too few
    draws.
    """
    torch.manual_seed(most)
    both = both_of(kernels, 20_000, 1500, 0, 9, MassUnit.TRAJECTORY, ALL_ANCHORS, True, True)
    times: dict[int, int] = {}
    for turn in range(9):
        both.add(torch.randint(0, 10, ([7, 300][turn > 1],)).tolist())
        left = sum(most - times.get(number, 0) for number in ids_of(both).tolist() if number >= 0)
        for count in (15, 200):
            records, _ = both.select_limited(count, [1, 2, 1, 0, 0, normalize], [ONE_Q62], most)
            drawn = records[:, Resolution.ID].tolist()
            assert (drawn == [-1] * count) == (left < count)
            for number in drawn if left >= count else []:
                times[number] = times.get(number, 0) + 1
                left -= 1
        both.update(records, torch.rand(count) ** 4)
    stored = both.slots[both.slots[:, Slot.STATE] == SlotState.COMMITTED]
    for number, count in stored[:, [Slot.ID, Slot.TIMES_SAMPLED]].tolist():
        assert times.get(number, 0) == count < most
    assert max(times.values()) == most or most == 40
    both.assert_alike()


@pytest.mark.parametrize("num_rows", [50, 2100])
def test_transitions_of_one_row_evict_as_many(kernels: Ops, num_rows: int) -> None:
    """The most trajectories that rows can evict, and slots left over."""
    torch.manual_seed(0)
    both = both_of(kernels, num_rows, num_rows + 9, 0, 1, MassUnit.STEP, ALL_ANCHORS, True, True)
    for _ in range(8):
        both.add(
            torch.randint(0, 2, (int(torch.randint(num_rows // 3, num_rows // 2, ())),)).tolist()
        )
        both.assert_alike()
    assert int(both.state[RingState.TAIL]) > 0


def some_lengths(count: int, most: int) -> list[int]:
    """Lengths, among them ones that add nothing and ones that are refused."""
    lengths = torch.randint(1, most + 1, (count,))
    kind = torch.rand(count)
    lengths[kind < 0.15] = 0
    lengths[kind > 0.9] = -1
    lengths[kind > 0.95] = most + 1
    return lengths.tolist()


PLACES = [0, 1, 31, 32, 33, 63, 64, 992, 993, 1023, 1024, 1025, 2047, 2048, 2049, 3072]
COUNTS = [
    1,
    31,
    32,
    33,
    64,
    1023,
    1025,
    *([1024, 2081, 4096] if LONG else []),
]  # as a block takes them


@pytest.mark.parametrize("count", COUNTS)
def test_many_trajectories_are_placed_at_once(native: Ops, count: int) -> None:
    """Warps and rounds of every fill: the ring's end lies in front of, in and behind each."""
    if native.name == "cpu" and count > 64:
        pytest.skip("one after the other, as fewer")
    torch.manual_seed(count)
    most = 5
    num_slots = count + 40
    num_rows = (count + 2) * 6 + 7
    lengths = some_lengths(count, most)
    ahead = torch.tensor([0, *(steps + 1 if 0 < steps <= most else 0 for steps in lengths)]).cumsum(
        0
    )
    places = [place for place in (*PLACES, count) if place <= count]
    sizes = num_rows, num_slots, 1, most, MassUnit.TRAJECTORY, ALL_ANCHORS, False
    for place in places[:: -1 - count // 1000]:
        for rows in (-1, 0, 1):  # of the trajectory at this place that are behind the end
            both = both_of(native, *sizes)
            for ring in both.rings:
                ring.state[RingState.HEAD] = 3 * num_rows - int(ahead[place]) + rows
                ring.state[RingState.NEXT] = ring.state[RingState.TAIL] = 2 * num_slots - place
            for added in (lengths, lengths[::-1])[: 1 + (place == count)]:
                both.add(added)
            both.assert_alike()


@pytest.mark.parametrize("why", ["new", "only lengths that add nothing", "no priority above 0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_without_masses_gives_none_and_goes_on(
    native: Ops, kind: tuple[Any, ...], why: str
) -> None:
    if why == "no priority above 0" and not kind[2]:
        pytest.skip("such items have no priorities")
    both = Both(ring_of(kind, model_of(native)), ring_of(kind, native))
    if why == "only lengths that add nothing":
        both.add([0, -1, 8])
    elif why == "no priority above 0":
        both.add([3, 5])
        both.update(both.select(400, [0, 0, 1, 0, 0, Normalize.NONE], [0])[0], torch.zeros(400))
    expected = both.state.clone()
    turns = 3 if kind[3] else 2
    for normalize in range(turns):
        first = int(both.state[RingState.SAMPLES])
        records, weights = both.select(33, [3, 1, 2, 1, normalize == 1, normalize], [ONE_Q62 // 2])
        none = [Resolution.NO_SAMPLE, Resolution.NO_SAMPLE, 0, 0, 0, 0, 0]
        assert records.tolist() == [[*none, (first + i) * 2 + 1] for i in range(33)]
        assert same_bits(weights, torch.zeros(33 if kind[2] else 0))
        if kind[2]:
            both.update(records, torch.ones(33))
    expected[RingState.EMPTY] += turns
    expected[RingState.COUNTS + UpdateCount.STALE] += 33 * turns * kind[2]
    expected[RingState.TOTAL] = 0
    assert all(ring.state[:16].tolist() == expected[:16].tolist() for ring in both.rings)
    both.add([4])
    records, _ = both.select(40, [3, 1, 2, 1, 0, 1], [ONE_Q62])
    assert both.state[RingState.EMPTY] == turns
    assert (records[:, 0] >= 0).all()
    both.assert_alike()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([1, 3, 11, 16]),
    st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_rows_are_written_to_their_places(
    native: Ops, lengths: list[int], width: int, shift: int
) -> None:
    placed = Ring(REFERENCE, 60, 20, 1, 5, MassUnit.STEP, ALL_ANCHORS, False).add(lengths)
    n = len(lengths)
    values = [
        torch.randint(0, 256, (n, 5, width), dtype=torch.uint8),
        torch.randn(n, 6, width),
        torch.randn(n, 2, dtype=torch.float64),
    ]
    place = at_offset(torch.zeros(60, width, dtype=torch.uint8), shift)
    columns = [place, torch.zeros(60, width), torch.zeros(20, 2).double()]
    compare(
        native,
        "scatter_",
        columns,
        values,
        placed,
        [Source.STEPS, Source.STEPS_PLUS_ONE, Source.TRAJECTORY],
    )


def test_what_cannot_be_is_refused(careful: Ops) -> None:
    ring = Ring(careful, 50, 9, 1, 7, MassUnit.STEP, ALL_ANCHORS, True)
    with pytest.raises(REFUSED, match="must fit"):
        ring.add([1] * 6)
    ring.add([3, 5])
    assert set(ring.select(64, [0, 0, 1, 0, 0, 0], [0])[0][:, Resolution.ID].tolist()) == {0, 1}
    column = torch.zeros(50, 2)
    values = torch.zeros(1, 7, 2)
    for place in ([0, 45, 6], [0, 0, 8]):
        with pytest.raises(REFUSED, match="must lie in the columns"):
            careful.scatter_([column], [values], torch.tensor([place]), [Source.STEPS])
    envs = Environments(careful, 2, (MassUnit.STEP, ALL_ANCHORS, True, False, 1), most=4, part=9)
    with pytest.raises(REFUSED, match="two longest trajectories"):
        envs.step(torch.zeros(2, dtype=torch.bool), None, None)
    assert not any(tensor.any() for name, tensor in envs.tensors.items() if name != "state")


def test_equal_priorities_of_more_warps_than_a_block_has(kernels: Ops) -> None:
    """Counts of warps are summed by one block, in several turns."""
    rows = 1100 * 256  # 1,024 blocks of eight warps count
    ring = Ring(kernels, rows, rows, 0, 1, MassUnit.STEP, ALL_ANCHORS, True)
    for first in range(0, rows // 2, rows // 8):
        ring.add([1] * (rows // 8 - 1 - first % 2))
    oldest = int(ring.state[RingState.TAIL])
    records, _ = ring.top_k(700, [1, 2, 1, 0, 0, 0])
    assert records[:, Resolution.ID].tolist() == list(range(oldest, oldest + 700))


# ---- nodes of a captured graph -------------------------------------------------------------------


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
    launched: Launched,
    count: int,
    most_steps: int,
    nodes: tuple[int, int, int],
) -> None:
    """Adding, drawing and updating: one launch where one block, or its last one, can do
    the rest.
    """
    num_rows = 1024 + (count + 2) * most_steps
    ring = Ring(
        kernels_on_host, num_rows, 1100, 0, most_steps, MassUnit.STEP, ALL_ANCHORS, True, True
    )
    assert 1024 < num_rows <= 1024 * 32  # three levels
    ring.add([1] * count)
    added = launched()
    resolutions, _ = ring.select(count, [1, 2, 1, 0, 0, Normalize.BATCH], [ONE_Q62])
    drawn = launched()
    ring.update(resolutions, torch.ones(count))
    assert tuple(map(len, (added, drawn, launched()))) == nodes
    ring.prioritized = False  # without weights there is nothing to do after all have been drawn
    ring.select(1500, [1, 2, 1, 0, 0, Normalize.NONE], [ONE_Q62])
    assert len(launched()) == 1


@pytest.mark.parametrize(
    ("count", "unit", "most_steps", "threads"),
    [
        (16, MassUnit.STEP, 1, 128),  # a warp for each scheduler
        (256, MassUnit.STEP, 1, 256),
        (40, MassUnit.STEP, 5, 224),
        (1, MassUnit.STEP, 16000, 1024),
        (300, MassUnit.TRAJECTORY, 50, 320),
    ],
)
def test_an_add_has_the_warps_that_it_needs(
    kernels_on_host: Ops,
    host_library: Path,
    launched: Launched,
    count: int,
    unit: int,
    most_steps: int,
    threads: int,
) -> None:
    """All of them execute the whole kernel."""
    rows = (count + 2) * most_steps
    ring = Ring(kernels_on_host, rows, count + 2, 0, most_steps, unit, ALL_ANCHORS, True)
    ring.add([1] * count)
    of_launches = (ctypes.c_uint * 10)()
    taken = ctypes.CDLL(str(host_library)).gear_host_threads(of_launches, len(of_launches))
    assert list(of_launches[:taken]) == [threads]
    assert len(launched()) == 1


def test_slots_that_are_not_aligned_to_vectors_are_refused(kernels_on_host: Ops) -> None:
    """They are written by 16 bytes; tensors of torch's allocators begin at multiples of 64."""
    ring = Ring(kernels_on_host, 99, 9, 0, 5, MassUnit.STEP, ALL_ANCHORS, True)
    ring.tensors["slots"] = at_offset(ring.slots, 8)
    with pytest.raises(RuntimeError, match="slots must be aligned to 16 bytes"):
        ring.add([1, 2])
    assert not ring.slots.any()


@pytest.mark.parametrize("added", [0, 100, 900])
def test_nodes_of_limited_draws_and_top_k(
    kernels_on_host: Ops, launched: Launched, added: int
) -> None:
    """As many in every table: a captured step is one graph, with anything to draw or nothing."""
    ring = Ring(kernels_on_host, 4000, 1000, 0, 4, MassUnit.TRAJECTORY, ALL_ANCHORS, True, True)
    ring.add([1] * added)
    launched()
    ring.ops.ring_select_limited_(
        *(
            ring.state,
            torch.zeros(200, 8, dtype=torch.int64),
            torch.zeros(200),
            ring.slots,
            ring.sums,
        ),
        *(ring.minima, torch.tensor([0]), ALL_ANCHORS, ring.shape, [1, 2, 1, 0, 0, 1], 0, 2),
    )
    assert launched() == [1]
    ring.top_k(200, [1, 2, 1, 0, 0, 0])
    assert len(launched()) == 21  # two memsets, four for the digits of a pass, four to sort


def test_nodes_of_steps(kernels_on_host: Ops, launched: Launched) -> None:
    """As the model of costs counts them: the plan, evictions, slots and items, and each level
    above.
    """
    ring = Environments(kernels_on_host, 33, (MassUnit.STEP, ALL_ANCHORS, True, True, 1), most=30)
    assert 1024 < ring.shape[0] <= 1024 * 32  # three levels
    ring.step(torch.zeros(33, dtype=torch.bool), None, None)
    assert len(launched()) == 3 + 2


# ---- steps of environments -----------------------------------------------------------------------


def flags(num_envs: int, share: float, generator: torch.Generator) -> Tensor:
    return torch.rand(num_envs, generator=generator) < share


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 1000),
    num_envs=st.sampled_from([1, 3, 33]),
    shares=st.tuples(st.sampled_from([0.0, 0.2, 0.9]), st.sampled_from([0.1, 0.9, 1.0])),
    next_step=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_steps_equal_the_reference(
    native: Ops,
    kind: tuple[Any, ...],
    seed: int,
    num_envs: int,
    shares: tuple[float, float],
    next_step: bool,
) -> None:
    """`shares` of the environments end, and take part in a call."""
    both = Both(*(Environments(ops, num_envs, kind) for ops in (model_of(native), native)))
    (ends, present) = shares
    generator = torch.Generator().manual_seed(seed)
    for turn in range(30):
        terminated = flags(num_envs, ends, generator)
        truncated = flags(num_envs, ends / 2, generator)
        mask = None if present == 1 else flags(num_envs, present, generator)
        both.step(terminated, None if turn % 5 == 0 else truncated, mask, next_step)
        if turn % 4 == 3:
            drawn, _ = both.select(20, [seed + turn, 1, 1, 0, 0, Normalize.BATCH], [ONE_Q62])
        if kind[2] and turn > 3 and turn % 4 < 2:  # late: a step that was an anchor may be none
            both.update(
                drawn, torch.rand(20, generator=torch.Generator().manual_seed(seed + turn)) * 4
            )
        if turn % 6 == 5:
            both.rings[0].check()
        both.assert_alike()


@pytest.mark.parametrize("num_envs", [1024, 1025])
def test_more_environments_than_threads_of_a_block(kernels: Ops, num_envs: int) -> None:
    kind = (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 1)
    both = Both(
        *(Environments(ops, num_envs, kind, most=2) for ops in (model_of(kernels), kernels))
    )
    generator = torch.Generator().manual_seed(num_envs)
    for _ in range(4):
        both.step(flags(num_envs, 0.4, generator), None, flags(num_envs, 0.8, generator))
    both.assert_alike()


def test_an_open_trajectory_is_never_evicted_while_all_environments_step(cpu: Ops) -> None:
    """One environment has longest trajectories, the others ones of a step."""
    for final in (0, 1):
        kind = (MassUnit.STEP, ALL_ANCHORS, True, True, final)
        most = 7
        ring = Environments(cpu, 5, kind, most, part=most + final + (1 + final) * (most + 1))
        for turn in range(200):
            terminated = torch.ones(5, dtype=torch.bool)
            terminated[2] = False
            placed, _ = ring.step(terminated, None, None)
            assert placed[2, PlacedStep.STEP] == turn % most
            ring.check()
        assert ring.state[RingState.DROPPED] == 0
        lasts = ring.slots[ring.slots[:, Slot.NUM_STEPS] == most]
        ended = lasts[lasts[:, Slot.ID] != ring.tensors["opened"][2, OpenTrajectory.ID]]
        assert ring.truncations[ended[:, Slot.FIRST_ROW] + most - 1].all()


def test_an_environment_that_pauses_begins_another_trajectory(native: Ops) -> None:
    ring = Environments(native, 3, (MassUnit.STEP, ALL_ANCHORS, True, True, 1))
    never = torch.zeros(3, dtype=torch.bool)
    all_but_one = torch.tensor([True, False, True])
    ring.step(never, None, None)
    for _ in range(60):
        ring.step(never, None, all_but_one)
        ring.check()
    placed, begun = ring.step(never, None, None)
    assert placed[1, PlacedStep.STEP] == 0
    assert begun[1, 0] == placed[1, PlacedStep.SLOT] >= 0
    ring.check()


def test_a_step_whose_call_evicts_its_trajectory_is_dropped_and_counted(native: Ops) -> None:
    ring = Environments(native, 2, (MassUnit.STEP, ALL_ANCHORS, False, False, 0), most=4, part=8)
    never = torch.zeros(2, dtype=torch.bool)
    first = torch.tensor([True, False])
    ring.step(never, None, None)  # trajectories 0 and 1
    for _ in range(11):  # 0, 2 and 3, in the rows of 0
        ring.step(never, None, first)
    assert (ring.state[RingState.TAIL], ring.state[RingState.DROPPED]) == (1, 0)
    placed, _ = ring.step(
        torch.tensor([False, True]), None, None
    )  # 4, in the rows of 2: 1 is older
    assert placed[:, PlacedStep.SLOT].tolist() == [4, -1]
    assert (ring.state[RingState.TAIL], ring.state[RingState.DROPPED]) == (3, 1)
    assert ring.tensors["opened"][1, OpenTrajectory.ENDED] == 1
    ring.check()
    placed, _ = ring.step(never, None, None)
    assert placed[1, [PlacedStep.SLOT, PlacedStep.STEP]].tolist() == [5, 0]
    ring.check()

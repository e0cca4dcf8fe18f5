"""Epochs over a table in the memory of one device: every backend gives the reference's bits, and
every item once.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_kit import REFUSED, model_of, permute
from op_rings import ALL_ANCHORS, Both, Ring
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import MassUnit, Resolution, RingState

SOME_ANCHORS = [1, 1, 2, 3, 0]
FROM_THE_END = [1, 1, 2, 3, 1]
#: Unit of the items, anchors, and whether columns have a row more than steps.
KINDS = [
    (MassUnit.STEP, ALL_ANCHORS, 0),
    (MassUnit.STEP, SOME_ANCHORS, 1),
    (MassUnit.TRAJECTORY, FROM_THE_END, 1),
    (MassUnit.TRAJECTORY, ALL_ANCHORS, 0),
]
ALONE = [5, 3, 1, 0, 0, 0]  # seed, stream, stride, offset, shared, drops_tail


def ring_of(ops: Ops, kind: tuple[int, list[int], int], slots: int = 9, most: int = 7) -> Ring:
    unit, rule, final_row = kind
    num_rows = slots * (most + final_row) + 2 * most
    return Ring(ops, num_rows, slots, final_row, most, unit, rule, False)


def both_of(native: Ops, *sizes: Any) -> Both:
    return Both(ring_of(model_of(native), *sizes), ring_of(native, *sizes))


def items_of(records: Tensor) -> list[tuple[int, int]]:
    """The trajectory and the anchor of each sample."""
    return [tuple(row) for row in records[:, [Resolution.ID, Resolution.ANCHOR]].tolist()]


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(-1, 8), min_size=1, max_size=4)),
    st.tuples(st.just("full"), st.integers(1, 5)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 12), max_size=3, unique=True)),
    st.tuples(st.just("draw"), st.integers(1, 40)),
)
DRAWS = st.tuples(
    st.integers(0, 1 << 62), st.integers(0, 9), st.integers(1, 3), st.booleans(), st.booleans()
)


@pytest.mark.parametrize("kind", KINDS)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=12), how=DRAWS)
@settings(max_examples=30, deadline=None)
def test_equals_the_reference(
    native: Ops, kind: tuple[int, list[int], int], actions: list[Any], how: tuple[Any, ...]
) -> None:
    """With changes of the table inside an epoch, equal and unequal lengths, and no items at all."""
    seed, stream, stride, is_shared, drops_tail = how
    draw = [seed, stream, stride, stride - 1, int(is_shared), int(drops_tail)]
    both = both_of(native, kind)
    for what, number in actions:
        if what == "add":
            both.add(number)
        elif what == "full":
            both.add([7] * number)
        elif what == "remove":
            newest = int(both.state[RingState.NEXT])
            both.remove([newest - back for back in number])
        else:
            both.epoch(number, draw)
        both.assert_alike()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 4, 33])
def test_every_item_is_in_every_epoch_once(
    native: Ops, kind: tuple[int, list[int], int], count: int
) -> None:
    """In the order of the permutation over the items as the tree has them: lengths differ, then are
    equal, then go on round the end of the slots.
    """
    ring = ring_of(native, kind)
    begun = 0
    for lengths in ([1, 5, 7, 3, 4], [7] * 9, [7] * 4, [6, 7, 2]):
        ring.add(lengths)
        total = int(ring.sums[: ring.num_slots].sum())
        samples = list[tuple[int, int]]()
        epochs = list[int]()
        while len(samples) < 3 * total:
            records, of_epochs = ring.epoch(count, ALONE)
            samples += items_of(records)
            epochs += of_epochs.tolist()
        whole = [samples[turn * total : (turn + 1) * total] for turn in range(3)]
        assert epochs[: 3 * total] == [begun + turn for turn in range(3) for _ in range(total)]
        for turn in range(3):
            assert len({item[0] for item in whole[turn]}) == int(
                (ring.sums[: ring.num_slots] > 0).sum()
            )
            if ring.unit == MassUnit.STEP:
                assert sorted(whole[turn]) == sorted(set(whole[0]))
                assert len(set(whole[turn])) == total
        assert whole[0] != whole[1]
        if ring.unit == MassUnit.STEP:
            in_store_order = [
                (record[2], step)
                for slot, record in enumerate(ring.slots.tolist())
                for step in anchors_of(ring, record[4])
                if ring.sums[slot] > 0
            ]
            order = permute(ALONE[0], ALONE[1], begun, 0, total, total).tolist()
            assert whole[0] == [in_store_order[place] for place in order]
        begun = epochs[-1] + 1
    if count == 1:
        assert ring.state[RingState.EPOCHS_CUT] == 0


def anchors_of(ring: Ring, num_steps: int) -> list[int]:
    first, trim, stride, most, from_end = ring.rule
    found = list(range(first, num_steps - trim, stride))[:most]
    return [num_steps - 1 - step if from_end else step for step in found]


@pytest.mark.parametrize("lengths", [[5] * 37, [5, 1, 4] * 20])
@pytest.mark.parametrize("drops_tail", [0, 1])
def test_replicas_with_the_same_items_share_an_epoch(
    native: Ops, lengths: list[int], drops_tail: int
) -> None:
    """Their samples in turn are those of one replica: numbers, items and epochs."""
    kind = (MassUnit.STEP, ALL_ANCHORS, 0)
    replicas = 3
    alone = ring_of(native, kind, 64)
    parts = [ring_of(native, kind, 64) for _ in range(replicas)]
    for ring in (alone, *parts):
        ring.add(lengths)
    for _ in range(9):
        whole = alone.epoch(8 * replicas, [5, 3, 1, 0, 1, drops_tail])
        found = [
            part.epoch(8, [5, 3, replicas, replica, 1, drops_tail])
            for replica, part in enumerate(parts)
        ]
        for of_one, of_parts in zip(whole, zip(*found, strict=True), strict=True):
            assert torch.equal(of_one, torch.stack(of_parts, 1).flatten(0, 1))
        for part in parts:
            assert torch.equal(part.state, alone.state)


def test_replicas_with_items_of_their_own_never_share_an_order(native: Ops) -> None:
    orders = set[tuple[int, ...]]()
    for replica in range(3):
        ring = ring_of(native, (MassUnit.STEP, ALL_ANCHORS, 0), 16)
        ring.add([7] * 10)
        for epoch in range(4):
            records, epochs = ring.epoch(70, [5, 3, 3, replica, 0, 0])
            assert epochs.tolist() == [epoch] * 70
            numbers = records[:, Resolution.SAMPLE_NUMBER]
            assert numbers.tolist() == [(70 * epoch + i) * 3 + replica for i in range(70)]
            rows = records[:, Resolution.FIRST_ROW] + records[:, Resolution.ANCHOR]
            orders.add(tuple(rows.tolist()))
    assert len(orders) == 12


def test_a_change_of_the_table_ends_the_epoch(native: Ops) -> None:
    ring = ring_of(native, (MassUnit.STEP, ALL_ANCHORS, 0), 8, 4)
    ring.add([4] * 4)
    expected = [0, 0, 1, 2, 3, 4, 4]
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: ring.add([0, -1]),  # adds nothing
        lambda: ring.add([3]),
        lambda: ring.remove([2]),
        lambda: ring.add([4] * 8),
        lambda: ring.add([4] * 8),  # evicts as many steps as it adds
        lambda: ring.remove([99]),  # not stored
    ]
    for change, cut in zip(changes, expected, strict=True):
        change()
        _, epochs = ring.epoch(5, ALONE)
        assert epochs.tolist() == [cut] * 5
        assert ring.state[RingState.EPOCHS_CUT] == cut
        total = int(ring.sums[: ring.num_slots].sum())
        assert ring.state[RingState.EPOCH_SIZE] == total
    # One that ends where the table changes is not cut.
    while int(ring.state[RingState.SAMPLES] - ring.state[RingState.EPOCH_FIRST]) % total:
        ring.epoch(1, ALONE)
    ring.add([4] * 8)
    ring.epoch(5, ALONE)
    assert ring.state[RingState.EPOCHS_CUT] == cut


def test_a_tail_that_fills_no_batch_is_left_out(native: Ops) -> None:
    drops = [*ALONE[:5], 1]
    ring = ring_of(native, (MassUnit.STEP, ALL_ANCHORS, 0), 8, 4)
    ring.add([4] * 4)
    ends = []
    for turn in range(5):
        records, epochs = ring.epoch(7, drops)
        assert epochs.tolist() == [turn // 2] * 7
        assert len(set(items_of(records))) == 7
        ends.append(int(records[0, Resolution.SAMPLE_NUMBER]))
    assert ends == [0, 7, 16, 23, 32]
    assert ring.state[RingState.EPOCHS_CUT] == 0
    state = ring.state.clone()
    records, epochs = ring.epoch(17, drops)  # more than an epoch has
    assert (records[:, :2] == Resolution.NO_SAMPLE).all()
    assert epochs.tolist() == [2] * 17
    state[RingState.EMPTY] += 1
    state[RingState.TOTAL] = 0
    assert torch.equal(ring.state, state)


def test_what_cannot_be_is_refused(cpu: Ops) -> None:
    ring = ring_of(cpu, (MassUnit.STEP, ALL_ANCHORS, 0))
    ring.add([7] * 3)
    for draw in ([5, 3, 1, 0, 0], [5, 3, 0, 0, 0, 0], [5, 3, 2, 2, 0, 0], [5, 3, 2, -1, 0, 0]):
        with pytest.raises(REFUSED, match="seed, stream, stride, offset, shared and drops_tail"):
            ring.epoch(4, draw)
    memory = (ring.state, ring.zeros(4, 8), ring.zeros(3), ring.slots, ring.sums)
    with pytest.raises(REFUSED, match="epochs must have 4 values, got 3"):
        ring.ops.ring_epoch_(*memory, ring.rule, ring.shape, ALONE, ring.unit)
    assert not ring.state[RingState.EPOCH_SIZE]


# ---- large tables, and how orders are distributed ------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1), (1, 3), (2, 1), (255, 1), (257, 1), (1000, 33), (1 << 17, 9)]
)
def test_sizes_from_one_item_to_more_than_2_20(cpu: Ops, slots: int, most: int) -> None:
    ring = ring_of(cpu, (MassUnit.STEP, ALL_ANCHORS, 0), slots, most)
    for _ in range(2):
        ring.add([most] * slots)
    total = slots * most
    for epoch in range(2):
        records, epochs = ring.epoch(total, ALONE)
        assert epochs.tolist() == [epoch] * total
        rows = records[:, Resolution.FIRST_ROW] + records[:, Resolution.ANCHOR]
        assert len(rows.unique()) == total


@pytest.mark.parametrize("added", [[9] * 4000, [9, 1, 5] * 1500])
def test_a_large_batch_over_several_blocks(kernels: Ops, added: list[int]) -> None:
    """Equal lengths, which need no tree, and others; the batch is more than an epoch."""
    both = both_of(kernels, (MassUnit.STEP, ALL_ANCHORS, 1), 4600, 9)
    both.add(added[:600])
    both.epoch(300, ALONE)
    both.add(added)
    both.epoch(3000, ALONE)
    both.epoch(40_000, ALONE)
    both.assert_alike()


def test_nodes_of_epochs(kernels_on_host: Ops, launched: Callable[[], list[int]]) -> None:
    """One launch, with as many blocks for any content: a captured step is one graph."""
    ring = ring_of(kernels_on_host, (MassUnit.STEP, ALL_ANCHORS, 0), 900, 4)
    for added in ([], [4] * 900, [1, 2] * 30):
        if added:
            ring.add(added)
        launched()
        ring.epoch(1000, ALONE)
        assert launched() == [4]


def chi_square(counts: Counter[Any], num_cells: int, total: int) -> float:
    expected = total / num_cells
    seen = sum((count - expected) ** 2 for count in counts.values())
    return (seen + (num_cells - len(counts)) * expected**2) / expected


def test_first_items_and_pairs_are_uniform_over_seeds(cpu: Ops) -> None:
    """Over seeds and epochs, of 8 items: small tables walk along the network's cycles most."""
    first = Counter[int]()
    pairs = Counter[tuple[int, int]]()
    last = Counter[int]()
    turns = 6000
    ring = ring_of(cpu, (MassUnit.STEP, ALL_ANCHORS, 0), 2, 4)
    ring.add([4] * 2)
    for seed in range(turns // 4):
        ring.state[RingState.EPOCH_SIZE] = 0
        ring.state[RingState.EPOCH] = 0
        for _ in range(4):
            records, _ = ring.epoch(8, [seed, *ALONE[1:]])
            rows = (records[:, Resolution.FIRST_ROW] + records[:, Resolution.ANCHOR]).tolist()
            first[rows[0]] += 1
            last[rows[-1]] += 1
            pairs[rows[0], rows[1]] += 1
    # The 0.001 quantiles of chi-square with 7 and 55 degrees of freedom are 24.3 and 93.2.
    assert chi_square(first, 8, turns) < 24.3
    assert chi_square(last, 8, turns) < 24.3
    assert chi_square(pairs, 56, turns) < 93.2

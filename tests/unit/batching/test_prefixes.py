"""Shared prefixes: what is shared, the order of a pack, and which places see a place."""

from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.batching.pack_rows import PackShape
from deepspeed_gear.batching.prefixes import CommonPrefixes, Prefixes, shareable_steps

ALL = 1 << 40
Tree = tuple[list[list[int]], list[int], list[int]]


@st.composite
def trees(draw: Any) -> Tree:
    """Return trajectories of few different tokens that leave each other, their items and bounds."""
    made: list[list[int]] = []
    items: list[int] = []
    for item in range(draw(st.integers(1, 3))):
        of_item: list[list[int]] = [[]]
        for _ in range(draw(st.integers(1, 9))):
            before = draw(st.sampled_from(of_item))
            before = before[: draw(st.sampled_from([1, 3, 5, None, None]))]
            more = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
            of_item.append(before + more)
        made += of_item[1:]
        items += [item] * (len(of_item) - 1)
    bounds = [draw(st.integers(0, len(one) - 1)) for one in made]
    return made, items, bounds


def equal_steps(one: list[int], other: list[int]) -> int:
    """Return the number of first steps that two trajectories have in common."""
    differ = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return differ[0] if differ else min(len(one), len(other))


def common_of(tree: Tree) -> CommonPrefixes:
    made, items, bounds = tree
    order = sorted(range(len(made)), key=lambda i: (items[i], made[i]))
    common = [0]
    for before, after in pairwise(order):
        is_same = items[before] == items[after]
        common.append(equal_steps(made[before], made[after]) if is_same else 0)
    return CommonPrefixes(*(np.array(values) for values in (order, common, bounds)))


def lengths_of(tree: Tree) -> np.ndarray:
    return np.array([len(one) for one in tree[0]])


def check_steps(prefixes: Prefixes, tree: Tree) -> None:
    """Check that what is shared is equal, may be shared, and belongs to the leader."""
    made, items, bounds = tree
    for i, (steps, leader) in enumerate(zip(*map(np.ndarray.tolist, prefixes), strict=True)):
        assert (leader == i) == (steps == 0)
        assert items[leader] == items[i]
        assert steps <= bounds[i]
        assert leader == i or (bounds[leader], leader) < (bounds[i], i)
        assert made[leader][: steps + bool(steps)] == made[i][: steps + bool(steps)]
        assert not steps or steps > prefixes.steps[leader]


@given(trees())
@settings(max_examples=300)
def test_a_trajectory_shares_the_most_that_an_earlier_bound_admits(tree: Tree) -> None:
    made, items, bounds = tree
    prefixes = common_of(tree).share(lengths_of(tree), len(made), ALL)
    check_steps(prefixes, tree)
    for i, one in enumerate(made):
        before = [
            min(equal_steps(one, made[j]) - 1, bounds[i])
            for j in range(len(made))
            if items[j] == items[i] and (bounds[j], j) < (bounds[i], i)
        ]
        assert prefixes.steps[i] == max([0, *before])


@given(trees())
@settings(max_examples=200)
def test_no_other_order_of_trajectories_shares_more(tree: Tree) -> None:
    """Of all orders of up to five trajectories, each of which shares with those before it."""
    (made, items, bounds) = tree
    made = made[: min(5, items.count(0))]
    tree = (made, [0] * len(made), bounds[: len(made)])
    most = 0
    for order in permutations(range(len(made))):
        shared = 0
        for at, i in enumerate(order):
            common = [equal_steps(made[i], made[j]) for j in order[:at]]
            shared += max([0, *(min(steps - 1, bounds[i]) for steps in common)])
        most = max(most, shared)
    prefixes = common_of(tree).share(lengths_of(tree), len(made), ALL)
    assert prefixes.steps.sum() == most


@given(trees(), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=300)
def test_bundles_have_their_size_and_places(tree: Tree, size: int, more: int) -> None:
    lengths = lengths_of(tree)
    most = int(lengths.max()) + more
    prefixes = common_of(tree).share(lengths, size, most)
    check_steps(prefixes, tree)
    roots = prefixes.roots()
    assert (prefixes.leader[roots] == roots).all()
    assert np.bincount(roots).max() <= size
    assert np.bincount(roots, lengths - prefixes.steps).max() <= most


def test_a_bundle_is_cut_where_its_trajectories_have_least_in_common() -> None:
    """Or ends at its limit, where all have as much in common. Places are counted after the last one
    was added: the first one here, of a high bound, shares with the second.
    """
    made = [[1, 2], [1, 3, 4, 4, 5], [1, 3, 4, 4, 6], [1, 5]]
    tree = (made, [0] * 4, [1, 3, 4, 1])
    cut = common_of(tree).share(lengths_of(tree), 2, ALL)
    assert (cut.steps.tolist(), cut.leader.tolist()) == ([0, 0, 3, 0], [0, 1, 1, 3])
    equal = ([[1, 2, number] for number in range(5)], [0] * 5, [1] * 5)
    cut = common_of(equal).share(lengths_of(equal), 3, ALL)
    assert cut.leader.tolist() == [0, 0, 0, 3, 3]
    pair = ([[1] * 5 + [2] * 5, [1] * 5 + [3]], [0, 0], [8, 1])
    for most, steps in ((12, [4, 0]), (11, [0, 0])):
        assert common_of(pair).share(lengths_of(pair), 2, most).steps.tolist() == steps


@given(trees(), st.randoms(use_true_random=False))
def test_some_trajectories_have_in_common_what_they_had_among_all(tree: Tree, words: Any) -> None:
    (made, items, _) = tree
    which = words.sample(range(len(made)), words.randint(1, len(made)))
    found = common_of(tree).of(np.array(which))
    part = tuple([values[i] for i in which] for values in tree)
    order = found.order.tolist()
    assert sorted(order) == list(range(len(which)))
    for at in range(1, len(order)):
        before, after = (which[order[at - 1]], which[order[at]])
        wanted = equal_steps(made[before], made[after]) if items[before] == items[after] else 0
        assert found.common[at] == wanted
    assert found.common[0] == 0
    check_steps(found.share(lengths_of(part), len(which), ALL), part)  # type: ignore[arg-type]


@given(trees(), st.integers(0, 3))
@settings(max_examples=300)
def test_the_last_place_of_a_trajectory_sees_its_steps(tree: Tree, padding: int) -> None:
    """And each other place those before it, in the order of the pack."""
    made = tree[0]
    lengths = lengths_of(tree)
    every = common_of(tree).share(lengths, len(made), ALL)
    pack = np.argsort(every.order())
    prefixes = every.of(pack)
    assert (prefixes.leader <= np.arange(len(pack))).all()
    num_places = int((lengths - every.steps).sum())
    shape = PackShape(lengths[pack], num_places + padding, 0, num_places + padding, prefixes)
    tokens = np.full(num_places, -1)
    for number, i in enumerate(pack):
        own = slice(shape.starts[number], shape.ends[number])
        tokens[own] = made[i][prefixes.steps[number] :]
    until = shape.seen_until()
    places = np.arange(shape.rows)
    sees = (places[None, :] <= places[:, None]) & (places[:, None] < until[None, :])
    positions = shape.positions()
    for number, i in enumerate(pack):
        own = shape.places(number)
        assert tokens[own].tolist() == made[i]
        assert positions[own].tolist() == list(range(len(made[i])))
        for step in range(int(prefixes.steps[number]), len(made[i])):
            assert np.flatnonzero(sees[own[step]]).tolist() == own[: step + 1].tolist()
    assert (sees[num_places:, num_places:] == np.tri(padding, dtype=bool)).all()
    assert not sees[num_places:, :num_places].any()


def test_turns_without_their_reasoning_share_all_but_their_own_answers() -> None:
    """Each prompt repeats the one before it, without the last reasoning; in any order."""
    contexts = [list(range(10))]
    made = []
    for turn in range(4):
        made.append([*contexts[-1], *([100 + turn] * 20), *([200 + turn] * 5)])
        contexts.append([*contexts[-1], *([200 + turn] * 5), *([300 + turn] * 3)])
    bounds = [len(context) - 1 for context in contexts[:-1]]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        tree = ([made[i] for i in order], [0] * 4, [bounds[i] for i in order])
        prefixes = common_of(tree).share(lengths_of(tree), 4, ALL)
        of_turns = prefixes.steps[np.argsort(order)].tolist()
        assert of_turns == [0, 9, 17, 25]
    alone = CommonPrefixes(np.arange(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert alone.longest_run == 0


@pytest.mark.parametrize("count", [1, 2000])
def test_a_chain_is_as_deep_as_it_is_long(count: int) -> None:
    """Each trajectory leaves the one before it one step later."""
    made = [[0] * i + [1] for i in range(1, count + 1)]
    tree = (made, [0] * count, [len(one) - 1 for one in made])
    prefixes = common_of(tree).share(lengths_of(tree), count, ALL)
    assert prefixes.steps.tolist() == [0, *range(count - 1)][:count]
    assert (prefixes.roots()[1:] == 1).all()  # the first two have one step in common
    assert prefixes.order().tolist() == list(range(count))
    lengths = lengths_of(tree)
    shape = PackShape(lengths, int((lengths - prefixes.steps).sum()), 0, 0, prefixes)
    assert len(shape.places(count - 1)) == count + 1


def test_steps_before_the_first_loss_place_may_be_shared() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1], bool)
    starts = np.array([0, 4, 7])
    lengths = np.array([4, 3, 1])
    assert shareable_steps(mask, starts, lengths).tolist() == [2, 2, 0]

"""Items with priorities: as they come and go, their masses and their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from priority_cases import LENGTHS, ONE, Item, cut, report, stored
from store_support import check_whole

from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import Resolution, UpdateCount
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.anchors import AnchorRule
from deepspeed_gear.sampling.priority_masses import WINDOW
from deepspeed_gear.store.records import Head

# ---- items come and go ---------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_new_items_begin_at_the_highest_priority(scenes: Any, unit: str) -> None:
    scene = scenes(unit=unit)
    stream = scene.streams[0]
    cut(stream, 0)
    assert stored(stream, [(0, 0), (3, 0)]) == [1, 1]
    report(stream, [(0, 0), (1, 0)], [6.5, 0.25])
    cut(stream, 1)
    scene.add(2)
    assert stored(stream, [(5, 0)]) == [0]
    cut(stream, 2)
    assert stored(stream, [(5, 0), (0, 0), (1, 0), (2, 0)]) == [6.5, 6.5, 0.25, 1]
    report(stream, [(0, 0)], 0.1)
    cut(stream, 3)
    scene.add(1)
    cut(stream, 4)
    assert stored(stream, [(6, 0)]) == [6.5], "the highest that was ever reported"
    check_whole(scene.table, scene.streams)


def test_new_items_begin_at_the_given_priority(scenes: Any) -> None:
    scene = scenes(initial=0.5)
    stream = scene.streams[0]
    report(stream, [(0, 0)], 100)
    cut(stream, 0)
    scene.add(2)
    cut(stream, 1)
    assert stored(stream, [(0, 0), (0, 1), (5, 0)]) == [100, 0.5, 0.5]


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_items_that_are_gone_have_no_mass(scenes: Any, unit: str) -> None:
    scene = scenes(unit=unit, batch=500)
    stream = scene.streams[0]
    assert set(cut(stream, 0).resolutions[:, 0].tolist()) == set(range(5))
    table_access.remove(scene.table, [1, 3])
    scene.add(4)
    assert set(cut(stream, 1).resolutions[:, 0].tolist()) == {0, 2, 4, 5}
    num_items = 4 if unit == "trajectory" else 3 + 7 + 5 + 4
    assert stream.masses.counts[UpdateCount.DRAWABLE] == num_items
    assert stream.masses.total == num_items * ONE
    check_whole(scene.table, scene.streams)


def test_rows_that_are_used_again_have_only_their_new_items(scenes: Any) -> None:
    scene = scenes(lengths=[9, 9], sizes={"num_slots": 2, "num_rows": 20}, batch=100)
    stream = scene.streams[0]
    for round_ in range(6):
        key = 2 * round_
        cut(stream, key)
        report(stream, [(round_ + 1, 0)], 5)
        table_access.remove(scene.table, [round_])
        cut(stream, key + 1)
        scene.add(1 + round_)
        check_whole(scene.table, scene.streams)
    found = cut(stream, 12).resolutions
    assert set(found[:, 0].tolist()) == {6, 7}


@pytest.mark.parametrize("rule", [AnchorRule.every(3), AnchorRule.end(), AnchorRule(first=2, trim=1)])
def test_only_anchors_are_items(scenes: Any, rule: AnchorRule) -> None:
    scene = scenes(anchors=rule, batch=400)
    stream = scene.streams[0]
    found = cut(stream, 0).resolutions
    places = {
        (number, step)
        for number, steps in enumerate(LENGTHS)
        for step in range(steps)
        if rule.admits(np.array([step]), np.array([steps]))[0]
    }
    assert {(int(r[0]), int(r[5])) for r in found} == places
    assert stream.masses.counts[UpdateCount.DRAWABLE] == len(places)
    check_whole(scene.table, scene.streams)


def test_an_item_of_priority_zero_is_not_drawn(scenes: Any) -> None:
    stream = scenes(unit="trajectory", batch=300).streams[0]
    report(stream, [(0, 0), (2, 0), (4, 0)], [0.0, -0.0, 0.0])
    assert set(cut(stream, 0).resolutions[:, 0].tolist()) == {1, 3}
    report(stream, [(0, 0)], 1e-30)
    cut(stream, 1)
    assert stream.masses.leaves[0] == 1


def test_no_priority_left_is_an_error_that_passes(scenes: Any) -> None:
    stream = scenes(unit="trajectory").streams[0]
    everything = [(number, 0) for number in range(5)]
    report(stream, everything, 0)
    stream.state.ask(0)
    for _ in range(2):
        with pytest.raises(StoreError, match="must hold at least one item that the sampler admits"):
            stream.get(0)
    report(stream, everything[1:2], 3)  # belongs to batch 0, which cannot be made: nothing is left to draw
    with pytest.raises(StoreError, match="must hold at least one item"):
        stream.get(0)


# ---- masses and weights --------------------------------------------------------------------------


def powers(stream: Any, items: list[Item], alpha: float) -> np.ndarray:
    return np.array(stored(stream, items), np.float64) ** alpha


def test_a_change_of_alpha_computes_all_masses_again(scenes: Any) -> None:
    scene = scenes(alpha=lambda key: max(0.0, 1 - key / 4), normalize="table")
    stream = scene.streams[0]
    items = [(3, step) for step in range(33)]
    report(stream, items, np.random.default_rng(0).uniform(0.01, 50, 33))
    for key in range(7):
        cut(stream, key)
        check_whole(scene.table, scene.streams)
        rows = scene.table.slots[3, 3] + np.arange(33)
        wanted = powers(stream, items, max(0.0, 1 - key / 4)) * ONE
        assert np.abs(stream.masses.leaves[rows] - wanted).max() <= 1
        assert stream.masses.least == stream.masses.leaves[stream.masses.leaves > 0].min()


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("normalize", ["batch", "table", None])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.3, 0.0)])
def test_weights_are_those_of_the_formula(
    scenes: Any, normalize: Any, unit: str, alpha: float, beta: float
) -> None:
    """(N * P(i)) ** -beta with P(i) = p_i ** alpha / sum, in float64; divided by the greatest one."""
    lengths = [3] * 12 if unit == "step" else [2] * 36  # 36 items: minima of two levels
    scene = scenes(unit=unit, lengths=lengths, alpha=alpha, beta=beta, normalize=normalize, batch=16)
    stream = scene.streams[0]
    items = [(n, a) for n, steps in enumerate(lengths) for a in range(steps if unit == "step" else 1)]
    report(stream, items, np.random.default_rng(1).uniform(0.5, 30, 36))
    report(stream, items[:5], 0)
    made = cut(stream, 0)
    weights = torch.empty(16)
    words = [int(made.head[word]) for word in (Head.NUMERATOR, Head.DIVISOR, Head.EXPONENT)]
    scene.ops.importance_(weights, made.resolutions.contiguous(), *words)
    share = powers(stream, items, alpha) * np.array([p > 0 for p in stored(stream, items)])
    share /= share.sum()
    everything = (31 * share[5:]) ** -beta
    place = {item: i for i, item in enumerate(items)}
    drawn = [place[int(r[0]), int(r[5]) if unit == "step" else 0] for r in made.resolutions]
    wanted = (31 * share[drawn]) ** -beta
    if normalize is not None:
        wanted /= wanted.max() if normalize == "batch" else everything.max()
        assert weights.max() <= 1
    np.testing.assert_allclose(weights.numpy(), wanted, rtol=1e-6)


def test_beta_follows_its_schedule(scenes: Any) -> None:
    stream = scenes(beta=lambda key: key / 8).streams[0]
    assert [int(cut(stream, key).head[Head.EXPONENT]) for key in range(9)] == [
        ONE_Q62 // 8 * k for k in range(9)
    ]


@pytest.mark.parametrize("most_bits", [40, 30])
def test_clamped_updates_are_counted(scenes: Any, most_bits: int) -> None:
    stream = scenes(alpha=1.0, log_size=10_000, most_bits=most_bits).streams[0]
    items = [(3, step) for step in range(33)]
    report(stream, items, 1e30)
    masses = stream.masses
    made = cut(stream, 0).resolutions
    assert (masses.leaves[masses.leaves > ONE] == 1 << most_bits).all()
    assert (made[made[:, 0] == 3][:, Resolution.MASS] == 1 << most_bits).all()
    assert (masses.counts[UpdateCount.CLAMPED], masses.recent()) == (33, (33, 33))
    for key in range(1, WINDOW):
        report(stream, items[:1], 2)
        cut(stream, key)
    assert masses.recent() == (33 + WINDOW - 1, 33)
    cut(stream, WINDOW)  # the first one is no longer among the latest
    assert masses.recent() == (WINDOW - 1, 0)
    assert masses.statistics()["priorities_clamped"] == 33
    check_whole(stream.table, [stream])


def test_the_resolutions_hold_the_masses(scenes: Any) -> None:
    stream = scenes(batch=300, alpha=1.0).streams[0]
    report(stream, [(3, step) for step in range(33)], np.arange(1, 34))
    made = cut(stream, 0).resolutions
    for number, anchor, mass in made[:, [0, 5, Resolution.MASS]].tolist():
        assert mass == (anchor + 1 if number == 3 else 1) * ONE

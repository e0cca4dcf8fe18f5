"""Items with priorities: anchors, weights, clamped masses; test_priority_machine.py has
all else.
"""

from typing import Any

import numpy as np
import pytest
import torch
from priority_cases import LENGTHS, ONE, cut, report, stored
from store_support import check_whole

from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import Resolution, UpdateCount
from deepspeed_gear.sampling.mass_rules import AnchorRule
from deepspeed_gear.sampling.priority_masses import WINDOW
from deepspeed_gear.store.records import Head


@pytest.mark.parametrize(
    "rule", [AnchorRule(stride=3), AnchorRule(most=1, from_end=1), AnchorRule(first=2, trim=1)]
)
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


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("normalize", ["batch", "table", None])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.3, 0.0)])
def test_weights_are_those_of_the_formula(
    scenes: Any, normalize: Any, unit: str, alpha: float, beta: float
) -> None:
    """(N * P(i)) ** -beta with P(i) = p_i ** alpha / sum, in float64; divided by the
    greatest one.
    """
    lengths = [3] * 12 if unit == "step" else [2] * 36  # 36 items: minima of two levels
    scene = scenes(
        unit=unit, lengths=lengths, alpha=alpha, beta=beta, normalize=normalize, batch=16
    )
    stream = scene.streams[0]
    items = [
        (n, a) for n, steps in enumerate(lengths) for a in range(steps if unit == "step" else 1)
    ]
    report(stream, items, np.random.default_rng(1).uniform(0.5, 30, 36))
    report(stream, items[:5], 0)
    made = cut(stream, 0)
    weights = torch.empty(16)
    words = [int(made.head[word]) for word in (Head.NUMERATOR, Head.DIVISOR, Head.EXPONENT)]
    scene.ops.importance_(weights, made.resolutions.contiguous(), *words)
    priorities = np.array(stored(stream, items), np.float64)
    share = priorities**alpha * (priorities > 0)
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
    stream = scenes(beta=lambda number: number / 8).streams[0]
    assert [int(cut(stream, number).head[Head.EXPONENT]) for number in range(9)] == [
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
    for number in range(1, WINDOW):
        report(stream, items[:1], 2)
        cut(stream, number)
    assert masses.recent() == (33 + WINDOW - 1, 33)
    cut(stream, WINDOW)  # the first one is no longer among the latest
    assert masses.recent() == (WINDOW - 1, 0)
    assert masses.statistics()["priorities_clamped"] == 33
    check_whole(stream.table, [stream])

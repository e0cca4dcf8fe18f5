"""Which steps may anchor a sample: counts and places, against lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.ops.reference.select import anchor_at, num_anchors
from deepspeed_gear.sampling.anchors import AnchorRule, WindowSpan

LENGTHS = np.array([1, 2, 7, 32, 33, 100])


def places(rule: AnchorRule, num_steps: int) -> list[int]:
    """Return every anchor that the ops can choose."""
    count = int(rule.num_anchors(np.array([num_steps]))[0])
    steps = torch.full((count,), num_steps)
    assert num_anchors(rule.as_list(), torch.tensor([num_steps])).tolist() == [count]
    return anchor_at(rule.as_list(), steps, torch.arange(count)).tolist()


@pytest.mark.parametrize("num_steps", LENGTHS.tolist())
def test_plain_rules(num_steps: int) -> None:
    assert places(AnchorRule.all(), num_steps) == list(range(num_steps))
    assert places(AnchorRule.start(), num_steps) == [0]
    assert places(AnchorRule.end(), num_steps) == [num_steps - 1]


@pytest.mark.parametrize("k", [1, 2, 7, 33, 1000])
@pytest.mark.parametrize("num_steps", LENGTHS.tolist())
def test_every(num_steps: int, k: int) -> None:
    assert places(AnchorRule.every(k), num_steps) == list(range(0, num_steps, k))


windows = st.builds(WindowSpan, st.integers(-12, 12), st.integers(1, 12), st.integers(0, 1))


@given(st.lists(windows, min_size=1, max_size=4), st.integers(1, 40))
def test_fits_is_exact(reaches: list[WindowSpan], num_steps: int) -> None:
    """Admit an anchor if and only if no window has a step outside its trajectory."""
    exact = [
        anchor
        for anchor in range(num_steps)
        if all(
            anchor + r.offset >= 0 and anchor + r.offset + r.length <= num_steps + r.extra for r in reaches
        )
    ]
    assert places(AnchorRule.fits(reaches), num_steps) == exact


def test_fits_nothing_is_all() -> None:
    assert places(AnchorRule.fits([]), 5) == [0, 1, 2, 3, 4]


def test_counts_are_vectorised() -> None:
    assert AnchorRule.fits([WindowSpan(-3, 4, 0)]).num_anchors(LENGTHS).tolist() == [0, 0, 4, 29, 30, 97]
    assert AnchorRule.every(32).num_anchors(LENGTHS).tolist() == [1, 1, 1, 1, 2, 4]

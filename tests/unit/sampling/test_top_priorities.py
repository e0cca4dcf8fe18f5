"""The items of highest priority over shards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.sampling.priority_masses import merge_highest


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), max_size=4), st.data())
def test_the_highest_priorities_of_all_shards(
    shards: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Shards hold different trajectories, each of them with any number of items."""
    items = [(-p, len(shards) * t + s, i, s) for s, own in enumerate(shards) for i, (p, t) in enumerate(own)]
    count = data.draw(st.integers(0, len(items) + 2))
    every = [(s, i, p, len(shards) * t + s) for s, own in enumerate(shards) for i, (p, t) in enumerate(own)]
    values, ids = (np.array([item[word] for item in every]) for word in (2, 3))
    chosen = merge_highest(values.astype(np.float32), ids, count)
    expected = [(s, i) for _, _, i, s in sorted(items)[:count]]
    assert [every[at][:2] for at in chosen.tolist()] == expected

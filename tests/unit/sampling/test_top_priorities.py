"""The items of highest priority over shards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.sampling.priority_masses import merge_by_id


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), max_size=4), st.data())
def test_the_highest_priorities_of_all_shards(
    shards: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Shards hold different trajectories, each of them with any number of items."""
    items = [(-p, len(shards) * t + s, i, s) for s, own in enumerate(shards) for i, (p, t) in enumerate(own)]
    count = data.draw(st.integers(0, len(items) + 2))
    priorities = [np.array([p for p, _ in own], np.float32) for own in shards]
    ids = [np.array([len(shards) * t + s for _, t in own], np.int64) for s, own in enumerate(shards)]
    if not shards:
        return
    shard, index = merge_by_id(priorities, ids, count)
    expected = [(s, i) for _, _, i, s in sorted(items)[:count]]
    assert list(zip(shard.tolist(), index.tolist(), strict=True)) == expected

"""Mixtures: whole numbers of samples next to the shares, and parts that make up the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.mixture import Mixture


def mixture(shares: list[float], batch: int) -> Mixture:
    names = [str(i) for i in range(len(shares))]
    return Mixture(names, [lambda _, s=s: s for s in shares], batch)  # type: ignore[misc]


def normalised(weights: list[int]) -> list[float]:
    return [w / sum(weights) for w in weights]


SHARES = st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any).map(normalised)


@settings(deadline=None)
@given(SHARES, st.integers(1, 200))
def test_exact_counts_are_next_to_the_shares(shares: list[float], batch: int) -> None:
    mine = mixture(shares, batch)
    counts = mine.counts(3)
    assert counts.sum() == batch
    assert (np.abs(counts - np.array(shares) * batch) < 1).all()
    assert [mine.count(table, 3) for table in range(len(shares))] == counts.tolist()


@settings(deadline=None)
@given(SHARES, st.integers(1, 12), st.integers(1, 6))
def test_parts_make_up_the_whole(shares: list[float], micro: int, num_parts: int) -> None:
    mine = mixture(shares, micro * num_parts)
    parts = [mine.part(7, part, num_parts) for part in range(num_parts)]
    for table in range(len(shares)):
        together = np.concatenate([part[table] for part in parts])
        assert sorted(together.tolist()) == list(range(mine.count(table, 7)))
    assert {sum(len(chosen) for chosen in part) for part in parts} == {micro}


@settings(deadline=None)
@given(SHARES, st.integers(1, 40), st.integers(1, 6))
def test_each_part_has_its_part_of_each_table(shares: list[float], micro: int, num_parts: int) -> None:
    mine = mixture(shares, micro * num_parts)
    for table in range(len(shares)):
        counts = [len(mine.part(0, part, num_parts)[table]) for part in range(num_parts)]
        assert max(counts) - min(counts) <= 1


def test_shares_of_a_schedule_must_sum_to_one_at_every_batch() -> None:
    shares = [lambda n: 0.5, lambda n: 0.5 + 0.1 * (n > 3)]
    mine = Mixture(["a", "b"], shares, 10)
    assert mine.count(0, 3) == 5
    with pytest.raises(ConfigError, match=r"gear.sampler.shares at global batch 4 must sum to 1, got "):
        mine.counts(4)

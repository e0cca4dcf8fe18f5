"""Mixtures: whole numbers of samples next to the shares, and parts that make up the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.mixture import Mixture


def mixture(shares: list[float], batch: int) -> Mixture:
    names = [str(i) for i in range(len(shares))]
    return Mixture(names, [lambda _, s=s: s for s in shares], batch)


def normalised(weights: list[int]) -> list[float]:
    return [w / sum(weights) for w in weights]


SHARES = st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any).map(normalised)


@given(SHARES, st.integers(1, 40), st.integers(1, 60))
def test_each_table_has_its_share_within_a_sample_at_all_times(
    shares: list[float], batch: int, num_batches: int
) -> None:
    mine = mixture(shares, batch)
    counts = np.array([mine.counts(number) for number in range(num_batches)])
    assert (counts.sum(1) == batch).all()
    assert (counts >= 0).all()
    wanted = np.arange(1, num_batches + 1)[:, None] * batch * np.array(shares)
    assert (np.abs(counts.cumsum(0) - wanted) < 1 + 1e-9).all()
    other = mixture(
        shares, batch
    )  # as after a resume: counts do not depend on which batches were counted
    at = num_batches // 2
    assert [other.counts(number).tolist() for number in (at, num_batches - 1, at)] == [
        counts[number].tolist() for number in (at, num_batches - 1, at)
    ]
    assert [mine.count(table, at) for table in range(len(shares))] == counts[at].tolist()


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1),
    st.integers(1, 9),
)
def test_shares_that_change_hold_within_two_samples(weights: list[list[int]], batch: int) -> None:
    shares = np.array([normalised(row) for row in weights])
    mine = Mixture("abcd", [lambda n, t=t: shares[n, t] for t in range(4)], batch)
    counts = np.array([mine.counts(number) for number in range(len(shares))])
    assert (counts.sum(1) == batch).all()
    assert (counts >= 0).all()
    assert (np.abs(counts.cumsum(0) - batch * shares.cumsum(0)) < 2).all()


def test_counts_of_old_batches_are_computed_again() -> None:
    mine = mixture([0.05, 0.15, 0.8], 7)
    first = mine.counts(3).tolist()
    mine.counts(10_000)
    assert mine.counts(3).tolist() == first


@given(SHARES, st.integers(1, 40), st.integers(1, 6))
def test_parts_make_up_the_whole(shares: list[float], micro: int, num_parts: int) -> None:
    mine = mixture(shares, micro * num_parts)
    parts = [mine.part(7, part, num_parts) for part in range(num_parts)]
    for table in range(len(shares)):
        together = np.concatenate([part[table] for part in parts])
        assert sorted(together.tolist()) == list(range(mine.count(table, 7)))
        sizes = [len(part[table]) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert {sum(len(chosen) for chosen in part) for part in parts} == {micro}


def test_shares_of_a_schedule_must_sum_to_one_at_every_batch() -> None:
    shares = [lambda n: 0.5, lambda n: 0.5 + 0.1 * (n > 3)]
    mine = Mixture(["a", "b"], shares, 10)
    assert mine.count(0, 3) == 5
    with pytest.raises(
        ConfigError, match=r"gear.sampler.shares at global batch 4 must sum to 1, got "
    ):
        mine.counts(4)

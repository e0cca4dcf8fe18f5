"""Which trajectories are kept out of training."""

import numpy as np
import pytest

from deepspeed_gear.data.splits import TRAIN, split_of

IDS = np.arange(100_000)
GOLDEN = [23, 26, 29, 45, 50, 60, 113, 135, 156, 166, 167, 185, 188]


def test_membership_never_changes() -> None:
    # Checkpoints and statistics of existing data sets depend on these.
    assert np.nonzero(split_of(np.arange(200), {"eval": 0.05}))[0].tolist() == GOLDEN


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.999])
def test_fractions(fraction: float) -> None:
    count = int((split_of(IDS, {"eval": fraction}) == 1).sum())
    deviation = np.sqrt(len(IDS) * fraction * (1 - fraction))
    assert abs(count - len(IDS) * fraction) < 4 * deviation


def test_several_splits_are_disjoint_and_sorted_by_name() -> None:
    split = split_of(IDS, {"test": 0.1, "eval": 0.2})
    assert set(np.unique(split)) == {0, 1, 2}
    assert abs((split == 1).mean() - 0.2) < 0.01  # eval comes before test
    assert abs((split == 2).mean() - 0.1) < 0.01
    assert (split == split_of(IDS, {"eval": 0.2, "test": 0.1})).all()
    small = split_of(IDS, {"eval": 0.1}) == 1
    large = split_of(IDS, {"eval": 0.3}) == 1
    assert (large | ~small).all(), "a larger split holds the smaller one"


def test_membership_depends_on_the_id_alone() -> None:
    shuffled = np.random.default_rng(0).permutation(IDS)
    assert (split_of(shuffled, {"eval": 0.3}) == split_of(IDS, {"eval": 0.3})[shuffled]).all()
    assert (
        split_of(IDS[5000:5100], {"eval": 0.3}) == split_of(IDS, {"eval": 0.3})[5000:5100]
    ).all()


def test_ends_of_the_ranges() -> None:
    assert (split_of(IDS, {}) == TRAIN).all()
    assert split_of(np.zeros(0, np.int64), {"eval": 0.5}).shape == (0,)
    large = np.array([2**62, 2**62 + 1, 2**63 - 1], np.int64)
    assert (split_of(large, {"eval": 0.5}) == split_of(large[::-1], {"eval": 0.5})[::-1]).all()
    assert (split_of(IDS, {"a": 0.5, "b": 0.4999999999999999}) != TRAIN).all()

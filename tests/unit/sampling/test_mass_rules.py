"""The integer mass of each trajectory in a stream."""

import numpy as np
import pytest

from deepspeed_gear.data.splits import split_of
from deepspeed_gear.sampling.conditions import Condition
from deepspeed_gear.sampling.mass_rules import AnchorRule, MassRule, random_key_of

IDS = np.arange(6)
KEY_OF_MAIN_TRAIN = 48426439
STEPS = np.array([1, 2, 7, 33, 4, 4])
COLUMNS = {"a": np.array([1, 2, 3, 4, 5, 6]), "b": np.array([0, 1, 0, 1, 0, 1])}
BOTH = (Condition("a", 2, 5), Condition("b", among=(1,)))
FITS = AnchorRule.bounded([(-3, 4, 0)], 0, 0)  # 0, 0, 4, 30, 1, 1 anchors


@pytest.mark.parametrize(
    ("rule", "masses"),
    [
        (MassRule("trajectory", False, AnchorRule()), [1, 1, 1, 1, 1, 1]),
        (MassRule("trajectory", True, AnchorRule()), [1, 2, 7, 33, 4, 4]),
        (MassRule("step", False, AnchorRule()), [1, 2, 7, 33, 4, 4]),
        (MassRule("trajectory", False, FITS), [0, 0, 1, 1, 1, 1]),
        (MassRule("trajectory", True, FITS), [0, 0, 7, 33, 4, 4]),
        (MassRule("step", False, FITS), [0, 0, 4, 30, 1, 1]),
        (MassRule("step", False, AnchorRule(stride=4)), [1, 1, 2, 9, 1, 1]),
        (MassRule("step", False, AnchorRule(most=1, from_end=1)), [1, 1, 1, 1, 1, 1]),
        (MassRule("trajectory", False, AnchorRule(), BOTH), [0, 1, 0, 1, 0, 0]),
    ],
)
def test_masses(rule: MassRule, masses: list[int]) -> None:
    found = rule.masses(IDS, STEPS, COLUMNS.__getitem__)
    assert found.dtype == np.int64
    assert found.tolist() == masses


def test_large_weights_do_not_overflow() -> None:
    rule = MassRule("step", False, AnchorRule(), weight=("w", 24))
    weights = np.array([2.0**31, 2.0**32, 1e30], np.float32)
    found = rule.masses(np.arange(3), np.full(3, 256), lambda _: weights)
    assert found.tolist() == [2**62] * 3  # more than a total may be


def test_splits_part_the_masses() -> None:
    ids = np.arange(1000)
    steps = np.ones(1000, np.int64)
    split = {"eval": 0.2, "test": 0.1}
    parts = [
        MassRule("step", False, AnchorRule(), (), split, index).masses(
            ids, steps, COLUMNS.__getitem__
        )
        for index in range(3)
    ]
    assert (np.stack(parts).sum(axis=0) == 1).all()
    assert (np.argmax(parts, axis=0) == split_of(ids, split)).all()


@pytest.mark.parametrize(
    ("condition", "values", "passes"),
    [
        (Condition("c", 2, None), np.array([1.0, 2.0, 3.0, np.nan, np.inf]), [0, 1, 1, 0, 1]),
        (Condition("c", None, 2), np.array([1.0, 2.0, 3.0, np.nan, -np.inf]), [1, 1, 0, 0, 1]),
        (Condition("c", 2, 2), np.array([1, 2, 3]), [0, 1, 0]),
        (Condition("c", None, None, (1.5, 2.0)), np.array([1, 2, 3]), [0, 1, 0]),
        (Condition("c", None, None, (1.5, np.inf)), np.array([1, 2, 3], np.uint8), [0, 0, 0]),
        (Condition("c", None, None, (0.5, 2.0)), np.array([False, True]), [0, 0]),
        (Condition("c", None, None, (1.0,)), np.array([False, True]), [0, 1]),
        (Condition("c", -1, 300), np.array([0, 127, -128], np.int8), [1, 1, 0]),
        (Condition("c", among=(1, 3)), np.array([1, 2, 3]), [1, 0, 1]),
        (Condition("c", among=(300, 1)), np.array([44, 1], np.uint8), [0, 1]),
        (Condition("c", among=(2**53 + 1,)), np.array([2**53, 2**53 + 1, 2**53 + 2]), [0, 1, 0]),
        (Condition("c", 2**53 + 1, None), np.array([2**53, 2**53 + 1]), [0, 1]),
        (Condition("c", among=(0.1, 2)), np.array([0.1, 0.2, 2], np.float32), [1, 0, 1]),
        (Condition("c", 0.1, None), np.array([0.1, 0.09], np.float32), [1, 0]),
        (Condition("c", among=(True,)), np.array([True, False]), [1, 0]),
    ],
)
def test_conditions(condition: Condition, values: np.ndarray, passes: list[int]) -> None:
    assert condition.holds(values).tolist() == [bool(p) for p in passes]


def test_keys_of_streams() -> None:
    assert random_key_of("main", "train") == KEY_OF_MAIN_TRAIN  # resumed runs depend on it
    names = [
        (table, stream)
        for table in ("main", "online", "mainx")
        for stream in ("train", "eval", "xtrain")
    ]
    assert len({random_key_of(*pair) for pair in names}) == len(names)
    assert random_key_of("a", "bc") != random_key_of("ab", "c")
    assert all(0 <= random_key_of(*pair) < 2**32 for pair in names)

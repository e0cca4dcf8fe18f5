"""The op `plan_packs_`: C++ against the reference, and refusals of what lies outside its ranges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops

ANY = (1 << 31) - 1  # trajectories of a pack


def planned(ops: Ops, lengths: list[int], *arguments: int) -> tuple[Tensor, Tensor, Tensor]:
    given_lengths = torch.tensor(lengths, dtype=torch.int64)
    micro, rank, num_micro = torch.full((2 * len(lengths) + 1,), -7).split([len(lengths)] * 2 + [1])
    ops.plan_packs_(micro, rank, num_micro, given_lengths, *arguments)
    return micro, rank, num_micro


def assert_equal(reference: Ops, cpu: Ops, lengths: list[int], *arguments: int) -> None:
    for a, b in zip(planned(reference, lengths, *arguments), planned(cpu, lengths, *arguments), strict=True):
        assert torch.equal(a, b), (lengths, arguments)


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(0, 60),
    st.sampled_from([(1, 0), (0, 1), (30, 1), (1, 1000)]),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 60]),
)
def test_backends_are_equal(
    reference: Ops, cpu: Ops, lengths: list[int], room: int, cost: tuple[int, int], width: int, most: int
) -> None:
    tokens = max([*lengths, 1]) + room
    assert_equal(reference, cpu, lengths, tokens, *cost, width, most)


@settings(max_examples=30)
@given(
    st.sampled_from(["log-normal", "bimodal", "uniform", "equal", "tiny", "giant", "thirds", "pareto"]),
    st.integers(1, 500),
    st.sampled_from([1, 2, 8, 33]),
    st.integers(0, 1 << 30),
)
def test_backends_are_equal_for_real_distributions(
    reference: Ops, cpu: Ops, kind: str, count: int, width: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    lengths = {
        "log-normal": lambda: np.minimum(np.exp(random.normal(7.6, 0.9, count)).astype(int) + 100, 8192),
        "bimodal": lambda: random.choice([300, 301, 5000, 5001], count),
        "uniform": lambda: random.integers(1, 8192, count, endpoint=True),
        "equal": lambda: np.full(count, 1500),
        "tiny": lambda: random.integers(1, 40, count),
        "giant": lambda: np.append(random.integers(1, 900, count - 1), 8192),
        "thirds": lambda: random.integers(2600, 2860, count),
        "pareto": lambda: np.minimum(200 + (random.pareto(1.2, count) * 200).astype(int), 8192),
    }[kind]()
    # The budget that makes the fewest packs exactly full, and one with room.
    num_micro = int(random.integers(1, 20))
    full = max(-(-int(lengths.sum()) // (width * num_micro)), int(lengths.max()))
    for tokens in (full, full + full // 100 + 1, 4 * full, max(8192, full)):
        for most in (ANY, max(1, count // (width * num_micro))):
            assert_equal(reference, cpu, lengths.tolist(), tokens, 24576, 1, width, most)


def test_costs_up_to_the_largest_are_equal(reference: Ops, cpu: Ops) -> None:
    most = (1 << 31) - 1
    assert_equal(reference, cpu, [most], most, 1, 0, 1 << 10, ANY)
    assert planned(cpu, [most], most, 1, 0, 1 << 20, ANY)[2] == 1
    assert_equal(reference, cpu, [1] * 7, 3, (1 << 62) // 7, 0, 2, ANY)
    assert_equal(reference, cpu, [1 << 29, 1 << 29, 5, 1 << 28], most, 0, 7, 3, ANY)
    assert_equal(reference, cpu, [1, 1], 1, 0, (1 << 61) - 1, 1, ANY)


@pytest.mark.parametrize(
    ("lengths", "arguments", "text"),
    [
        ([3, 0], (9, 1, 0, 2, ANY), "length 1 must be in"),
        ([3, -1, 4], (9, 1, 0, 2, ANY), "length 1 must be in"),
        ([3, 10], (9, 1, 0, 2, ANY), "length 1 must be in"),
        ([3], (0, 1, 0, 2, ANY), "tokens must be in"),
        ([3], (1 << 31, 1, 0, 2, ANY), "tokens must be in"),
        ([3], (9, 1, 0, 0, ANY), "width must be in"),
        ([3], (9, 1, 0, (1 << 20) + 1, ANY), "width must be in"),
        ([3], (9, -1, 2, 2, ANY), "linear"),
        ([3], (9, 1 << 62, 0, 2, ANY), "linear"),
        ([3], (9, 2, -1, 2, ANY), "quadratic"),
        ([3], (9, 0, 0, 2, ANY), "not both"),
        ([3], (9, 1, 0, 2, 0), "trajectories must be in"),
        ([3], (9, 1, 0, 2, 1 << 31), "trajectories must be in"),
        ([1, 1], (9, 1 << 61, 0, 2, ANY), "must be below 2"),
        ([1 << 30], ((1 << 31) - 1, 0, 4, 2, ANY), "must be below 2"),
        ([(1 << 31) - 1] * 3, ((1 << 31) - 1, (1 << 62) - 1, (1 << 62) - 1, 2, ANY), "must be below 2"),
    ],
)
def test_what_lies_outside_is_refused(
    careful: Ops, lengths: list[int], arguments: tuple[int, int, int, int, int], text: str
) -> None:
    given_lengths, out = torch.tensor(lengths), torch.full((2 * len(lengths) + 1,), -7)
    with pytest.raises((ShapeError, RuntimeError), match=text):
        careful.plan_packs_(*out.split([len(lengths)] * 2 + [1]), given_lengths, *arguments)
    assert (out == -7).all()


def test_outputs_must_fit(cpu: Ops) -> None:
    two, one = torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for outs in ((one, two, one), (two, one, one), (two, two, two)):
        with pytest.raises(RuntimeError, match=r"must have [12] values, got"):
            cpu.plan_packs_(*outs, two, 9, 1, 0, 2, ANY)
    with pytest.raises(RuntimeError, match="lengths must be"):
        cpu.plan_packs_(two, two, one, two.int(), 9, 1, 0, 2, ANY)

"""Returns-to-go and n-step returns: the C++ against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_wrappers import powers_of
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.schema import DTYPES

SameBits = Callable[[Tensor, Tensor], bool]
EXTENTS = torch.tensor([[0, 1], [1, 7], [8, 0], [9, 33], [50, 200]])  # rows 42..49 belong to no process
NUM_ROWS = 250


def rewards_of(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    if not dtype.is_floating_point:
        return torch.randint(-(1 << 40), 1 << 40, (NUM_ROWS,)).to(dtype)
    reward = torch.randn(NUM_ROWS, dtype=torch.float64) * 10.0 ** torch.randint(-3, 4, (NUM_ROWS,))
    reward[60:62], reward[100] = torch.tensor([torch.inf, -torch.inf]), torch.nan
    reward[0] = -0.0
    return reward.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_suffix_sum(reference: Ops, native: Ops, same_bits: SameBits, dtype: torch.dtype) -> None:
    reward = rewards_of(dtype)
    for extents in (EXTENTS, EXTENTS[:0], EXTENTS[2:3]):
        expected, got = torch.full((2, NUM_ROWS), 9.0).unbind()
        reference.suffix_sum_(expected, reward, extents)
        native.suffix_sum_(got, reward, extents)
        assert same_bits(got, expected)
        assert (expected[42:50] == 9.0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("count", [0, 1, 7, 33, 240])
def test_n_step(reference: Ops, native: Ops, same_bits: SameBits, dtype: torch.dtype, count: int) -> None:
    reward = rewards_of(dtype)
    trajectory = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (count,))]
    first, length = EXTENTS[trajectory].unbind(1)
    zero = torch.zeros_like(first)
    anchor = torch.minimum((torch.rand(count) * length).long(), length - 1)
    anchor[: count // 3] = 0
    resolutions = torch.stack((zero, trajectory, zero, first, length, anchor, zero, zero), dim=1)
    often, truncated = torch.rand(2, NUM_ROWS) < 0.1
    at_32 = (torch.arange(NUM_ROWS) - 50) % 32 == 31  # the last step of a warp, of windows at the first row
    never = truncated & False
    for n, terminated, ends, gamma in (
        (1, often, None, 0.9),
        (3, often, truncated, 0.99),
        (300, often, never, 1.0),
        (5, often, truncated, 0.0),
        (31, never, None, 0.99),  # about the lanes of a warp
        (32, never, never, 0.98),
        (33, at_32, never, 0.97),
        (300, at_32, None, 0.99),
        (64, never, at_32, 1.0),
    ):
        results = []
        for ops in (reference, native):
            out = torch.full((count,), 9.0), torch.full((count,), 9.0), torch.full((count,), 9)
            ops.n_step_(*out, reward, terminated, ends, powers_of(gamma, n), resolutions, n)
            results.append(out)
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "extent", [(-1, 2), (0, -1), (249, 2), (0, 251), (1 << 62, 1 << 62), (1, (1 << 63) - 1)]
)
def test_extent_outside_the_rows_is_refused(careful: Ops, extent: tuple[int, int]) -> None:
    with pytest.raises((ValueError, RuntimeError), match="extent 1 must lie in"):
        careful.suffix_sum_(torch.zeros(250), torch.zeros(250), torch.tensor([(0, 3), extent]))

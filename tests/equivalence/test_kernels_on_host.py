"""The kernels run on the host refuse what would read or write outside: they trap, where the device would."""

from __future__ import annotations

import pytest
import torch

from deepspeed_gear.ops import Ops

OUTSIDE = pytest.raises(RuntimeError, match="index that leads outside")


@pytest.mark.parametrize(
    ("word", "value"), [(3, -1), (3, 10), (3, 1 << 62), (4, 0), (4, (1 << 63) - 1), (5, -1), (5, 2)]
)
def test_resolution_outside_the_column(kernels_on_host: Ops, word: int, value: int) -> None:
    resolutions = torch.tensor([[0, 0, 0, 0, 2, 0, 0, 0]]).repeat(3, 1)
    column, none, counters = torch.zeros(10, 2), torch.empty(0), torch.zeros(3, dtype=torch.int64)
    out, spec = torch.ones(3, 1, 2), [0, 0, 1, 0, 0, 0, 2, -1, 0, 1]

    def gather() -> None:
        kernels_on_host.gather_(
            [out], [], counters, [column], [none], [none], resolutions, None, spec, [0.0], 1
        )

    gather()
    resolutions[2, word] = value
    with OUTSIDE:
        gather()
    returns = torch.zeros(3)
    powers, steps = torch.ones(2, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with OUTSIDE:
        kernels_on_host.n_step_(
            returns,
            returns.clone(),
            steps,
            column[:, 0].contiguous(),
            column[:, 0] > 1,
            None,
            powers,
            resolutions,
            1,
        )


def test_slot_outside_the_column(kernels_on_host: Ops) -> None:
    resolutions, none = torch.tensor([[0, 3, 0, 0, 2, 0, 0, 0]]), torch.empty(0)
    counters = torch.zeros(3, dtype=torch.int64)
    arguments = (resolutions, None, [2, 0, 1, 0, 0, 0, 2, -1, 0, 1], [0.0], 1)
    with OUTSIDE:
        kernels_on_host.gather_(
            [torch.ones(1, 2)], [], counters, [torch.zeros(3, 2)], [none], [none], *arguments
        )


def test_extent_outside_the_rewards(kernels_on_host: Ops) -> None:
    for extent in ((-1, 2), (0, -1), (5, 6), (1, (1 << 63) - 1)):
        with OUTSIDE:
            kernels_on_host.suffix_sum_(torch.zeros(10), torch.zeros(10), torch.tensor([extent]))


@pytest.mark.parametrize(
    ("offset", "length", "pad", "steps"), [(-1, 2, 0, (2, 4)), (9, 1, 1, (5, 6)), (-9, 7, 1, (0, 1))]
)
def test_window_of_one_row_too_few(
    kernels_on_host: Ops, offset: int, length: int, pad: int, steps: tuple[int, int]
) -> None:
    """A column that holds the steps that are read, and a record that is off by one."""
    none, counters = torch.empty(0), torch.zeros(3, dtype=torch.int64)
    column, spec = torch.zeros(steps[1] - steps[0], 2), [0, offset, length, 0, 0, pad, 2, -1, 0, length]

    def gather(first_row: int) -> None:
        resolutions = torch.tensor([[0, 0, 0, first_row, 6, 3, 0, 0]])
        out = torch.ones(1, length, 2)
        kernels_on_host.gather_(
            [out], [], counters, [column], [none], [none], resolutions, None, spec, [0.0], 1
        )

    gather(-steps[0])
    for first_row in (-steps[0] - 1, -steps[0] + 1):
        with OUTSIDE:
            gather(first_row)

"""How a backend is chosen, and small cases of ops that read columns, by hand."""

from __future__ import annotations

import op_wrappers
import pytest
import torch

from deepspeed_gear.errors import BuildError, ConfigError
from deepspeed_gear.ops import load_backend

RESOLUTIONS = torch.tensor([[0, 0, 0, 2, 5, 1, 1, 0]])
COLUMN = torch.arange(20.0).view(10, 2)
MASSES = torch.tensor([3, 0, 4])
STORED = torch.arange(18).byte()  # rows of 3 bytes
# Steps 1 and 2 of a trajectory that lies from row 1 on; behind a head of 8 bytes.
ROWS = (
    torch.tensor([[0, 0, 0, 5, 1, 0, -1]]),
    torch.tensor([[0, 0, 0, 2, 0, 0, 0]]),
    torch.ones(1, 1, dtype=torch.bool),
    torch.tensor([[0, 0, 3]]),
    torch.tensor([8]),
    torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0]]),
)
WHICH, ROOM = torch.tensor([0]), (1, 2, 3, 1, 100, 200)


def test_backends() -> None:
    cpu = load_backend("cpu")
    assert load_backend("auto").draw_ is cpu.draw_
    assert load_backend().name == "cpu"
    with pytest.raises(ConfigError, match=r"gear\.backend must be auto, cpu or cuda, got 'gpu'"):
        load_backend("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_remedy() -> None:
    with pytest.raises(BuildError, match=r'gear\.backend is cuda, .* set gear\.backend to "cpu"'):
        load_backend("cuda")


def test_results() -> None:
    sums = op_wrappers.tree(MASSES)
    assert op_wrappers.tree_total(sums, 3) == 7
    slots = torch.tensor([[2, 1, 10 + i, i * 5, 5, 5, 0, 0] for i in range(3)])
    found = op_wrappers.resolve(sums, slots, torch.tensor([2, 3]), (0, 0, 1, 1, 1), first=6)
    assert found.tolist() == [[10, 0, 1, 0, 5, 4, 3, 6], [12, 2, 1, 10, 5, 4, 4, 7]]
    values, mask = op_wrappers.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, dtype=torch.float64)
    assert values.tolist() == [[[9.0, 9.0], [4.0, 5.0], [6.0, 7.0]]]
    assert mask.tolist() == [[False, True, True]]
    part = op_wrappers.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, first=1, count=1)
    assert [x.tolist() for x in part] == [[[[4.0, 5.0]]], [[True]]]
    rest, _ = op_wrappers.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, first=1)
    assert rest.tolist() == [[[4.0, 5.0], [6.0, 7.0]]]
    two = RESOLUTIONS.repeat(2, 1)
    values, _ = op_wrappers.gather(COLUMN, two, order=torch.tensor([1, 0]))
    assert torch.equal(values, op_wrappers.gather(COLUMN, two)[0])
    reward, ends = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]), torch.zeros(7, dtype=torch.bool)
    returns, discount, steps = op_wrappers.n_step(reward, ends, None, RESOLUTIONS, 2, 0.5)
    assert (returns.tolist(), discount.tolist(), steps.tolist()) == ([16.0], [0.25], [2])
    assert op_wrappers.suffix_sum(reward, torch.tensor([[1, 3]])).tolist() == [0, 14, 12, 8, 0, 0, 0]
    packed, sizes = op_wrappers.encode_rows([STORED], *ROWS)
    assert packed.view(torch.uint8).tolist() == [0] * 8 + [6, 7, 8, 9, 10, 11, 0, 0]
    arrivals, ring = torch.zeros(9).byte(), RESOLUTIONS + 0
    taken = op_wrappers.decode_rows([arrivals], ring, [packed], WHICH, *ROWS[:-1], ROOM)
    assert [part.tolist() for part in (sizes, *taken)] == [[6], [6], [2, 1]]
    assert arrivals.tolist() == [0, 0, 0, 6, 7, 8, 9, 10, 11]
    assert ring.tolist() == [[0, 203, 0, 101 - 1, 5, 1, 1, 0]]


def test_scaling_is_of_the_ops_type_and_repeats() -> None:
    shift, gain = torch.arange(22.0, dtype=torch.float64).view(2, 11)
    a, b = op_wrappers.scaling(shift, gain)
    assert a.dtype == b.dtype == torch.float64
    assert len(a) == len(b) >= 128
    assert torch.equal(a.view(-1, 11)[-1], shift)
    assert op_wrappers.scaling(shift[:1], gain[:1])[0].shape == (1,)

"""Packed rows: the C++ against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed_gear.ops import Ops

SIZES = torch.tensor([0, 1, 3, 61, 4096])


def pieces_of(count: int, to_bytes: int, source_bytes: int) -> Tensor:
    """Some pieces at any address; they overlap in the target."""
    size = SIZES[torch.randint(0, len(SIZES), (count,))]
    places = [
        (torch.rand(count, dtype=torch.float64) * (n - size + 1)).long() for n in (to_bytes, source_bytes)
    ]
    return torch.stack((*places, size), dim=1)


@pytest.mark.parametrize("count", [0, 1, 7, 33, 1000])
@pytest.mark.parametrize(("to_bytes", "source_bytes"), [(4096, 4096), (100_001, 70_003)])
def test_random_pieces(reference: Ops, cpu: Ops, count: int, to_bytes: int, source_bytes: int) -> None:
    torch.manual_seed(count)
    buffer = torch.randint(0, 256, (source_bytes + 1,), dtype=torch.uint8)
    pieces = pieces_of(count, to_bytes, source_bytes)
    for source in (buffer[:-1], buffer[1:]):
        expected, got, direct = torch.full((3, to_bytes), 9, dtype=torch.uint8).unbind()
        for ops, to in ((reference, expected), (cpu, got), (cpu.on_host(), direct)):
            ops.copy_rows_([to], [source], pieces, torch.tensor([count]))
        assert torch.equal(got, expected)
        assert torch.equal(direct, expected)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_what_is_packed_is_unpacked(request: pytest.FixtureRequest, name: str) -> None:
    ops: Ops = request.getfixturevalue(name)
    rows = torch.randint(0, 256, (40, 61), dtype=torch.uint8)
    order = torch.randperm(40)
    place, size = torch.arange(40) * 61, torch.full((40,), 61)
    message, back = torch.zeros(2, rows.numel(), dtype=torch.uint8).unbind()
    end = torch.tensor([40])
    ops.copy_rows_([message], [rows.view(-1)], torch.stack((place, order * 61, size), dim=1), end)
    assert torch.equal(message.view(40, 61), rows[order])
    ops.copy_rows_([back], [message], torch.stack((order * 61, place, size), dim=1), end)
    assert torch.equal(back.view(40, 61), rows)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_empty_tensors(request: pytest.FixtureRequest, name: str) -> None:
    ops: Ops = request.getfixturevalue(name)
    empty = torch.empty(0, dtype=torch.uint8)
    ops.copy_rows_([empty], [empty.clone()], torch.zeros(2, 3, dtype=torch.int64), torch.tensor([2]))
    ops.copy_rows_([], [empty], torch.zeros(2, 3, dtype=torch.int64), torch.empty(0, 1, dtype=torch.int64))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_pieces_go_by_target_and_source(request: pytest.FixtureRequest, name: str) -> None:
    ops: Ops = request.getfixturevalue(name)
    to, sources = torch.zeros(2, 4, dtype=torch.uint8), torch.arange(9).byte().view(3, 3)
    pieces = torch.tensor([[0, 0, 2], [2, 1, 1], [0, 2, 1], [3, 0, 1], [9, 9, 9]])
    ops.copy_rows_([*to], [*sources], pieces, torch.tensor([[1, 1, 2], [2, 3, 4]]))
    assert to.tolist() == [[0, 1, 7, 0], [5, 0, 0, 6]]


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(
    "piece",
    [
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, -1),
        (10, 0, 1),
        (9, 0, 2),
        (0, 20, 1),
        (0, 19, 2),
        (0, 0, 11),
        (1 << 62, 0, 1),
        (0, (1 << 63) - 1, 1),
        (0, 0, (1 << 63) - 1),
        (5, 5, (1 << 63) - 1),
        (-(1 << 63), 0, (1 << 63) - 1),
    ],
)
def test_piece_outside_is_refused_before_any_is_copied(
    request: pytest.FixtureRequest, name: str, piece: tuple[int, int, int]
) -> None:
    ops: Ops = request.getfixturevalue(name)
    to, source = torch.zeros(10, dtype=torch.uint8), torch.ones(20, dtype=torch.uint8)
    end = torch.tensor([2])
    ops.copy_rows_([to.clone()], [source], torch.tensor([(0, 0, 10), (10, 20, 0)]), end)
    with pytest.raises((ValueError, RuntimeError), match="piece 1 must lie in 10 bytes and 20 of the source"):
        ops.copy_rows_([to], [source], torch.tensor([(0, 0, 10), piece]), end)
    assert not to.any()


def test_wrong_tensors_are_refused(cpu: Ops) -> None:
    to, source, pieces = torch.zeros(10).byte(), torch.ones(20).byte(), torch.tensor([(0, 0, 10)])
    end = torch.tensor([1])
    for arguments, match in (
        (([to.char()], [source], pieces, end), "to must be Byte"),
        (([to], [source.view(4, 5)], pieces, end), r"sources must be \[n\]"),
        (([to], [source[::2]], pieces, end), "sources must be contiguous"),
        (([to], [source], pieces[:, :2].contiguous(), end), r"pieces must be \[n, 3\]"),
        (([to], [source], pieces.int(), end), "pieces must be Long"),
        (([to], [source], pieces, end + 1), "ends must ascend in pieces"),
        (([to], [source], pieces, torch.tensor([1, 1])), "ends must have 1 x 1 values, got 2"),
    ):
        with pytest.raises(RuntimeError, match=match):
            cpu.copy_rows_(*arguments)

"""Copies of pieces: every backend against the reference, and refusals of what lies outside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops

COLUMNS = [torch.arange(60, dtype=torch.uint8), torch.arange(40).view(20, 2), torch.randn(7).bfloat16()]
BYTES = [column.nbytes for column in COLUMNS]


@pytest.fixture(scope="module", params=["cpu", "kernels_on_host"])
def ops(request: pytest.FixtureRequest) -> Ops:
    found: Ops = request.getfixturevalue(request.param)
    return found


@given(data=st.data(), count=st.integers(0, 12))
def test_pieces_arrive(reference: Ops, ops: Ops, data: st.DataObject, count: int) -> None:
    pieces, at = [], 0
    for _ in range(count):
        column = data.draw(st.integers(0, 2))
        size = data.draw(st.integers(1, BYTES[column]))
        begin = data.draw(st.integers(0, BYTES[column] - size))
        at += data.draw(st.integers(0, 3))
        pieces.append([column, begin, at, size])
        at += size
    given_pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 4)
    expected, got = (torch.full((at + 2,), 7, dtype=torch.uint8) for _ in range(2))
    reference.copy_pieces_(expected, COLUMNS, given_pieces)
    ops.copy_pieces_(got, COLUMNS, given_pieces)
    assert torch.equal(got, expected)
    stored = [column.reshape(-1).view(torch.uint8) for column in COLUMNS]
    for column, begin, to, size in pieces:
        assert torch.equal(got[to : to + size], stored[column][begin : begin + size])


@pytest.mark.parametrize(
    "piece",
    [
        [3, 0, 0, 1],
        [-1, 0, 0, 1],
        [0, -1, 0, 1],
        [0, 60, 0, 1],
        [0, 50, 0, 11],
        [0, 0, -1, 1],
        [0, 0, 30, 3],
        [0, 0, 0, 0],
        [0, 0, 0, -1],
        [0, 1 << 62, 0, 1 << 62],
    ],
)
def test_a_piece_outside_is_refused(reference: Ops, ops: Ops, piece: list[int]) -> None:
    for each in (reference, ops):
        out = torch.zeros(32, dtype=torch.uint8)
        with pytest.raises((ShapeError, RuntimeError), match="piece 1 must lie in its column"):
            each.copy_pieces_(out, COLUMNS, torch.tensor([[0, 1, 1, 5], piece]))
        assert not out.any()

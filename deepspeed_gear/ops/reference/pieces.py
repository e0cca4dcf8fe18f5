"""What the op that packs and unpacks rows means: bytes from one tensor to places in another."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ShapeError


def copy_rows_(to: Tensor, source: Tensor, pieces: Tensor) -> None:
    """Copy pieces of bytes, in order: where some overlap in `to`, the last wins.

    Args:
        to: Shares no memory with `source`, which is not checked. [n], uint8.
        source: [m], uint8.
        pieces: First byte in `to`, first byte in `source`, number of bytes. [k, 3], int64.
    Raises:
        ShapeError: A piece lies outside; nothing is copied.
    """
    check_pieces(pieces, len(to), len(source))
    for first, begin, size in pieces.tolist():
        to[first : first + size] = source[begin : begin + size]


def check_pieces(pieces: Tensor, to_bytes: int, source_bytes: int) -> None:
    """Check that every piece lies in both tensors.

    Raises:
        ShapeError: One does not.
    """
    first, begin, size = pieces.unbind(1)
    good = (first >= 0) & (begin >= 0) & (size >= 0) & (size <= to_bytes - first)
    good &= size <= source_bytes - begin
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        rule = f"must lie in {to_bytes} bytes and {source_bytes} of the source"
        raise ShapeError(f"piece {i}", rule, pieces[i].tolist())

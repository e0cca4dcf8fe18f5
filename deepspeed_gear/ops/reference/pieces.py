"""What the op that packs and unpacks rows means: bytes from some tensors to places in others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...errors import ShapeError


def copy_rows_(to: Sequence[Tensor], sources: Sequence[Tensor], pieces: Tensor, ends: Tensor) -> None:
    """Copy pieces of bytes, in order: where some overlap in a target, the last wins.

    Args:
        to: Share no memory with `sources`, which is not checked. [n] each, uint8.
        sources: [m] each, uint8.
        pieces: First byte in the target, first byte in the source, number of bytes. [k, 3], int64.
        ends: Pieces up to and with those of each target and source. [targets, sources], int64.
    Raises:
        ShapeError: A piece lies outside; nothing is copied.
    """
    check_blocks(to, sources, pieces, ends)
    for target, source, block in _blocks(to, sources, pieces, ends):
        for first, begin, size in block.tolist():
            target[first : first + size] = source[begin : begin + size]


def check_blocks(to: Sequence[Tensor], sources: Sequence[Tensor], pieces: Tensor, ends: Tensor) -> None:
    """Check that every piece lies in its target and its source.

    Raises:
        ShapeError: One does not.
    """
    for target, source, block in _blocks(to, sources, pieces, ends):
        check_pieces(block, len(target), len(source))


def _blocks(
    to: Sequence[Tensor], sources: Sequence[Tensor], pieces: Tensor, ends: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    first = 0
    pairs = ((target, source) for target in to for source in sources)
    for (target, source), end in zip(pairs, ends.reshape(-1).tolist(), strict=True):
        yield target, source, pieces[first:end]
        first = end


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

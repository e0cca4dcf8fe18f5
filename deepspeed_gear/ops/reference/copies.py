"""Reference op of copies: pieces of columns into one scratch memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ShapeError


def copy_pieces_(out: Tensor, columns: Sequence[Tensor], pieces: Tensor) -> None:
    """Copy pieces of columns, as the copy engines of a GPU do.

    Args:
        out: Gets the bytes; others stay as they are. [n], uint8.
        columns: Of any shape and dtype, contiguous.
        pieces: Column, first byte in it, first byte in `out` and bytes, at least 1; no two overlap in `out`.
            In memory of the host also where the others are a device's. [k, 4], int64.
    Raises:
        ShapeError: A piece lies outside its column or `out`; nothing is copied.
    """
    stored = [column.reshape(-1).view(torch.uint8) for column in columns]
    words = pieces.tolist()
    for i, (column, begin, to, size) in enumerate(words):
        is_known = 0 <= column < len(stored) and begin >= 0 and to >= 0 and size > 0
        if not is_known or begin + size > len(stored[column]) or to + size > len(out):
            raise ShapeError(f"piece {i}", "must lie in its column and in out", words[i])
    for column, begin, to, size in words:
        out[to : to + size] = stored[column][begin : begin + size]

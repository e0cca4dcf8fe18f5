"""Items of media, which their content identifies: number, digest and encoded rows."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

WORD_BYTES = 8  # the rows of a column begin at a multiple of so many bytes


class MediaItem(NamedTuple):
    """An encoded item: its number, digest and bytes."""

    number: int  # 63 bits of the digest, never 0; the steps of a trajectory hold it
    digest: np.ndarray  # SHA-256 of the content. [4], int64
    #: Number of rows of each column, int64, then each column's rows in C order, padded to words.
    #: [bytes], uint8.
    content: np.ndarray


def padded_bytes(size: int) -> int:
    return -(-size // WORD_BYTES) * WORD_BYTES  # rounded up: 9 becomes 16


def encoded_item(rows: list[Any]) -> MediaItem:
    """Encode the stored rows of each column as an item."""
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in rows]
    padded = (np.pad(part, (0, padded_bytes(len(part)) - len(part))) for part in flat)
    counts = np.array([len(part) for part in rows], np.int64)
    return item_of_content(np.concatenate([counts.view(np.uint8), *padded]))


def item_of_content(content: np.ndarray) -> MediaItem:
    digest = np.frombuffer(hashlib.sha256(content.data).digest(), np.int64)
    return MediaItem(int(digest[0]) & ((1 << 63) - 1) or 1, digest, content)

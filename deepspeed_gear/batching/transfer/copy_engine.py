"""What the copy engine fetches: a piece for each sample and field, and the records that then lead to them.

A sample's window is fetched to a place of its own in scratch memory of the device. The op of collection
allows records whose other rows are not there, so a record with another first row makes the same kernel read
the scratch: padding, masks and conversion are those of any other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops.constants import R_ANCHOR, R_FIRST_ROW, R_NUM_STEPS
from deepspeed_gear.ops.reference.gather import bounds

COLUMN, FROM, TO, BYTES = range(4)  # words of a piece


@dataclass(frozen=True)
class Window:
    """What a field reads of a sample, in steps: the part [first, first + count) of a window."""

    offset: int
    length: int
    align: int
    final_row: int
    first: int
    count: int


@dataclass(frozen=True)
class Fetched:
    """A window of some samples.

    Args:
        step: First step that is fetched of each sample. [B], int64.
        row: Where it lies in scratch memory of `count` rows a sample. [B], int64.
        num_rows: Rows that are fetched. [B], int64.
        records: Resolutions that lead there. [B, 8], int64.
    """

    step: np.ndarray
    row: np.ndarray
    num_rows: np.ndarray
    records: torch.Tensor


def fetch(window: Window, records: torch.Tensor) -> Fetched:
    """Return which steps of samples are fetched, and to where.

    Args:
        window: The window.
        records: Resolutions. [B, 8], int64.
    """
    held = records[:, R_NUM_STEPS] + window.final_row
    span = bounds(window.offset, window.length, window.align, records[:, R_ANCHOR], held)
    ahead = span.begin - span.place  # the step at the window's first place
    begin = span.place.clamp(window.first, window.first + window.count)
    end = (span.place + span.end - span.begin).clamp(window.first, window.first + window.count)
    places = torch.arange(len(records)) * window.count - window.first
    moved = records.clone()
    moved[:, R_FIRST_ROW] = places - ahead
    step, row, num_rows = begin + ahead, places + begin, end - begin
    return Fetched(step.numpy(), row.numpy(), num_rows.numpy(), moved)


def pieces_of(
    found: Fetched, records: torch.Tensor, column: int, row_bytes: int, begin: int, cuts: np.ndarray
) -> np.ndarray:
    """Return the copies of one field.

    Args:
        found: Its window.
        records: The resolutions themselves. [B, 8], int64.
        column: Its number among the columns.
        row_bytes: Of its rows.
        begin: First byte of its scratch memory.
        cuts: Bytes of the column that one copy must not go across, ascending. int64.
    Returns:
        COLUMN, FROM, TO, BYTES of each piece. [n, 4], int64.
    """
    first = records[:, R_FIRST_ROW].numpy()
    some = np.nonzero(found.num_rows > 0)[0]
    pieces = np.empty((len(some), 4), np.int64)
    pieces[:, COLUMN] = column
    pieces[:, FROM] = (first[some] + found.step[some]) * row_bytes
    pieces[:, TO] = begin + found.row[some] * row_bytes
    pieces[:, BYTES] = found.num_rows[some] * row_bytes
    return split(pieces, cuts)


def split(pieces: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Divide the pieces that go across a cut of their column. [n, 4], int64."""
    if not len(cuts):
        return pieces
    done = []
    limits = np.append(cuts, np.iinfo(np.int64).max)
    while len(pieces):
        limit = limits[np.searchsorted(cuts, pieces[:, FROM], side="right")]
        room = limit - pieces[:, FROM]
        rest = pieces[pieces[:, BYTES] > room].copy()
        over = room[pieces[:, BYTES] > room]
        pieces[:, BYTES] = np.minimum(pieces[:, BYTES], room)
        done.append(pieces)
        rest[:, FROM] += over
        rest[:, TO] += over
        rest[:, BYTES] -= over
        pieces = rest
    return np.concatenate(done) if done else pieces

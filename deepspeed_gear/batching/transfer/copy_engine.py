"""Copies of the copy engine: a piece for each sample and field, and resolutions that point to the copies.

A sample's window is copied to its own place in scratch memory of the device. The op `gather_` reads only rows
of windows, so a resolution with another first row makes the same kernel read the scratch memory: padding,
masks and conversion are those of every transfer method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from deepspeed_gear.config import ResolvedField
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source
from deepspeed_gear.ops.windows import bounds
from deepspeed_gear.store.table_spec import RETURN_TO_GO


class CopyPiece:
    COLUMN: Final = 0
    SOURCE: Final = 1
    TARGET: Final = 2
    NUM_BYTES: Final = 3


@dataclass(frozen=True)
class Fetched:
    """Where a window of each sample is copied to."""

    step: np.ndarray  # first copied step of each sample. [B], int64.
    row: np.ndarray  # its row in scratch memory of `count` rows a sample. [B], int64.
    num_rows: np.ndarray  # number of copied rows. [B], int64.
    records: torch.Tensor  # resolutions that point to the copies. [B, 8], int64.


def fetch(window: GatherSpec, records: torch.Tensor) -> Fetched:
    """Return which steps of samples are copied, and where to, for the part of a window that is read."""
    held = records[:, Resolution.NUM_STEPS] + int(window.source == Source.STEPS_PLUS_ONE)
    first, last = window.part_first, window.part_first + window.part_count
    span = bounds(window.offset, window.length, window.align, records[:, Resolution.ANCHOR], held)
    shift = span.begin - span.place  # the step at the window's first place
    begin = span.place.clamp(first, last)
    end = (span.place + span.end - span.begin).clamp(first, last)
    places = torch.arange(len(records)) * window.part_count - first
    moved = records.clone()
    moved[:, Resolution.FIRST_ROW] = places - shift
    step, row, num_rows = begin + shift, places + begin, end - begin
    return Fetched(step.numpy(), row.numpy(), num_rows.numpy(), moved)


def pieces_of(
    found: Fetched, records: torch.Tensor, column: int, row_bytes: int, begin: int, bounds: np.ndarray
) -> np.ndarray:
    """Return the pieces of one field, of the words of `CopyPiece`, [n, 4]: into scratch memory from byte
    `begin` on; no copy crosses `bounds`, ascending offsets in the column.
    """
    first = records[:, Resolution.FIRST_ROW].numpy()
    some = np.nonzero(found.num_rows > 0)[0]
    pieces = np.empty((len(some), 4), np.int64)
    pieces[:, CopyPiece.COLUMN] = column
    pieces[:, CopyPiece.SOURCE] = (first[some] + found.step[some]) * row_bytes
    pieces[:, CopyPiece.TARGET] = begin + found.row[some] * row_bytes
    pieces[:, CopyPiece.NUM_BYTES] = found.num_rows[some] * row_bytes
    return split(pieces, bounds)


def split(pieces: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Split the pieces that cross a bound of their column. [n, 4], int64."""
    if not len(bounds):
        return pieces
    done = []
    limits = np.append(bounds, np.iinfo(np.int64).max)
    while len(pieces):
        limit = limits[np.searchsorted(bounds, pieces[:, CopyPiece.SOURCE], side="right")]
        room = limit - pieces[:, CopyPiece.SOURCE]
        rest = pieces[pieces[:, CopyPiece.NUM_BYTES] > room].copy()
        over = room[pieces[:, CopyPiece.NUM_BYTES] > room]
        pieces[:, CopyPiece.NUM_BYTES] = np.minimum(pieces[:, CopyPiece.NUM_BYTES], room)
        done.append(pieces)
        rest[:, CopyPiece.SOURCE] += over
        rest[:, CopyPiece.TARGET] += over
        rest[:, CopyPiece.NUM_BYTES] -= over
        pieces = rest
    return np.concatenate(done) if done else pieces


DIRECT, COPIES, STAGED = "direct", "copies", "staged"
WAYS = (DIRECT, COPIES, STAGED)  # in order of preference without a measurement
_RETURN_BYTES = 4  # a row of returns-to-go
#: Smallest window that the copy engine fetches unless it is configured. A piece of any size takes about
#: 1.1 us; kernels read 35 GB/s in place, so it is slower below some 28 KiB, as others measured on an H100.
LEAST_COPY_BYTES = 1 << 14


def is_computed(field: ResolvedField) -> bool:  # without stored rows: time steps and positions
    return field.column is None and field.derived != "return_to_go"


def column_name(field: ResolvedField) -> str:  # that it reads, unless it is computed
    return RETURN_TO_GO if field.column is None else field.column.name


def suits_copies(field: ResolvedField, least_bytes: int) -> bool:
    """Return whether all rows that a kernel reads for a sample are one piece, of at least so many bytes."""
    if is_computed(field) or field.pad_kind == "edge" or field.offset == "n_step":
        return False
    row_bytes = _RETURN_BYTES if field.column is None else field.column.row_bytes
    is_large = (field.collected_length or 1) * row_bytes >= least_bytes
    return is_large and (field.column is None or field.column.rows != "1")

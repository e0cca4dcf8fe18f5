"""Arrays of HDF5 files, read in blocks of whole chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.row_buffers import RowBuffers
from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.data.sources.opened_files import hdf5_file, is_hdf5
from deepspeed_gear.errors import DataError

BLOCK_BYTES = 8 * 1024 * 1024


def hdf5_members(path: Path, group: str = "/") -> dict[str, type]:
    """Return the classes of a group's members by name; none for other files and nodes."""
    if not path.is_file() or not is_hdf5(path):
        return {}
    with open_hdf5(path) as file:
        node = file.get(group)
        if not isinstance(node, h5py.Group):
            return {}
        return {name: node.get(name, getclass=True) for name in node}


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file; DataError if it is none or is damaged."""
    check_no_pointer(path)
    if path.is_dir():
        inside = next((file for file in sorted(path.iterdir()) if is_hdf5(file)), None)
        remedy = f"give the file in it: {inside}" if inside else "check the path"
        raise DataError(str(path), "must be an HDF5 file", "a folder", remedy)
    remedy = DAMAGED if is_hdf5(path) else "check the path"
    with DataError.on(str(path), "must be a readable HDF5 file", OSError, remedy=remedy):
        return hdf5_file(path)


def hdf5_arrays(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """Return the arrays in a group and below it, by path; without empty ones (h5py.Empty)."""
    nodes: dict[str, Any] = {}
    group.visititems(lambda key, node: nodes.update({key: node}))
    return {key: node for key, node in nodes.items() if getattr(node, "shape", None) is not None}


def single_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a group or array that hold one value each.

    Those of several values may repeat one text any number of times.
    """
    shapes = {name: node.attrs.get_id(name).shape for name in node.attrs}
    return {name: node.attrs[name] for name, shape in shapes.items() if shape == ()}


def read_rows(
    where: str,
    dataset: h5py.Dataset,
    low: int,
    high: int,
    into: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Read rows [low, high) of an HDF5 array; DataError if they are damaged.

    Args:
        into: Takes the rows, in the dtype of the array; None: a new array.
    """
    with DataError.on(
        where, f"must be readable in rows {low} to {high - 1}", OSError, remedy=DAMAGED
    ):
        if into is None:
            return np.asarray(dataset[low:high])
        if low < high:
            dataset.read_direct(into, np.s_[low:high])
        return into


def block_rows(array: Any) -> int:
    """Return how many rows of an array make 8 MiB, at least one."""
    row_bytes: int = array.dtype.itemsize * math.prod(array.shape[1:])
    return max(1, BLOCK_BYTES // max(1, row_bytes))


class RowReader:
    """Reads increasing ranges of rows of an HDF5 array, in blocks of whole chunks.

    So a compressed chunk is decompressed once per pass, not once per episode, but for one or two
    per block. Memory: one block, about 8 MiB (`block_rows`), or 1 MiB of an array without chunks,
    or the requested range where it is larger.
    """

    def __init__(self, where: str, dataset: h5py.Dataset) -> None:
        self._where = where
        self._dataset = dataset
        self.shape = dataset.shape
        self.ndim = dataset.ndim
        self.dtype = dataset.dtype
        self._buffers = RowBuffers.shared()
        self._chunk = dataset.chunks[0] if dataset.chunks else 1
        self.block_rows = max(1, block_rows(dataset) // self._chunk) * self._chunk
        if not dataset.chunks:  # nothing is read twice, so rows are in a cache when they are used
            self.block_rows = max(1, self.block_rows // 8)
        self._takes_buffers = isinstance(dataset, h5py.Dataset)
        self._first = 0
        self._block = np.empty((0, *dataset.shape[1:]), dtype=dataset.dtype)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: slice | tuple[()]) -> NDArray[Any]:
        """Return rows in an array that later calls do not change; with () all of them."""
        if isinstance(rows, tuple):
            if not self.ndim:
                return np.asarray(self._dataset[()])
            return read_rows(self._where, self._dataset, 0, len(self))
        low, high, _ = rows.indices(len(self))
        high = max(low, high)
        until = self._first + len(self._block)
        if not self._first <= low <= high <= until:
            # Rounded out to whole chunks: with chunks of 10 rows, [7, 23) is read as [0, 30), or
            # up to the end of the block if that is later. Rows that were read already are kept.
            first = low // self._chunk * self._chunk
            end = max(first + self.block_rows, -(-high // self._chunk) * self._chunk)
            end = min(end, len(self))
            begin = until if self._first <= first < until else first
            block = self._read(first, begin, end)
            self._first = first
            self._block = block
        return self._block[low - self._first : high - self._first]

    def _read(self, first: int, begin: int, end: int) -> NDArray[Any]:
        """Return rows [first, end), of which those before `begin` are in the block."""
        known = self._block[first - self._first :] if begin > first else self._block[:0]
        shape = (end - first, *self.shape[1:])
        if not (self._takes_buffers and self._buffers.lends(shape, self.dtype)):
            rows = read_rows(self._where, self._dataset, begin, end)  # faster for a few rows
            return np.concatenate([known, rows]) if len(known) else rows
        block = self._buffers.empty(shape, self.dtype)
        block[: len(known)] = known
        read_rows(self._where, self._dataset, begin, end, block[len(known) :])
        return block

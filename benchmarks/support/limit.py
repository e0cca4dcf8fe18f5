"""What the machine itself needs: C loops of memcpy over the same rows, and of draws beside them."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Compile a C file of this folder with the machine's compiler."""
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory(prefix="gear-limit-") as folder:
        target = Path(folder) / "limit.so"
        subprocess.run(
            [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-o", target, source],
            check=True,
        )
        return ctypes.CDLL(str(target))  # stays mapped after its file is gone


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class _Limit:
    """Columns, and the buffers of a ring of batches, as C sees them."""

    def __init__(
        self, columns: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self.kept = columns, outs
        self._num_sets = len(outs)
        self._batch = len(outs[0][0])
        self._columns = np.array([column.data_ptr() for column in columns], np.uint64)
        self._row_bytes = np.array([c[0].numel() * c.element_size() for c in columns], np.int64)
        self._outs = np.array([[out.data_ptr() for out in batch] for batch in outs], np.uint64)

    def _places(self) -> list[Any]:
        """Return the first arguments of a loop."""
        return [
            ctypes.c_int64(len(self._columns)),
            _pointer(self._columns),
            _pointer(self._row_bytes),
            ctypes.c_int64(self._num_sets),
            _pointer(self._outs),
        ]


class CopyLimit(_Limit):
    """A C loop of memcpy from columns into the buffers of a ring of batches.

    Args:
        columns: Where the rows come from. [rows, *shape] each.
        outs: For each batch of the ring, a tensor per column. [B, rows, *shape].
        rows: Rows of a window.
    """

    def __init__(
        self, columns: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]], rows: int
    ) -> None:
        super().__init__(columns, outs)
        self._rows = rows

    def run(self, first_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy batches.

        Args:
            first_rows: First row of every sample's window. [n, B], int64, contiguous.
        Returns:
            CPU time and wall time of each batch, in ns. [n], int64.
        """
        times = np.empty((2, len(first_rows)), np.int64)
        library("limit").CopyBatches(
            *self._places(),
            ctypes.c_int64(len(first_rows)),
            ctypes.c_int64(self._batch),
            ctypes.c_int64(self._rows),
            _pointer(first_rows),
            _pointer(times[0]),
            _pointer(times[1]),
        )
        return times[0], times[1]


class SelectLimit(_Limit):
    """A C loop over batches of single rows: draws, memcpy, and with masses the tree and its
    updates.

    Args:
        columns: Where the rows come from. [rows, *shape] each.
        outs: For each batch of the ring, a tensor per column. [B, *shape].
        masses: Of the items at the beginning; None: all are as likely, and nothing is updated. [N],
            int64.
        new_masses: What batches set, in turn. [n, B], int64.
        num_items: N: the first rows of the columns.
    """

    def __init__(
        self,
        columns: Sequence[torch.Tensor],
        outs: Sequence[Sequence[torch.Tensor]],
        masses: np.ndarray | None,
        new_masses: np.ndarray,
        num_items: int,
    ) -> None:
        super().__init__(columns, outs)
        self.new_masses = new_masses
        self._num_items = num_items
        self._library = library("select_limit")
        self.items = np.empty(self._batch, np.int64)  # of the last batch
        self.sums: np.ndarray | None = None if masses is None else self._tree(masses)
        self._num_drawn = 0

    def _tree(self, masses: np.ndarray) -> np.ndarray:
        self._library.TreeWords.restype = ctypes.c_int64
        sums = np.zeros(self._library.TreeWords(ctypes.c_int64(len(masses))), np.int64)
        sums[: len(masses)] = masses
        self._library.BuildTree(_pointer(sums), ctypes.c_int64(len(masses)))
        return sums

    def run(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Make batches. Returns CPU time and wall time of each, in ns. [n], int64."""
        times = np.empty((2, count), np.int64)
        self._library.SelectBatches(
            *self._places(),
            ctypes.c_void_p(None) if self.sums is None else _pointer(self.sums),
            ctypes.c_int64(self._num_items),
            ctypes.c_int64(len(self.new_masses)),
            _pointer(self.new_masses),
            ctypes.c_uint64(self._num_drawn),
            ctypes.c_int64(count),
            ctypes.c_int64(self._batch),
            _pointer(self.items),
            _pointer(times[0]),
            _pointer(times[1]),
        )
        self._num_drawn += count * self._batch
        return times[0], times[1]

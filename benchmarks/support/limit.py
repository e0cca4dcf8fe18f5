"""The memcpy limit: what the machine itself needs for the same rows into the same buffers."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Compile a C file of this folder with the machine's compiler."""
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory(prefix="gear-limit-") as folder:
        target = Path(folder) / "limit.so"
        subprocess.run(
            [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-o", target, source], check=True
        )
        return ctypes.CDLL(str(target))  # stays mapped after its file is gone


class CopyLimit:
    """A C loop of memcpy from columns into the buffers of a ring of batches.

    Args:
        columns: Where the rows come from. [rows, *shape] each.
        outs: For each batch of the ring, a tensor per column. [B, rows, *shape].
        rows: Rows of a window.
    """

    def __init__(
        self, columns: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]], rows: int
    ) -> None:
        self._keep = columns, outs
        self._rows, self._num_sets, self._batch = rows, len(outs), len(outs[0][0])
        self._columns = np.array([column.data_ptr() for column in columns], np.uint64)
        self._row_bytes = np.array([c[0].numel() * c.element_size() for c in columns], np.int64)
        self._outs = np.array([[out.data_ptr() for out in batch] for batch in outs], np.uint64)
        self._copy = library("limit").CopyBatches

    def run(self, first_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy batches.

        Args:
            first_rows: First row of every sample's window. [n, B], int64, contiguous.
        Returns:
            CPU time and wall time of each batch, in ns. [n], int64.
        """
        times = np.empty((2, len(first_rows)), np.int64)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (self._columns, self._row_bytes)]
        self._copy(
            ctypes.c_int64(len(self._columns)),
            *pointers,
            ctypes.c_int64(self._num_sets),
            ctypes.c_void_p(self._outs.ctypes.data),
            ctypes.c_int64(len(first_rows)),
            ctypes.c_int64(self._batch),
            ctypes.c_int64(self._rows),
            ctypes.c_void_p(first_rows.ctypes.data),
            ctypes.c_void_p(times[0].ctypes.data),
            ctypes.c_void_p(times[1].ctypes.data),
        )
        return times[0], times[1]

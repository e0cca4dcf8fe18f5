"""Arrays in npz and npy files, none of which takes more memory than its entry declares."""

from __future__ import annotations

import math
import threading
import zipfile
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.errors import DataError

NPY = ".npy"
_DEFLATES = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_PART_BYTES = 1 << 20
# In early releases of CPython 3.11, parsing headers in two threads at the same time can fail ("AST
# constructor recursion depth mismatch").
_parsing = threading.Lock()


def read_entry(
    where: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, unpickle: Callable[[bytes], Any]
) -> Any:
    """Read an array of an archive whose declared size `check_archive` has checked.

    Args:
        unpickle: Returns the value of an array of Python objects, whose content is a pickle.
    """
    if entry.compress_type not in _DEFLATES:  # others decompress a block at once
        raise DataError(
            where,
            "must be stored or deflated, as np.savez_compressed writes it",
            entry.compress_type,
            "write the archive again with np.savez_compressed",
        )
    with archive.open(entry) as file:
        return read_npy(where, file, entry.file_size, unpickle)


def read_npy(where: str, file: IO[bytes], file_size: int, unpickle: Callable[[bytes], Any]) -> Any:
    """Read an array in NumPy's format, whose values must fill the rest of the file."""
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    with _parsing:
        shape, is_fortran, dtype = read[version](file)
    num_bytes = file_size - file.tell()
    if dtype.hasobject:
        return unpickle(file.read())
    # NumPy would allocate what the header declares.
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != num_bytes:
        raise DataError(
            where,
            f"must have the size of its entry in the archive, {num_bytes} bytes",
            f"{dtype} {list(shape)}",
            DAMAGED,
        )
    return _values(file, np.empty(shape, dtype, "F" if is_fortran else "C"))


def _values(file: IO[bytes], array: NDArray[Any]) -> NDArray[Any]:
    """Fill an array with the next bytes of a file."""
    if array.nbytes:
        content = array.reshape(-1, order="A").view(np.uint8)
        at = 0
        while at < len(content):
            part = file.read(min(_PART_BYTES, len(content) - at))
            if not part:
                raise ValueError("the entry ends too early")
            content[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
    return array

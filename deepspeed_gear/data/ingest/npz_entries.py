"""Arrays in npz files from elsewhere.

None takes more memory than its entry in the archive declares.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.errors import DataError

NPY = ".npy"
_DEFLATES = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


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
        dtype = read_header(where, file, entry.file_size)
        if dtype.hasobject:
            return unpickle(file.read())
    with archive.open(entry) as file:
        return npy.read_array(file, allow_pickle=False)


def read_header(where: str, file: IO[bytes], file_size: int) -> np.dtype[Any]:
    """Read the header of an array, and return its dtype.

    Raises:
        DataError: The rest of the file has another size than the header declares, which NumPy would
            allocate.
    """
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    shape, _, dtype = read[npy.read_magic(file)](file)
    num_bytes = file_size - file.tell()
    is_sized = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == num_bytes
    if not (dtype.hasobject or is_sized):
        raise DataError(
            where,
            f"must have the size of its entry in the archive, {num_bytes} bytes",
            f"{dtype} {list(shape)}",
            DAMAGED,
        )
    return dtype

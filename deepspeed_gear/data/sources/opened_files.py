"""Open files for libraries that otherwise take names of files of this machine."""

from __future__ import annotations

import atexit
import os
import weakref
import zipfile
from pathlib import Path
from typing import Any

import h5py

from deepspeed_gear.data.sources.block_cache import BLOCK_BYTES
from deepspeed_gear.data.sources.ranged_file import RangedFile, RemoteBytes
from deepspeed_gear.data.sources.remote_path import RemotePath

_REMOTE_HDF5: weakref.WeakSet[h5py.File] = weakref.WeakSet()
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK"
#: The text that each header of a tar file has, at byte `TAR_AT`.
TAR = b"ustar"
TAR_AT = 257
_HDF5_NAMES = (".hdf5", ".h5", ".hdf", ".he5", ".mat")


def is_hdf5(path: Path) -> bool:
    """Return whether a file is HDF5; a tar file that begins with an HDF5 file is not.

    In a remote folder only files named so are looked at, as each look is a request.
    """
    if not isinstance(path, RemotePath):
        return bool(h5py.is_hdf5(path)) and not is_tar(_head(path, TAR_AT + len(TAR)))
    if not path.is_file() or (path.inner and path.suffix.lower() not in _HDF5_NAMES):
        return False
    head = _head(path, BLOCK_BYTES)
    places = [0, *(512 << i for i in range(10))]
    return any(head[at : at + len(_HDF5)] == _HDF5 for at in places) and not is_tar(head)


def is_tar(head: bytes) -> bool:
    """Return whether a file with this beginning is a tar file."""
    return head[TAR_AT:].startswith(TAR)


def _head(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        head: bytes = file.read(num_bytes)
    return head


def hdf5_file(path: Path) -> h5py.File:
    """Open an HDF5 file for reading."""
    if not isinstance(path, RemotePath):
        return h5py.File(path, "r")
    file = h5py.File(RangedFile(path.source, path.inner), "r")
    _REMOTE_HDF5.add(file)
    return file


@atexit.register
def _close_remote_hdf5() -> None:
    """Close the remote files, which HDF5 would read once more after the interpreter has ended."""
    for file in list(_REMOTE_HDF5):
        file.close()


def zip_file(path: Path) -> zipfile.ZipFile:
    """Open a zip file for reading; its errors are those of `zipfile.ZipFile`."""
    if path.is_file() and not is_zip(path):
        raise zipfile.BadZipFile("the file does not begin as a zip file")
    return zipfile.ZipFile(path.open("rb") if isinstance(path, RemotePath) else path)


def is_zip(path: Path) -> bool:
    """Return whether a file is a zip file from its first byte on.

    zipfile looks at the end only, so it would take a tar file for the last npz file in it.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.read(len(_ZIP)) == _ZIP) and zipfile.is_zipfile(file)


def arrow_file(arrow: Any, path: Path) -> Any:
    """Return a file for pyarrow: mapped, or fetched by ranges."""
    if isinstance(path, RemotePath):
        return arrow.PythonFile(RangedFile(path.source, path.inner), mode="r")
    return arrow.memory_map(str(path))


def file_content(arrow: Any, path: Path) -> Any:
    """Return the bytes of a file by index: mapped, or fetched when they are used."""
    if isinstance(path, RemotePath):
        return RemoteBytes.whole(path.source, path.inner)
    return memoryview(arrow.memory_map(str(path)).read_buffer()).cast("B")


def is_below(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a place below a folder, also through links."""
    if isinstance(path, RemotePath):
        return path.is_relative_to(folder) and ".." not in path.inner.split("/")
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))

"""Checks of a source before it is read: it is self-contained, and small enough in memory.

A downloaded file could refer to other files of this machine, whose bytes would become a column; and
a few kilobytes could decompress to any amount of memory and disk. No reader gets such a source, not
even one from outside of the package.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py

from deepspeed_gear.data.dataset_files import check_no_pointer, read_object
from deepspeed_gear.data.sources.opened_files import hdf5_file, is_hdf5, is_zip, zip_file
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.errors import ConfigError, DataError

MAX_EXPANSION = 100.0  # default for the bytes of arrays per byte of their files
FLOOR_BYTES = 256 << 20  # any source may take as much, as constant columns compress by more
DAMAGED = "the file is damaged or incomplete; copy it again"
_OWN = "use a source that holds its data itself"
_ZIP_ERRORS = OSError, ValueError, NotImplementedError, zipfile.BadZipFile


def optional(where: str, rule: str, package: str, module: str) -> Any:
    """Import a module of an optional package; DataError where it is absent."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(where, rule, None, f"pip install {package}") from None


def pyarrow_for(where: str, rule: str = "must be read with pyarrow") -> Any:
    """Import pyarrow with Parquet; DataError where it is absent."""
    optional(where, rule, "pyarrow", "pyarrow.parquet")
    import_module("pyarrow.compute")
    return import_module("pyarrow")


class Expansion:
    """Bound of a source's memory: `most` bytes of arrays per byte of its files, or 256 MiB."""

    def __init__(self, most: float = MAX_EXPANSION) -> None:
        if isinstance(most, bool) or not isinstance(most, (int, float)) or not most >= 1:
            raise ConfigError(
                "max_expansion",
                "must be a number of at least 1",
                most,
                f"the default is {MAX_EXPANSION:g}",
            )
        self.most = most

    def most_bytes(self, file_bytes: int) -> int:
        """Return the most bytes of arrays for files of this size."""
        return int(max(FLOOR_BYTES, self.most * file_bytes))

    def check(self, where: str, num_bytes: int, file_bytes: int) -> None:
        """Raise DataError if arrays exceed the bound.

        Args:
            num_bytes: Bytes of the arrays, as declared or read so far.
            file_bytes: Bytes of the files that they are from.
        """
        if num_bytes > self.most_bytes(file_bytes):
            raise DataError(
                where,
                f"must hold at most {self.most:g} bytes for each of the {file_bytes} bytes of its "
                "files",
                num_bytes,
                "if the source is to be trusted, raise --max-expansion, or max_expansion of "
                "open_source",
            )


def check_source(path: Path, expansion: Expansion) -> None:
    """Check a file or folder, and all HDF5 and npz files in it.

    Raises:
        DataError: It is no file or folder, is a Git LFS pointer, has a link that leads out of it or
            nowhere; an HDF5 file in it refers to other files or to nothing; or a file declares
            arrays that are too large for it. Names file and key.
    Cost: the links and headers of all files; no array is read.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(
            str(path), "must be a file or a folder", stat.filemode(mode), "copy it into a file"
        )
    is_file = stat.S_ISREG(mode)
    if is_file:
        check_no_pointer(path)
    for file in [path] if is_file else files_in(path):
        if is_hdf5(file):
            _check_hdf5(file, expansion)
        elif (is_file or file.suffix == ".npz") and is_zip(file):
            check_archive(file, expansion)


def check_archive(path: Path, expansion: Expansion) -> None:
    """Raise if a zip file declares more than the bound.

    Readers read no more than is declared.
    """
    with DataError.on(str(path), "must be a readable zip file", *_ZIP_ERRORS, remedy=DAMAGED):
        with zip_file(path) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        expansion.check(str(path), num_bytes, path.stat().st_size)


def read_source_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a source."""
    return read_object(path, DAMAGED)


def check_description(where: str, value: Any) -> None:
    """Raise unless a value can be stored with the data set, as JSON."""
    with DataError.on(
        where,
        "must be JSON of finite numbers",
        TypeError,
        ValueError,
        RecursionError,
        remedy="keep strings, finite numbers, lists and dicts in it",
    ):
        json.dumps(value, allow_nan=False)


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file; b"" for anything else."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(count)


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder sorted by name; DataError for a link that leaves the folder."""
    if isinstance(folder, RemotePath):
        yield from folder.files_below()
        return
    root = Path(os.path.realpath(folder))
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(at, name)
            if path.is_symlink():
                _check_link(path, folder, root)
                continue  # its target is checked at its own place
            mode = path.stat().st_mode
            if stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                raise DataError(
                    str(path),
                    "must be a file or a folder",
                    stat.filemode(mode),
                    "remove it from the folder",
                )


def _check_link(path: Path, folder: Path, root: Path) -> None:
    target = os.path.realpath(path)  # of a loop: a link in it
    if not Path(target).is_relative_to(root):
        raise DataError(
            str(path),
            f"must not be a link out of {folder}",
            os.readlink(path),
            "if it is to be trusted, copy the folder with its targets: cp -rL",
        )
    if not os.path.exists(target):
        raise DataError(
            str(path), "must not be a link to nothing", os.readlink(path), "take a complete folder"
        )


def _check_hdf5(path: Path, expansion: Expansion) -> None:
    names: list[bytes] = []  # of all links
    sizes: dict[int, int] = {}  # of arrays by address, as one array may have several names
    with (
        DataError.on(
            str(path),
            "must be a readable HDF5 file",
            OSError,
            RuntimeError,
            KeyError,
            remedy=DAMAGED,
        ),
        hdf5_file(path) as file,
    ):
        file.id.links.visit(names.append)
        for name in names:
            where = f"{path}: {name.decode(errors='replace')}"
            with DataError.on(where, "must be a link of HDF5's own", TypeError, remedy=DAMAGED):
                link = file.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise DataError(
                    where,
                    "must not be a link to another file",
                    f"{link.filename}: {link.path}",
                    _OWN,
                )
            if isinstance(link, h5py.SoftLink) and file.get(name) is None:
                raise DataError(
                    where, "must not be a link to nothing", link.path, "take a complete file"
                )
            if isinstance(node := file[name], h5py.Dataset):
                sizes[h5py.h5o.get_info(node.id).addr] = _declared_bytes(where, node)
    expansion.check(str(path), sum(sizes.values()), path.stat().st_size)


def _declared_bytes(where: str, array: Any) -> int:
    """Return the bytes that reading an array takes: all of it, or one chunk if that is larger."""
    if array.external:
        files = ", ".join(str(entry[0]) for entry in array.external)
        raise DataError(where, "must not have its rows in other files", files, _OWN)
    if array.is_virtual:
        files = ", ".join(sorted({str(entry.file_name) for entry in array.virtual_sources()}))
        raise DataError(where, "must not be a virtual data set over other files", files, _OWN)
    if array.shape is None:
        return 0
    return int(array.dtype.itemsize * max(math.prod(array.shape), math.prod(array.chunks or (0,))))

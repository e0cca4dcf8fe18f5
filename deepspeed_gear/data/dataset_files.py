"""The files of an on-disk data set: headers, JSON, digests, fingerprint; Git LFS pointers."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.errors import DataError
from deepspeed_gear.file_system import sync
from deepspeed_gear.schema import Column

FORMAT = 2  # since 2 a column without allow_nan has only finite values
SCHEMA_FILE = "schema.json"
STATS_FILE = "stats.json"
EXTENTS_FILE = "extents.npy"
COMPRESSED = "compressed/"  # folder of the files of compressed columns
PROBE_BYTES = 64 * 1024
_BLOCK_BYTES = 4 * 1024 * 1024
_POINTER = b"version https://git-lfs.github.com/spec/"
REMAKE = "the file is not the one that was written; make the data set again with gear ingest"
_REMAKE_PARTS = "the file is not the one that was written; make the parts again with gear split"
#: Of LeRobot, TensorFlow Datasets, Hugging Face's datasets and Minari.
_DESCRIPTIONS = ("info.json", "dataset_info.json", "features.json", "metadata.json")


@dataclass(frozen=True)
class FileEntry:
    """Size and digests of one file: its entry in schema.json."""

    bytes: int  # of the whole file, header included
    sha256: str  # of the payload: what follows the NumPy header, or the whole of a JSON file
    probe: str  # SHA-256 of the first and last 64 KiB, which is cheap to check

    @classmethod
    def from_json(cls, name: str, entry: Any) -> FileEntry:
        kinds = (TypeError, KeyError, ValueError)
        with DataError.on(name, "must record bytes, sha256 and probe", *kinds, remedy=REMAKE):
            return cls(int(entry["bytes"]), str(entry["sha256"]), str(entry["probe"]))


@dataclass(frozen=True)
class DatasetPart:
    """The place of a contiguous part in its whole, in the order of ids."""

    index: int
    count: int
    first: int  # ids of its trajectories in the whole: [first, end)
    end: int
    # Sizes of the whole, the steps of its longest trajectory, and its fingerprint.
    trajectories: int
    rows: int
    steps: int
    longest: int
    whole: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry of schema.json.

        `end` is left out: it follows from the number of trajectories in the part.
        """
        return {name: value for name, value in asdict(self).items() if name != "end"}

    @classmethod
    def from_json(cls, name: str, entry: Any, num_trajectories: int) -> DatasetPart:
        """Read the entry of a part with `num_trajectories`; DataError if they contradict."""
        kinds = {f.name: str if f.name == "whole" else int for f in fields(cls) if f.name != "end"}
        if not isinstance(entry, dict) or set(entry) != set(kinds):
            raise DataError(name, f"must record {', '.join(kinds)}", entry, _REMAKE_PARTS)
        check_types(f"{name}.", entry, kinds, _REMAKE_PARTS)
        part = cls(**entry, end=entry["first"] + num_trajectories)
        is_consistent = (
            0 <= part.index < part.count
            and 0 <= part.first < part.end <= part.trajectories
            and (part.index == 0) == (part.first == 0)
            and (part.index == part.count - 1) == (part.end == part.trajectories)
        )
        if not is_consistent:
            raise DataError(
                name,
                f"must describe {num_trajectories} of the whole's trajectories",
                str(entry),
                _REMAKE_PARTS,
            )
        return part

    def __str__(self) -> str:
        ids = f"trajectories {self.first} to {self.end - 1} of {self.trajectories}"
        return f"part {self.index} of {self.count}, {ids} of {self.whole[:12]}"


def check_types(
    prefix: str, entry: Mapping[str, Any], kinds: Mapping[str, type], remedy: str
) -> None:
    """Raise DataError unless each JSON value has its type; a bool is no integer."""
    for key, kind in kinds.items():
        if type(entry.get(key)) is not kind:
            raise DataError(f"{prefix}{key}", f"must be {kind.__name__}", entry.get(key), remedy)


def column_file(column: Column) -> str:
    """Return the path of a column's file in the folder of a data set."""
    return f"columns/{column.name}.npy"


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a NumPy 1.0 header.

    NumPy pads it so that any number of rows fits later, in the same number of bytes.
    """
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def payload_digest(path: Path, offset: int) -> str:
    """Return the SHA-256 of a file from `offset` on. Cost: reads all of it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def probe_digest(path: Path) -> str:
    """Return the SHA-256 of a file's first and last 64 KiB.

    For extents and statistics it covers the whole file.
    """
    if path.name in (EXTENTS_FILE, STATS_FILE):
        return payload_digest(path, 0)
    with path.open("rb") as file:
        first = file.read(PROBE_BYTES)
        file.seek(max(PROBE_BYTES, file.seek(0, os.SEEK_END) - PROBE_BYTES))
        return hashlib.sha256(first + file.read(PROBE_BYTES)).hexdigest()


def write_json(path: Path, data: Mapping[str, Any]) -> FileEntry:
    """Write a JSON file and flush it to the disk; return its entry."""
    # Python writes indented JSON without its C encoder: for statistics of images of 172,800 values
    # that takes about 10 s more.
    indent = None if path.name == STATS_FILE else 1
    path.write_text(json.dumps(data, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
    sync(path)
    digest = payload_digest(path, 0)
    return FileEntry(path.stat().st_size, digest, digest)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a data set; DataError if the file is missing or malformed."""
    if not path.exists():
        raise DataError(
            str(path),
            "must exist",
            None,
            "the folder is not a gear data set; make one with gear ingest SOURCE DEST",
        )
    return read_object(path, REMAKE)


def described_folder(path: Path) -> Path | None:
    """Return the folder of a source that a file or a folder `meta` describes; None for others."""
    if path.name in _DESCRIPTIONS:
        folder = path.parent
    elif path.name == "meta" and (path / "info.json").is_file():
        folder = path
    else:
        return None
    return folder.parent if folder.name == "meta" else folder


def check_no_pointer(path: Path) -> None:
    """Raise if a file is a Git LFS pointer, as a clone without git-lfs has in place of data."""
    if path.is_file():
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
        if is_pointer:
            raise DataError(
                str(path),
                "must contain the data",
                "a Git LFS pointer",
                "run git lfs pull in the clone that it is from",
            )


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; DataError, with this remedy, if the file holds none."""
    check_no_pointer(path)
    with DataError.on(str(path), "must be readable JSON", OSError, ValueError, remedy=remedy):
        data = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise DataError(str(path), "must hold a JSON object", type(data).__name__, remedy)
    return data


def check_file(path: Path, entry: FileEntry) -> None:
    """Raise DataError unless a file has its recorded size and probe."""
    if not path.is_file():
        raise DataError(str(path), "must exist", None, "a file of the data set is missing")
    check_no_pointer(path)
    size = path.stat().st_size
    rule = f"must have {entry.bytes} bytes"
    if size != entry.bytes:
        what = "truncated" if size < entry.bytes else "not the one that was written"
        raise DataError(str(path), rule, size, f"the file is {what}; copy it again")
    if probe_digest(path) != entry.probe:
        raise DataError(str(path), "must hold the bytes that were written", None, REMAKE)


def fingerprint_of(manifest: Mapping[str, Any]) -> str:
    """Return the identity of a data set: SHA-256 of schema, extents, columns and a part's place.

    Statistics, split and the description of the source are left out: they may differ for the same
    data. Compression is left out too: `compressed` has the digest of a compressed column's plain
    rows.
    """
    kept = "format", "schema", "num_trajectories", "num_rows", "part"
    identity = {name: manifest[name] for name in kept if name in manifest}
    files = {
        name: entry["sha256"]
        for name, entry in manifest["files"].items()
        if name != STATS_FILE and not name.startswith(COMPRESSED)
    }
    # A compressed column counts as the file that it would be without compression.
    files |= {
        f"columns/{name}.npy": digest for name, digest in manifest.get("compressed", {}).items()
    }
    text = json.dumps({**identity, "files": files}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

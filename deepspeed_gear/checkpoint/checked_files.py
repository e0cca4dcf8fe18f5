"""Files of a checkpoint: JSON with a checksum, checked entries and digests, atomic replacement."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.dataset_files import payload_digest
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.file_system import sync
from deepspeed_gear.store import writer_options

ANOTHER = "take another checkpoint"
_EDITED = "it is damaged or was edited: " + ANOTHER
_MOST_COUNT = 1 << 62  # bound of the integers in a save, all of which count something
T = TypeVar("T")


def entry(mapping: Mapping[str, Any], name: str, kind: type[T], of: str, least: int = 0) -> T:
    """Return an entry of a state or a manifest.

    Args:
        mapping: The state or manifest, or a part of it.
        name: Name of the entry.
        kind: Type that it must have.
        of: Name of the mapping in errors.
        least: Least value of an integer.
    Raises:
        CheckpointError: The entry is missing, of another type, or out of range.
    """
    value = mapping.get(name) if isinstance(mapping, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        rule = f"must have the entry {name!r} ({kind.__name__})"
        given = None if value is None else type(value).__name__
        raise CheckpointError(of, rule, given, _EDITED)
    if isinstance(value, int) and not least <= value < _MOST_COUNT:
        rule = f"must be in [{least}, {_MOST_COUNT})"
        raise CheckpointError(f"{of}: {name}", rule, value, _EDITED)
    return value


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the file system as CheckpointErrors that name the path."""
    try:
        yield
    except OSError as error:
        remedy = "free space or correct the permissions; the save before this one stays loadable"
        at = error.filename or folder
        raise CheckpointError(
            str(at), "must be writable", error.strerror or str(error), remedy
        ) from error


def write_checked(path: Path, version: int, name: str, content: Mapping[str, Any]) -> None:
    """Write a mapping to a file, with a checksum and the version of its format; atomic."""
    written = {"format": version, "sha256": writer_options.digest(content), name: content}
    write_atomically(path, json.dumps(written, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; a crash at any point leaves the old or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def open_checked(path: Path, digest: str | None) -> BinaryIO:
    """Open a file of a save; it stays readable if another save replaces it.

    Raises:
        CheckpointError: It is missing, or has another SHA-256 than in its manifest.
    """
    changed = CheckpointError(str(path), "must be as it was saved", None, ANOTHER)
    try:
        file = path.open("rb")
    except OSError as error:
        raise changed from error
    if sha256(Path(link_of(file))) != digest:
        file.close()
        raise changed
    return file


def link_of(file: BinaryIO) -> str:
    """Return a path of an open file that is valid even after the file was renamed or removed."""
    return f"/proc/self/fd/{file.fileno()}"


def load_array(path: Path, digest: str | None) -> np.ndarray:
    """Read a NumPy file that has the SHA-256 of its manifest."""
    with open_checked(path, digest) as file:
        return np.asarray(np.load(file))


def map_array(path: Path, digest: str) -> np.ndarray:
    """Map a NumPy file that has the SHA-256 of its manifest; it stays readable as `open_checked`.

    Raises:
        CheckpointError: The file is missing, damaged or no array.
    """
    is_readable = CheckpointError.on(str(path), "must be readable", OSError, remedy=ANOTHER)
    with is_readable, open_checked(path, digest) as file:
        return np.asanyarray(np.load(link_of(file), mmap_mode="r"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise a CheckpointError if the file is missing or malformed."""
    with readable(path):
        content = parse_json(path.read_bytes())
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "must hold a mapping", type(content).__name__, ANOTHER)
    return content


def read_versioned(path: Path, version: int) -> dict[str, Any]:
    """Read a JSON object that must have this version of its format."""
    content = read_json(path)
    if content.get("format") != version:
        raise CheckpointError(
            str(path), f"must have format {version}", content.get("format"), ANOTHER
        )
    return content


def read_checked(path: Path, version: int, name: str) -> dict[str, Any]:
    """Read the mapping that `write_checked` has written, and check its checksum."""
    content = read_versioned(path, version)
    mapping: dict[str, Any] = entry(content, name, dict, str(path))
    if content.get("sha256") != writer_options.digest(mapping):
        raise CheckpointError(str(path), "must be as it was saved", None, ANOTHER)
    return mapping


def sha256(path: Path) -> str:
    return payload_digest(path, 0)


def readable(path: Path) -> AbstractContextManager[None]:
    """Raise errors of reading a file as CheckpointErrors that name it."""
    return CheckpointError.on(str(path), "must be readable", OSError, ValueError, remedy=ANOTHER)

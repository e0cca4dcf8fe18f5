"""Images in the rows of prompt sets: found, read from their files, and packed into one value.

verl, TRL and Hugging Face datasets write them so. A value is `{"bytes": ..., "path": ...}` or a
list of such objects or of byte strings. In columns that the option `images` names, it may also be a
path, a list of paths, or one byte string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.encoded_images import FORMATS, is_image_file, pack_images
from deepspeed_gear.data.ingest.source_columns import LEAVE_OUT
from deepspeed_gear.data.sources.opened_files import is_below
from deepspeed_gear.errors import DataError

_KEYS = {"bytes", "path"}
_LISTS = (list, tuple, np.ndarray)


class RowImages:
    """Finds the images of rows and packs them into one value for each column.

    Attributes:
        names: Kept columns that hold images: the named ones, and those that have been found.
        is_late: Whether a column was found after the first row, so that rows before it were taken
            for something else.
        num_bytes: Bytes of the image files that paths name, each file once.
    """

    def __init__(self, named: Sequence[str], select: Callable[[str], bool]) -> None:
        """Start without rows.

        Args:
            named: Columns that hold images in any form.
            select: Returns whether a column is kept; images of others are not read.
        """
        self._is_kept = lru_cache(maxsize=None)(select)
        self.names = {name for name in named if self._is_kept(name)}
        self.is_late = False
        self.num_bytes = 0
        self._is_first = True
        self._read: set[Path] = set()

    def begin_pass(self) -> None:
        """Start a pass over the rows, which takes the columns that are known for images."""
        self.is_late = False

    def loaded(self, where: str, row: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
        """Return a row whose images are lists of `{"bytes": ..., "path": ...}` with their bytes.

        Args:
            file: The file of the row, to which paths are relative; None for rows of a program.
        """
        for name, value in row.items():
            if name not in self.names and _holds_images(value) and self._is_kept(name):
                self.names.add(name)
                self.is_late |= not self._is_first
        self._is_first = False
        images = {
            name: [
                self._image(f"{where}: {name}[{number}]", part, file)
                for number, part in enumerate(_parts(row[name]))
            ]
            for name in self.names
            if name in row
        }
        return {**row, **images}

    def packed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of `loaded` with a packed value in each column of images."""
        packed = {
            name: pack_images([one["bytes"] for one in _parts(row.get(name))])
            for name in self.names
        }
        return {**row, **packed}

    def _image(self, where: str, part: Any, file: Path | None) -> dict[str, Any]:
        content = part.get("bytes") if isinstance(part, Mapping) else part
        path = part.get("path") if isinstance(part, Mapping) else None
        if isinstance(content, str):
            path = content
            content = None
        if content is None and isinstance(path, str):
            content = self._content(where, path, file)
        if not isinstance(content, (bytes, bytearray)):
            shown = "null" if content is None else type(content).__name__
            raise DataError(
                where, "must be an image: bytes, or a path", shown, f"fill it in, or {LEAVE_OUT}"
            )
        if not is_image_file(bytes(content)):
            raise DataError(
                where,
                f"must be an image in the format {', '.join(FORMATS)}",
                bytes(content[:8]),
                f"convert it, or {LEAVE_OUT}",
            )
        return {"bytes": bytes(content), "path": path}

    def _content(self, where: str, path: str, file: Path | None) -> bytes:
        """Read the image at a path that is relative to the folder of a row's file."""
        remedy = "write the bytes of the image into the row, or copy it beside the file of the row"
        if file is None:
            raise DataError(where, "must have its bytes in rows of a program", path, remedy)
        folder = file.parent
        image = folder / path
        is_relative = "\0" not in path and not PurePosixPath(path).is_absolute()
        if not is_relative or not is_below(image, folder) or not image.is_file():
            raise DataError(where, f"must be a file below {folder}", path[:200], remedy)
        check_no_pointer(image)
        with DataError.on(where, "must be readable", OSError, remedy="check its permissions"):
            content = image.read_bytes()
        if image not in self._read:
            self._read.add(image)
            self.num_bytes += len(content)
        return content


def _is_image(value: Any) -> bool:
    """Return whether a value is the object that Hugging Face datasets store for an image."""
    return isinstance(value, Mapping) and "bytes" in value and value.keys() <= _KEYS


def _holds_images(value: Any) -> bool:
    if not isinstance(value, _LISTS):
        return _is_image(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return False
    return bool(len(value)) and all(_is_image(one) or isinstance(one, bytes) for one in value)


def _parts(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, _LISTS) else [value]

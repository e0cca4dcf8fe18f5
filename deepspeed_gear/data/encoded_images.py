"""Images of a prompt as one value of a bytes column: their files, decoded when they are used.

The value is the number of images and the size of each, int64, then the files one after the other.
b"" stands for no image. For files of 3 and 2 bytes it is [2, 3, 2], and 5 bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError

_WORD = np.dtype("<i8")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEADS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")


def is_image_file(content: bytes) -> bool:
    """Return whether bytes begin as a file of one of `FORMATS` does."""
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    return is_webp or content.startswith(_HEADS)


def pack_images(files: Sequence[bytes]) -> bytes:
    """Return the value of a bytes column for the files of images."""
    if not files:
        return b""
    head = np.array([len(files), *map(len, files)], _WORD)
    return b"".join((head.tobytes(), *files))


def image_files(value: bytes, name: str = "images") -> list[bytes]:
    """Return the files of images as they were ingested, in order.

    Args:
        value: A value of the column, such as `lease.prompt["images"]`.
        name: Name for errors.
    """
    if not value:
        return []
    count = int.from_bytes(value[: _WORD.itemsize], "little", signed=True)
    at = _WORD.itemsize * (1 + count)
    is_whole = count > 0 and at <= len(value)
    sizes = np.frombuffer(value, _WORD, count, _WORD.itemsize).tolist() if is_whole else [-1]
    if min(sizes) < 0 or at + sum(sizes) != len(value):
        raise DataError(
            name,
            "must be images as gear ingest packs them",
            f"{len(value)} bytes",
            "give a value of a column that gear ingest made from images",
        )
    files = []
    for size in sizes:
        files.append(value[at : at + size])
        at += size
    return files


def open_images(value: bytes, name: str = "images") -> list[Any]:
    """Return the images as `PIL.Image`; only headers are read until pixels are used.

    Args:
        value: As in `image_files`.
        name: As in `image_files`.
    Raises:
        DataError: Pillow is missing, or an image is damaged.
    """
    try:
        Image = import_module("PIL.Image")
    except ImportError:
        raise DataError(name, "must be decoded with Pillow", None, "pip install pillow") from None
    images = []
    for number, file in enumerate(image_files(value, name)):
        # Pillow would try all formats that it knows, and for some starts programs.
        with DataError.on(
            f"{name}[{number}]",
            f"must be an image in the format {', '.join(FORMATS)}",
            Exception,
            remedy="correct the source and ingest it again",
        ):
            images.append(Image.open(io.BytesIO(file), formats=FORMATS))
    return images

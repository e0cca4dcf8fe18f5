"""Codecs of zarr chunks, from a fixed list: each decodes to a size that is known before.

zarr's own registry is not used, because codecs in it, such as pickle, run code of the source.
"""

from __future__ import annotations

import bz2
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.decoding.tfrecord import crc32c
from deepspeed_gear.data.ingest.source_checks import DAMAGED, optional
from deepspeed_gear.data.ingest.source_columns import LEAVE_OUT
from deepspeed_gear.errors import DataError

_EXTRA = "'deepspeed_gear[zarr]'"
_CHECKSUM_BYTES = 4
#: Codecs of one image per chunk, by the name of the decoder in imagecodecs.
IMAGES = {
    "imagecodecs_jpegxl": "jpegxl_decode",
    "imagecodecs_jpeg2k": "jpeg2k_decode",
}


def _gzip(where: str, content: bytes, num_bytes: int) -> bytes:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(content, num_bytes + 1)


def _zlib(where: str, content: bytes, num_bytes: int) -> bytes:
    return zlib.decompressobj().decompress(content, num_bytes + 1)


def _bz2(where: str, content: bytes, num_bytes: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(content, num_bytes + 1)


def _zstd(where: str, content: bytes, num_bytes: int) -> bytes:
    package = optional(where, "must be decompressed by zstandard", _EXTRA, "zstandard")
    stated = package.frame_content_size(content)
    if stated not in (-1, num_bytes):  # -1: the frame does not state it
        raise ValueError(f"a frame of {stated} bytes")
    decoded: bytes = package.ZstdDecompressor().decompress(content, max_output_size=num_bytes)
    return decoded


def _blosc(where: str, content: bytes, num_bytes: int) -> bytes:
    package = optional(where, "must be decompressed by numcodecs", _EXTRA, "numcodecs.blosc")
    # Bytes 4 to 15 of the header are the sizes of the content, of a block, and of the frame.
    if len(content) < 16:
        raise ValueError(f"a frame of {len(content)} bytes, without a header")
    stated = int.from_bytes(content[4:8], "little")
    if stated != num_bytes:
        raise ValueError(f"a frame of {stated} bytes")
    frame_bytes = int.from_bytes(content[12:16], "little")
    if frame_bytes != len(content):
        raise ValueError(f"{len(content)} bytes of a frame of {frame_bytes}")
    return bytes(package.decompress(content))


def _lz4(where: str, content: bytes, num_bytes: int) -> bytes:
    package = optional(where, "must be decompressed by numcodecs", _EXTRA, "numcodecs.lz4")
    stated = int.from_bytes(content[:4], "little")
    if stated != num_bytes:
        raise ValueError(f"a block of {stated} bytes")
    return bytes(package.decompress(content))


def _checked(where: str, content: bytes, num_bytes: int) -> bytes:
    inner = content[:-_CHECKSUM_BYTES]
    if crc32c(inner) != int.from_bytes(content[-_CHECKSUM_BYTES:], "little"):
        raise ValueError("another checksum")
    return inner


_DECODERS: Mapping[str, Callable[[str, bytes, int], bytes]] = {
    "gzip": _gzip,
    "zlib": _zlib,
    "bz2": _bz2,
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
    "crc32c": _checked,
}


@dataclass(frozen=True)
class ChunkCodecs:
    """How the bytes of a chunk become an array.

    Attributes:
        order: Order in which the axes are stored.
        dtype: With the byte order of the file.
        packing: Names of the codecs of bytes, in the order in which they were applied.
    """

    order: tuple[int, ...]
    dtype: np.dtype[Any]
    packing: tuple[str, ...]

    @property
    def is_image(self) -> bool:
        return self.packing[-1:] != () and self.packing[-1] in IMAGES

    def check(self, where: str) -> None:
        """Raise DataError for a codec that is not in the list, or for several compressors."""
        known = [*_DECODERS, *IMAGES]
        for name in self.packing:
            if name not in known:
                remedy = f"write the array again with one of them, or {LEAVE_OUT}"
                raise DataError(where, f"must be one of {', '.join(known)}", name, remedy)
        compressors = [name for name in self.packing if name != "crc32c"]
        if len(compressors) > 1 or (self.is_image and len(self.packing) > 1):
            remedy = f"write the array again with one compressor, or {LEAVE_OUT}"
            raise DataError(where, "must have one compressor at most", compressors, remedy)

    def decode(self, where: str, content: bytes, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the array of a chunk, with the byte order of the file."""
        num_bytes = math.prod(shape) * self.dtype.itemsize
        # A malformed chunk can raise any exception.
        with DataError.on(where, f"must hold {num_bytes} bytes", Exception, remedy=DAMAGED):
            if self.is_image:
                return _image(where, self.packing[-1], content, shape, self.dtype)
            sizes = [num_bytes]
            for name in self.packing:
                sizes.append(sizes[-1] + (_CHECKSUM_BYTES if name == "crc32c" else 0))
            for name, size in zip(reversed(self.packing), reversed(sizes[:-1]), strict=True):
                content = _DECODERS[name](where, content, size)
            if len(content) != num_bytes:
                raise ValueError(f"{len(content)} bytes, or more")
        stored = tuple(shape[axis] for axis in self.order)
        axes = np.argsort(self.order)
        array: NDArray[Any] = np.frombuffer(content, self.dtype).reshape(stored).transpose(axes)
        return array


def _image(
    where: str, name: str, content: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    package = optional(where, "must be decoded by imagecodecs", _EXTRA, "imagecodecs")
    # The encoder removes axes of one value, so a chunk [1, 224, 224, 3] is one image.
    out = np.empty([size for size in shape if size != 1], dtype)
    decoded = getattr(package, IMAGES[name])(content, out=out)
    return np.asarray(decoded).reshape(shape)

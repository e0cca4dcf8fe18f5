"""Compressed columns of a data set: one zstd frame per row, decoded when it is read."""

from __future__ import annotations

import math
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.array_file import ArrayFile
from deepspeed_gear.data.dataset_files import COMPRESSED, REMAKE, FileEntry, column_file
from deepspeed_gear.data.page_requests import PageRequests
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

DICTIONARY_BYTES = 32 * 1024
# Rows that a dictionary is trained on, in bytes; zstd advises 100 times its size.
_SAMPLE_BYTES = 100 * DICTIONARY_BYTES
# zstd's segment and match lengths in bytes. Of k = 64 to 4000, this one compresses Atari best.
_TRAINING = {"k": 2000, "d": 8}
_BLOCK_BYTES = 4 * 1024 * 1024


def files_of(column: Column) -> tuple[str, str]:
    """Return the names of the two files of a compressed column: frames and offsets."""
    return f"{COMPRESSED}{column.name}.frames.npy", f"{COMPRESSED}{column.name}.offsets.npy"


def zstandard_for(name: str, column: Column) -> Any:
    """Import zstandard for a column that is to be compressed or decoded.

    Raises:
        DataError: zstandard is absent, or the column has scalars or one row per trajectory, which
            selections read.
    """
    name = f"{name}: column {column.name}"
    if column.rows == "1" or not column.shape:
        raise DataError(
            name,
            "must have rows of several values, one a step, to be compressed",
            f"{list(column.shape)} with rows {column.rows}",
            "leave it as it is",
        )
    try:
        return import_module("zstandard")
    except ImportError:
        raise DataError(
            name,
            "must be compressed and decoded by zstandard",
            None,
            "pip install 'deepspeed_gear[zstd]'",
        ) from None


class CompressedRows:
    """Rows of a compressed column: an index, a slice or an array of indices decodes those rows.

    Args:
        name: Path of the frames, for errors.
        frames: The dictionary, then the frames of all rows. [bytes], uint8.
        offsets: Where each frame begins, and where the last one ends. [rows + 1], int64.

    Threads may share it: each has its own decompressor.
    """

    def __init__(
        self, name: str, column: Column, frames: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> None:
        self._zstd = zstandard_for(name, column)
        self._name = name
        self._row_bytes = column.row_bytes
        self.shape = (len(offsets) - 1, *column.shape)
        self.dtype = column.numpy_dtype
        self.nbytes = frames.nbytes + offsets.nbytes  # as stored
        self._mapped = frames, offsets
        self._requests: tuple[PageRequests, PageRequests] | None = None
        self._frames = np.asarray(frames)
        self._offsets = np.asarray(offsets)
        self._blob = self._frames.data
        self._local = threading.local()
        first, end = self._offsets[:2].tolist()
        if not 0 <= first <= DICTIONARY_BYTES:
            raise DataError(
                name,
                f"must begin with a dictionary of at most {DICTIONARY_BYTES} bytes",
                first,
                REMAKE,
            )
        self.dictionary = bytes(self._blob[:first])
        # Frames of rows of one size have equal headers, which hold that size: comparing them shows
        # before a row is decoded that it takes no more memory than it must.
        with DataError.on(name, "must hold zstd frames", self._zstd.ZstdError, remedy=REMAKE):
            head = self._zstd.frame_header_size(self._blob[first:end])
            size = self._zstd.frame_content_size(self._blob[first:end])
        if size != self._row_bytes:
            raise DataError(
                f"{name}: row 0", f"must decode to {self._row_bytes} bytes", size, REMAKE
            )
        self._header = self._frames[first : first + head].copy()

    def read_ahead(self) -> None:
        """Request the frames of a batch from the disk before they are decoded."""
        frames, offsets = self._mapped
        self._requests = PageRequests(frames), PageRequests(offsets)

    def decode(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Write the bytes of rows one after the other.

        Args:
            rows: Row numbers in [0, len). [n], int64.
            out: [n * row bytes], uint8.
        Raises:
            DataError: A frame is damaged; names its row.
        Cost: a call of zstd and a copy for each row. `multi_decompress_to_buffer`, one call for
        all, returns buffers of the compressed size, and joining them takes longer.
        """
        if self._requests is not None:
            self._requests[1].request(rows, rows + 2)
        begins = self._offsets[rows]
        ends = self._offsets[rows + 1]
        least = len(self._header)
        size = self._row_bytes
        # Offsets are checked before they are indices; only then are the headers compared.
        wrong = (
            (begins < len(self.dictionary)) | (ends - begins <= least) | (ends > len(self._frames))
        )
        if self._requests is not None:
            self._requests[0].request(begins, ends)
        if not wrong.any():
            wrong = (self._frames[begins[:, None] + np.arange(least)] != self._header).any(axis=1)
        rule = f"must have its own frame of {size} bytes"
        if wrong.any():
            raise DataError(f"{self._name}: row {rows[wrong.argmax()]}", rule, None, REMAKE)
        if not hasattr(self._local, "decompressor"):
            dictionary = self.dictionary
            self._local.decompressor = self._zstd.ZstdDecompressor(
                dict_data=self._zstd.ZstdCompressionDict(dictionary) if dictionary else None,
                max_window_size=max(size, 1024),  # zstd admits no smaller window
            )
        target = out.data
        blob = self._blob
        decompress = self._local.decompressor.decompress
        place = 0
        try:
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                target[place : place + size] = decompress(blob[begin:end])
                place += size
        except self._zstd.ZstdError as error:
            raise DataError(
                f"{self._name}: row {rows[place // size]}", rule, str(error), REMAKE
            ) from error

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Return decoded rows in a new array; an ellipsis may follow the index."""
        if isinstance(key, tuple):
            key = key[0] if key[1:] == (...,) else None
        at = np.arange(*key.indices(len(self))) if isinstance(key, slice) else np.asarray(key)
        if at.size and (
            at.dtype.kind not in "iu" or at.min() < -len(self) or at.max() >= len(self)
        ):
            raise IndexError(
                f"{self._name}: rows must be integers in [{-len(self)}, {len(self)}), got {key}"
            )
        out = np.empty((at.size, *self.shape[1:]), self.dtype)
        self.decode(at.reshape(-1).astype(np.int64) % len(self), out.reshape(-1).view(np.uint8))
        return out.reshape(*at.shape, *self.shape[1:])

    def __array__(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse the implicit conversion, which would decode all rows."""
        raise DataError(
            self._name,
            "must be read by rows",
            f"all {len(self)} rows",
            "take columns[name][first:end]",
        )


def compress(folder: Path, column: Column) -> dict[str, FileEntry]:
    """Replace a column's file by its frames and offsets; return their entries by file name.

    The dictionary is trained on evenly spaced rows; with too few rows there is none. Equal rows
    give equal bytes. Cost: about 2 us per KiB (zstd at level 3), and memory for a few MiB of rows.
    """
    zstd = zstandard_for("compress", column)
    plain = folder / column_file(column)
    rows = np.load(plain, mmap_mode="r").reshape(-1, column.num_elements)
    samples = [row.tobytes() for row in rows[:: math.ceil(rows.nbytes / _SAMPLE_BYTES)]]
    try:
        dictionary = zstd.train_dictionary(DICTIONARY_BYTES, samples, **_TRAINING).as_bytes()
    except zstd.ZstdError:
        dictionary = b""
    compressor = zstd.ZstdCompressor(
        dict_data=zstd.ZstdCompressionDict(dictionary) if dictionary else None,
        write_dict_id=False,
    )
    (folder / COMPRESSED).mkdir(exist_ok=True)
    frames_file, offsets_file = files_of(column)
    frames = ArrayFile(folder / frames_file, np.dtype(np.uint8), ())
    offsets = ArrayFile(folder / offsets_file, np.dtype(np.int64), ())
    # Offsets count from the beginning of the file, where the dictionary lies: with a dictionary of
    # 100 bytes and frames of 7 and 5, they are [100, 107, 112].
    frames.append(np.frombuffer(dictionary, np.uint8))
    end = len(dictionary)
    offsets.append(np.array([end]))
    step = max(1, _BLOCK_BYTES // column.row_bytes)
    for first in range(0, len(rows), step):
        parts = [compressor.compress(row.tobytes()) for row in rows[first : first + step]]
        ends = end + np.cumsum(list(map(len, parts)), dtype=np.int64)
        frames.append(np.frombuffer(b"".join(parts), np.uint8))
        offsets.append(ends)
        end = int(ends[-1])
    plain.unlink()
    return {frames_file: frames.finish(), offsets_file: offsets.finish()}

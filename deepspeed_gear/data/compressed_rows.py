"""Compressed columns of a data set: each row is a zstd frame of its own, which is decoded when it
is read.
"""

from __future__ import annotations

import math
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_files import COMPRESSED, REMAKE, ArrayFile, FileEntry, column_file
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

DICTIONARY_BYTES = 32 * 1024
_SAMPLE_BYTES = (
    100 * DICTIONARY_BYTES
)  # of the rows that a dictionary is trained on: zstd advises this ratio
_TRAINING = {
    "k": 2000,
    "d": 8,
}  # zstd's segment and match in bytes; the best of k = 64 to 4000 for Atari
_BLOCK_BYTES = 4 * 1024 * 1024


def files_of(column: Column) -> tuple[str, str]:
    """Return the names of the files of a compressed column: frames and offsets."""
    return f"{COMPRESSED}{column.name}.frames.npy", f"{COMPRESSED}{column.name}.offsets.npy"


def zstandard_for(name: str, column: Column) -> Any:
    """Import zstandard; raise DataError without it, or for scalars and single rows, which selection
    reads.
    """
    name = f"{name}: column {column.name}"
    if column.rows == "1" or not column.shape:
        rule = "must have rows of several values, one a step, to be compressed"
        raise DataError(
            name, rule, f"{list(column.shape)} with rows {column.rows}", "leave it as it is"
        )
    try:
        return import_module("zstandard")
    except ImportError:
        rule = "must be compressed and decoded by zstandard"
        remedy = "pip install 'deepspeed_gear[zstd]'"
        raise DataError(name, rule, None, remedy) from None


class CompressedRows:
    """The rows of a compressed column: an index, a slice or an array of indices decodes the rows it
    names.

    `frames` is the dictionary and the frames of all rows, [bytes], uint8; `offsets` where each
    frame begins, and the end of the last, [rows + 1], int64. Threads may share it: each has a
    decompressor.
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
        self._frames = np.asarray(frames)
        self._offsets = np.asarray(offsets)
        self._blob = self._frames.data
        self._local = threading.local()
        first, end = self._offsets[:2].tolist()
        if not 0 <= first <= DICTIONARY_BYTES:
            rule = f"must begin with a dictionary of at most {DICTIONARY_BYTES} bytes"
            raise DataError(name, rule, first, REMAKE)
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

    def decode(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Write the bytes of rows, each in [0, len), one after the other; a DataError names a
        damaged row.

        Cost: a call of zstd and a copy for each row. `multi_decompress_to_buffer`, one call for
        all, returns buffers of the compressed size, and joining them takes longer.
        """
        begins = self._offsets[rows]
        ends = self._offsets[rows + 1]
        least = len(self._header)
        size = self._row_bytes
        place = 0
        wrong = (
            (begins < len(self.dictionary)) | (ends - begins <= least) | (ends > len(self._frames))
        )
        if not wrong.any():
            wrong = (self._frames[begins[:, None] + np.arange(least)] != self._header).any(axis=1)
        rule = f"must have a frame of {size} bytes of its own"
        if wrong.any():
            raise DataError(f"{self._name}: row {rows[wrong.argmax()]}", rule, None, REMAKE)
        if not hasattr(self._local, "decompressor"):
            given = self._zstd.ZstdCompressionDict(self.dictionary) if self.dictionary else None
            window = max(size, 1024)  # the least of zstd
            self._local.decompressor = self._zstd.ZstdDecompressor(
                dict_data=given, max_window_size=window
            )
        target = out.data
        blob = self._blob
        decompress = self._local.decompressor.decompress
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
        """Return rows in an array of their own; an ellipsis may follow the index."""
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
        """Refuse to decode all rows where only some may be meant."""
        rule = "must be read by rows"
        remedy = "take columns[name][first:end]"
        raise DataError(self._name, rule, f"all {len(self)} rows", remedy)


def compress(folder: Path, column: Column) -> dict[str, FileEntry]:
    """Replace a column's file in a folder by those of its frames; return their entries by name.

    The dictionary is trained on rows of equal distance; too few rows make none. The same rows make
    the same bytes. Cost: zstd's at level 3, about 2 us per KiB; memory for a few MiB of rows.
    """
    zstd = zstandard_for("compress", column)
    plain = folder / column_file(column)
    rows = np.load(plain, mmap_mode="r").reshape(-1, column.num_elements)
    samples = [row.tobytes() for row in rows[:: math.ceil(rows.nbytes / _SAMPLE_BYTES)]]
    try:
        dictionary = zstd.train_dictionary(DICTIONARY_BYTES, samples, **_TRAINING).as_bytes()
    except zstd.ZstdError:
        dictionary = b""
    given = zstd.ZstdCompressionDict(dictionary) if dictionary else None
    compressor = zstd.ZstdCompressor(dict_data=given, write_dict_id=False)
    (folder / COMPRESSED).mkdir(exist_ok=True)
    frames_file, offsets_file = files_of(column)
    frames = ArrayFile(folder / frames_file, np.dtype(np.uint8), ())
    offsets = ArrayFile(folder / offsets_file, np.dtype(np.int64), ())
    frames.append(np.frombuffer(dictionary, np.uint8))
    offsets.append(np.array([end := len(dictionary)]))
    step = max(1, _BLOCK_BYTES // column.row_bytes)
    for first in range(0, len(rows), step):
        parts = [compressor.compress(row.tobytes()) for row in rows[first : first + step]]
        ends = end + np.cumsum(list(map(len, parts)), dtype=np.int64)
        frames.append(np.frombuffer(b"".join(parts), np.uint8))
        offsets.append(ends)
        end = int(ends[-1])
    plain.unlink()
    return {frames_file: frames.finish(), offsets_file: offsets.finish()}

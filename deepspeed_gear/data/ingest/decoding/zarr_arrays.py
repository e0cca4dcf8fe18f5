"""Arrays of a zarr store, versions 2 and 3, in a folder or a zip file, read chunk by chunk."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.decoding.zarr_codecs import ChunkCodecs
from deepspeed_gear.data.ingest.source_checks import DAMAGED, files_in
from deepspeed_gear.data.sources.opened_files import is_zip, zip_file
from deepspeed_gear.errors import DataError

METADATA = (".zarray", "zarr.json")  # of an array, in version 2 and 3
_NUMBERS = "biuf"
_NO_CHUNK = 2**64 - 1  # offset and size in the index of a shard
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_POINTER = b"version https://git-lfs"


class ZarrFiles:
    """The files of a store by key, such as `data/action/0.0`.

    Attributes:
        path: The folder or zip file.
        num_bytes: Bytes of all files of the folder, or of the zip file.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        if is_zip(path):
            with DataError.on(
                str(path), "must be a readable zip file", OSError, ValueError, remedy=DAMAGED
            ):
                self._archive = stack.enter_context(zip_file(path))
            entries = self._archive.infolist()
            self._sizes = {one.filename: one.file_size for one in entries if not one.is_dir()}
            self.num_bytes = path.stat().st_size
        else:
            files = [*files_in(path)]
            self._sizes = {file.relative_to(path).as_posix(): 0 for file in files}
            self.num_bytes = sum(file.stat().st_size for file in files)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def arrays(self, prefix: str) -> dict[str, str]:
        """Return the key of the metadata of each array below a prefix, by its name without it.

        Raises:
            DataError: A file of metadata cannot be read.
        """
        keys = {}
        for key in sorted(self._sizes):
            folder, _, name = key.rpartition("/")
            is_array = name == METADATA[0] or (
                name == METADATA[1] and self.json(key).get("node_type") == "array"
            )
            if is_array and folder.startswith(prefix):
                keys[folder.removeprefix(prefix)] = key
        return keys

    def where(self, key: str) -> str:
        """Return the place of a file for errors."""
        return f"{self.path}: {key}" if self._archive else str(self.path / key)

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return bytes of a file, to its end by default; a negative start counts from the end."""
        size = -1 if num_bytes is None else num_bytes
        kinds = (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile)
        with DataError.on(self.where(key), "must be readable", *kinds, remedy=DAMAGED):
            source = self._archive.open(key) if self._archive else (self.path / key).open("rb")
            with source as file:
                file.seek(start, 2 if start < 0 else 0)
                content = file.read(size)
        if content.startswith(_POINTER) and not self._archive:
            check_no_pointer(self.path / key)
        return content

    def json(self, key: str) -> dict[str, Any]:
        """Return the object of a JSON file."""
        with DataError.on(self.where(key), "must be readable JSON", ValueError, remedy=DAMAGED):
            value = parse_json(self.read(key).decode())
        if not isinstance(value, dict):
            raise DataError(self.where(key), "must hold an object", type(value).__name__, DAMAGED)
        return value


class ZarrArray:
    """An array of numbers, of which ranges of rows are read: `array[low:high]`.

    A chunk that is absent has the fill value in all places, as zarr defines it.

    Attributes:
        shape, ndim, dtype, chunks: As of an array of h5py; the dtype has this machine's byte order,
            and the chunks of a sharded array are those in its shards.
        fill: The fill value; None where the store has none.
        is_numeric: Whether values are bools, integers or floats; other arrays are not read.
    """

    def __init__(self, files: ZarrFiles, key: str) -> None:
        """Read and check the metadata of an array.

        Args:
            key: That of the metadata.
        """
        self._files = files
        self._name = key.rsplit("/", 1)[0]
        self._where = where = files.where(key)
        described = files.json(key)
        self.fill: Any = None
        self._index: tuple[str, NDArray[np.uint64] | None] = "", None  # of the last shard
        kinds = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
        with DataError.on(where, "must describe an array of zarr", *kinds, remedy=DAMAGED):
            is_second = key.endswith(METADATA[0])
            self.format = int(described["zarr_format"])
            if self.format != (2 if is_second else 3):
                raise ValueError(f"zarr_format {self.format}")
            self.shape = _sizes(described["shape"], 0)
            self.ndim = len(self.shape)
            dtype = described["dtype"] if is_second else described["data_type"]
            self.is_numeric, stored = _numeric(dtype, is_second)
            self.dtype = stored.newbyteorder("=")
            self.chunks: tuple[int, ...] = (1,) * self.ndim
            if not self.is_numeric:
                return
            if is_second:
                self._read_second(described, stored)
            else:
                self._read_third(described, stored)
            if len(self.chunks) != self.ndim or len(self._grid) != self.ndim:
                raise ValueError(f"chunks {list(self.chunks)} of an array {list(self.shape)}")
            if described["fill_value"] is not None:
                self.fill = _fill_value(described["fill_value"], self.dtype)
        self.codecs.check(f"{where}: codecs")

    def _read_second(self, described: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
        self.chunks = self._grid = _sizes(described["chunks"], 1)
        self._separator = str(described.get("dimension_separator", "."))
        self._prefix = ""
        axes = range(self.ndim)
        order = tuple(axes if described.get("order", "C") == "C" else reversed(axes))
        packing = [str(one["id"]) for one in described.get("filters") or ()]
        if (compressor := described.get("compressor")) is not None:
            packing.append(str(compressor["id"]))
        self.codecs = ChunkCodecs(order, dtype, tuple(packing))
        self._shard_index: ChunkCodecs | None = None

    def _read_third(self, described: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
        grid = described["chunk_grid"]
        if grid["name"] != "regular":
            raise ValueError(f"the chunk grid {grid['name']!s:.40}")
        self.chunks = self._grid = _sizes(grid["configuration"]["chunk_shape"], 1)
        keys = described.get("chunk_key_encoding", {"name": "default"})
        is_default = keys["name"] == "default"
        separator = "/" if is_default else "."
        self._separator = str(keys.get("configuration", {}).get("separator", separator))
        self._prefix = "c" + self._separator if is_default else ""
        self._shard_index = None
        codecs = described["codecs"]
        if [one["name"] for one in codecs] == ["sharding_indexed"]:
            options = codecs[0]["configuration"]
            self.chunks = _sizes(options["chunk_shape"], 1)
            parts = [whole % part for whole, part in zip(self._grid, self.chunks, strict=True)]
            if any(parts):
                raise ValueError(f"shards {list(self._grid)} of chunks {list(self.chunks)}")
            index = _chain(options["index_codecs"], np.dtype(np.uint64), self.ndim + 1)
            if any(name != "crc32c" for name in index.packing):
                raise ValueError("a compressed index")
            self._shard_index = index
            self._is_index_last = options.get("index_location", "end") == "end"
            codecs = options["codecs"]
        self.codecs = _chain(codecs, dtype, self.ndim)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that reading the array takes: all of it, or a larger chunk."""
        itemsize: int = self.dtype.itemsize
        return itemsize * max(math.prod(self.shape), math.prod(self.chunks))

    def num_absent(self) -> int:
        """Return how many chunks are absent. Cost: for a sharded array the index of each shard."""
        return sum(self._place(place) is None for place in self._places(0, len(self)))

    def __getitem__(self, rows: slice | tuple[()]) -> NDArray[Any]:
        low, high, _ = (slice(None) if isinstance(rows, tuple) else rows).indices(len(self))
        high = max(low, high)
        out = np.empty((high - low, *self.shape[1:]), self.dtype)
        for place in self._places(low, high):
            begin = [at * size for at, size in zip(place, self.chunks, strict=True)]
            # With rows [3, 8), chunks of 4 rows and the place 1, rows 4 to 7 of the array are rows
            # 0 to 3 of the chunk and 1 to 4 of the result.
            starts = [low, *[0] * (self.ndim - 1)]
            stops = [high, *self.shape[1:]]
            into = []
            part = []
            for axis, size in enumerate(self.chunks):
                first = max(starts[axis], begin[axis])
                last = min(stops[axis], begin[axis] + size)
                into.append(slice(first - starts[axis], last - starts[axis]))
                part.append(slice(first - begin[axis], last - begin[axis]))
            out[tuple(into)] = self._chunk(place)[tuple(part)]
        return out

    def _places(self, low: int, high: int) -> Iterator[tuple[int, ...]]:
        """Yield the places in the grid of all chunks that hold a range of rows."""
        rows = range(low // self.chunks[0], -(-high // self.chunks[0]))
        others = zip(self.shape[1:], self.chunks[1:], strict=True)
        yield from product(rows, *(range(-(-size // chunk)) for size, chunk in others))

    def _place(self, place: tuple[int, ...]) -> tuple[str, int, int | None] | None:
        """Return the key, offset and bytes of a chunk; None if it is absent."""
        per_file = [whole // part for whole, part in zip(self._grid, self.chunks, strict=True)]
        outer = [at // count for at, count in zip(place, per_file, strict=True)]
        key = f"{self._name}/{self._prefix}{self._separator.join(map(str, outer))}"
        if key not in self._files:
            return None
        if self._shard_index is None:
            return key, 0, None
        if self._index[0] != key:
            shape = (*per_file, 2)
            num_bytes = 8 * math.prod(shape) + 4 * len(self._shard_index.packing)
            start = -num_bytes if self._is_index_last else 0
            content = self._files.read(key, start, num_bytes)
            where = f"{self._files.where(key)}: index"
            self._index = key, self._shard_index.decode(where, content, shape)
        entries = self._index[1]
        assert entries is not None
        inner = tuple(at % count for at, count in zip(place, per_file, strict=True))
        offset, num_bytes = (int(one) for one in entries[inner])
        return None if offset == num_bytes == _NO_CHUNK else (key, offset, num_bytes)

    def _chunk(self, place: tuple[int, ...]) -> NDArray[Any]:
        stored = self._place(place)
        if stored is not None:
            key, offset, num_bytes = stored
            content = self._files.read(key, offset, num_bytes)
            return self.codecs.decode(self._files.where(key), content, self.chunks)
        if self.fill is None:
            raise DataError(
                f"{self._where}: chunk {list(place)}",
                "must exist, as the array has no fill value",
                None,
                "the store is incomplete; copy it again",
            )
        return np.broadcast_to(self.fill, self.chunks)


def _sizes(values: Any, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(n) is not int or n < least for n in values):
        raise ValueError(f"the sizes {values!r:.200}")
    return tuple(values)


def _numeric(name: Any, is_second: bool) -> tuple[bool, np.dtype[Any]]:
    """Return whether a dtype is one of numbers, and the dtype; another stands for all others."""
    other = np.dtype(object)
    if not isinstance(name, str):  # records, and the extensions of version 3
        return False, other
    pattern = r"[<>|][biuf]\d" if is_second else r"bool|u?int(8|16|32|64)|float(16|32|64)"
    if not re.fullmatch(pattern, name):
        return False, other
    dtype = np.dtype(name)
    return dtype.kind in _NUMBERS, dtype


def _chain(codecs: Any, dtype: np.dtype[Any], ndim: int) -> ChunkCodecs:
    """Return the codecs of version 3, which are a list of any length, with `bytes` in it."""
    order = list(range(ndim))
    names = [str(one["name"]) for one in codecs]
    at = names.index("bytes")
    for one in codecs[:at]:
        if one["name"] != "transpose":
            return ChunkCodecs(tuple(order), dtype, (str(one["name"]),))  # which is refused by name
        axes = one["configuration"]["order"]
        if sorted(axes) != list(range(ndim)):
            raise ValueError(f"the axes {axes!r:.200}")
        order = [order[axis] for axis in axes]
    endian = (codecs[at].get("configuration") or {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise ValueError(f"the byte order {endian!r:.40}")
    stored = dtype.newbyteorder("<" if endian == "little" else ">")
    return ChunkCodecs(tuple(order), stored, tuple(names[at + 1 :]))


def _fill_value(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(value, str) and value.startswith("0x"):  # the bits of a float
        bits = int(value, 16).to_bytes(dtype.itemsize, "little")
        return np.frombuffer(bits, dtype).reshape(())
    number = _FLOATS[value] if isinstance(value, str) else value
    if isinstance(number, (list, dict)):
        raise ValueError(f"the fill value {value!r:.80}")
    return np.asarray(number, dtype)

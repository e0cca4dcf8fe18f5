"""Arrow and Parquet files of random types whose buffers are small and whose declared lengths are
large.

Every file is read as `gear ingest` reads it, in a child with a limit of memory: the outcome is a
data set or a DataError, never another exception, a crash, or more memory than the bound of
`--max-expansion` allows. Prints counts as JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from deepspeed_gear.data.ingest import open_source, source_checks
from deepspeed_gear.errors import DataError

FLOOR_BYTES = 8 << 20  # of the bound, in place of 256 MiB: what is beyond it shows
MOST_BYTES = 32 * FLOOR_BYTES  # of a child above what it began with
LIMIT_BYTES = 4 << 30  # of address space, of which pyarrow reserves a GiB at once
CPU_S = 600  # of a child
TOGETHER = 25  # files of a child; those of one that ends otherwise are read alone
MOST_DEPTH = 4
MANY = (0, 1, 2, 7, 1000, 100_000, 10_000_000, 1_000_000_000)  # lengths that take no bytes
NAMES = (
    "action",
    "reward",
    "observation",
    "done",
    "truncated",
    "episode_id",
    "value",
    "messages",
    "tokens",
)


class Shapes:
    """Makes random arrays, valid but for their size."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.leaves: tuple[Callable[[int], Any], ...] = (
            self.null, self.boolean, self.number, self.half, self.time, self.decimal, self.text,
            self.text_view, self.fixed_bytes,
        )  # fmt: skip
        self.nests: tuple[Callable[[int, int], Any], ...] = (
            self.lists, self.list_views, self.fixed_lists, self.struct, self.map, self.dictionary, self.runs,
            self.sparse_union, self.dense_union, self.extension,
        )  # fmt: skip

    def array(self, length: int, depth: int = 0) -> Any:
        """Return an array of a length, with some nulls in it now and then."""
        if depth < MOST_DEPTH and self.random.random() < 0.6:
            return self.random.choice(self.nests)(length, depth + 1)
        if length > 200_000:
            return self.random.choice((self.null, self.empty_struct, self.empty_lists))(length)
        return self.random.choice(self.leaves)(length)

    def many(self, most: int = 10_000_000) -> int:
        return self.random.choice([length for length in MANY if length <= most])

    def validity(self, length: int) -> Any:
        """Return a bitmap, or None: all are valid."""
        if length > 200_000 or self.random.random() < 0.7:
            return None
        return pa.py_buffer(self.numbers.integers(0, 256, (length + 7) // 8, np.uint8))

    def null(self, length: int) -> Any:
        return pa.nulls(length)

    def empty_struct(self, length: int) -> Any:
        return pa.StructArray.from_buffers(pa.struct([]), length, [self.validity(length)])

    def empty_lists(self, length: int) -> Any:
        child = self.array(self.many(1000), MOST_DEPTH)
        return pa.Array.from_buffers(pa.list_(child.type, 0), length, [None], children=[child])

    def masked(self, length: int) -> Any:
        return None if self.validity(length) is None else self.numbers.random(length) < 0.2

    def boolean(self, length: int) -> Any:
        return pa.array(self.numbers.random(length) < 0.5, mask=self.masked(length))

    def number(self, length: int) -> Any:
        kind = self.random.choice("i1 i2 i4 i8 u1 u2 u4 u8 f4 f8".split())
        values = (
            np.zeros(length, kind) if self.random.random() < 0.5 else np.arange(length).astype(kind)
        )
        return pa.array(values, mask=self.masked(length))

    def half(self, length: int) -> Any:
        return pa.array(np.zeros(length, np.float16))

    def time(self, length: int) -> Any:
        kinds = (
            pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.timestamp("ns"), pa.timestamp("s"),
            pa.timestamp("us", "UTC"), pa.timestamp("us", "Nowhere/Else"), pa.duration("ns"),
            pa.month_day_nano_interval(),
        )  # fmt: skip
        kind = self.random.choice(kinds)
        largest = self.random.choice((1, 86_399, 2**31 - 1, 2**62))
        words = np.full(2 * length, min(largest, 2**31 - 1), np.int32)
        values: Any = words if kind.bit_width == 32 else np.full(2 * length, largest, np.int64)
        if pa.types.is_date64(kind):
            values = np.zeros(length, np.int64)
        if pa.types.is_time(kind):
            values = np.full(length, 1, values.dtype)
        return pa.Array.from_buffers(kind, length, [self.validity(length), pa.py_buffer(values)])

    def decimal(self, length: int) -> Any:
        kind = self.random.choice((pa.decimal128(38, 2), pa.decimal256(76, -3)))
        values = pa.py_buffer(
            np.ones(length * kind.byte_width, np.uint8) * self.random.choice((0, 1))
        )
        return pa.Array.from_buffers(kind, length, [self.validity(length), values])

    def text(self, length: int) -> Any:
        kind = self.random.choice((pa.string(), pa.binary(), pa.large_string(), pa.large_binary()))
        dtype = (
            np.int64
            if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
            else np.int32
        )
        size = self.many(100_000)
        offsets = np.sort(self.numbers.integers(0, size + 1, length + 1)).astype(dtype)
        content = pa.py_buffer(b"x" * size)
        return pa.Array.from_buffers(
            kind, length, [self.validity(length), pa.py_buffer(offsets), content]
        )

    def text_view(self, length: int) -> Any:
        kind = self.random.choice((pa.string_view(), pa.binary_view()))
        size = self.many(100_000)
        entries = np.zeros((length, 4), np.int32)
        entries[:, 0] = size
        entries[:, 1:] = 0x78787878 if size <= 12 else 0
        entries[:, 1] = 0x78787878
        letters = np.arange(12) >= min(size, 12)
        if size <= 12:
            inline = entries.view(np.uint8).reshape(length, 16)
            inline[:, 4:][:, letters] = 0
        buffers = [self.validity(length), pa.py_buffer(entries), pa.py_buffer(b"x" * size)]
        return pa.Array.from_buffers(kind, length, buffers)

    def fixed_bytes(self, length: int) -> Any:
        size = self.random.choice((1, 7, 100))
        content = pa.py_buffer(bytes(length * size))
        return pa.Array.from_buffers(pa.binary(size), length, [self.validity(length), content])

    def lists(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.fixed_lists(length, depth)
        child = self.array(self.many(), depth)
        wide = self.random.random() < 0.3
        steps = np.sort(self.numbers.integers(0, len(child) + 1, length + 1))
        steps = np.linspace(0, len(child), length + 1) if self.random.random() < 0.5 else steps
        if not wide and len(child) >= 2**31:
            wide = True
        offsets = pa.py_buffer(steps.astype(np.int64 if wide else np.int32))
        kind = (pa.large_list if wide else pa.list_)(child.type)
        return pa.Array.from_buffers(
            kind, length, [self.validity(length), offsets], children=[child]
        )

    def list_views(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.empty_lists(length)
        child = self.array(self.many(), depth)
        dtype = self.random.choice((np.int32, np.int64))
        offsets = self.numbers.integers(0, len(child) // 2 + 1, length).astype(dtype)
        sizes = np.full(length, len(child) - len(child) // 2 - (len(child) % 2 > 0), dtype)
        kind = (pa.list_view if dtype == np.int32 else pa.large_list_view)(child.type)
        buffers = [self.validity(length), pa.py_buffer(offsets), pa.py_buffer(np.maximum(sizes, 0))]
        return pa.Array.from_buffers(kind, length, buffers, children=[child])

    def fixed_lists(self, length: int, depth: int) -> Any:
        size = self.random.choice((0, 1, 2, 1000))
        size = size if length * size <= MANY[-1] else 0
        child = self.array(length * size, depth)
        kind = pa.list_(child.type, size)
        return pa.Array.from_buffers(kind, length, [self.validity(length)], children=[child])

    def struct(self, length: int, depth: int) -> Any:
        parts = [self.array(length, depth) for _ in range(self.random.randrange(4))]
        names = self.random.choice(
            (("a", "b", "c"), ("role", "content", "token_ids"), ("a", "a", ""))
        )
        kind = pa.struct(
            [pa.field(name, part.type) for name, part in zip(names, parts, strict=False)]
        )
        return pa.Array.from_buffers(kind, length, [self.validity(length)], children=parts)

    def map(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.empty_struct(length)
        items = self.array(self.many(100_000), depth)
        keys = (
            self.text(len(items))
            if self.random.random() < 0.5
            else pa.array(np.zeros(len(items), np.int8))
        )
        if keys.null_count:
            keys = keys.fill_null(
                keys[0] if keys[0].is_valid else b"" if "binary" in str(keys.type) else ""
            )
        offsets = np.sort(self.numbers.integers(0, len(items) + 1, length + 1)).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, items)

    def dictionary(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.null(length)
        words = self.array(self.random.choice((1, 2, 7, 100)), depth)
        indices = self.numbers.integers(0, len(words), length).astype(
            self.random.choice((np.int8, np.int32))
        )
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=self.masked(length)), words)

    def runs(self, length: int, depth: int) -> Any:
        count = min(length, self.random.choice((1, 2, 7)))
        ends = np.linspace(0, length, count + 1)[1:].astype(np.int64)
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends), self.array(count, depth))

    def sparse_union(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.null(length)
        parts = [self.array(length, depth) for _ in range(2)]
        return pa.UnionArray.from_sparse(
            pa.array(self.numbers.integers(0, 2, length).astype(np.int8)), parts
        )

    def dense_union(self, length: int, depth: int) -> Any:
        if length > 200_000:
            return self.null(length)
        codes = pa.array(np.zeros(length, np.int8))
        places = pa.array(np.zeros(length, np.int32))
        return pa.UnionArray.from_dense(codes, places, [self.array(1, depth), self.array(0, depth)])

    def extension(self, length: int, depth: int) -> Any:
        if self.random.random() < 0.5 and length <= 200_000:
            storage = pa.array(["1"] * length, pa.string())
            return pa.ExtensionArray.from_storage(pa.json_(pa.string()), storage)
        storage = self.empty_lists(length)
        kind = pa.fixed_shape_tensor(storage.type.value_type, (0,))
        return pa.ExtensionArray.from_storage(kind, pa.Array.from_buffers(
            pa.list_(pa.field("item", storage.type.value_type), 0), length, [None], children=[storage.values]
        ))  # fmt: skip


def make(folder: Path, seed: int) -> tuple[str, str] | None:
    """Write a random file, valid by pyarrow's own check; None if pyarrow cannot write it."""
    shapes = Shapes(seed)
    chance = shapes.random
    form = chance.choice(("arrow", "arrow", "stream", "parquet", "parquet"))
    length = shapes.many(1_000_000_000 if form != "parquet" else 1_000_000)
    length = chance.choice((1, 2, 7, length))
    try:
        columns = [shapes.array(length) for _ in range(chance.randrange(1, 4))]
        names = chance.sample(NAMES, len(columns))
        if length <= 100_000 and chance.random() < 0.7:  # a table of steps or of episodes
            is_steps = chance.random() < 0.5
            action = pa.array(np.zeros(length, np.int8))
            columns[:2] = [action if is_steps else pa.array([[0.0, 0.0]] * length), columns[-1]]
            names = ["action", "value", *chance.sample(NAMES[3:6], len(columns) - 2)]
            if is_steps and "episode_id" not in names:
                columns.append(pa.array(np.arange(length) // 3))
                names.append("episode_id")
        for column in columns:
            if length <= 1_000_000:
                column.validate()
        batch = pa.record_batch(columns, names=names)
        described = str(batch.schema).replace("\n", ", ")
        path = folder / f"{seed}.{'arrow' if form == 'stream' else form}"
        codec = chance.choice((None, None, "zstd", "lz4"))
        if form == "parquet":
            options: dict[str, Any] = {
                "compression": codec or "none",
                "use_dictionary": chance.random() < 0.8,
                "data_page_version": chance.choice(("1.0", "2.0")),
                "store_schema": chance.random() < 0.7,
            }
            parquet.write_table(pa.Table.from_batches([batch]), path, **options)
        else:
            new = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
            with new(
                str(path), batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
            ) as writer:
                writer.write_batch(batch)
    except (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, ArithmeticError):
        return None
    return str(path), described


def make_all(folder: Path, seeds: list[int]) -> list[tuple[str, str]]:
    """Write the files of seeds; pyarrow ends the process that writes some types, which are left
    out.
    """
    found = in_child(lambda: {"made": [make(folder, seed) for seed in seeds]}, CPU_S)
    if "made" in found:
        return [one for one in found["made"] if one is not None]
    if len(seeds) == 1:
        return []
    return [one for seed in seeds for one in make_all(folder, [seed])]


def read(path: Path) -> str:
    """Return "read" or "refused"."""
    try:
        with open_source(path) as reader:
            for _, arrays in reader.episodes():
                del arrays
    except DataError as error:
        return "too large" if "--max-expansion" in str(error) else "refused"
    return "read"


def in_child(work: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """Return what `work` returns in a forked child, or how the child ended."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
        try:
            found = work()
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = {
                "raw": f"{type(error).__name__}: {str(error)[:200]} at "
                f"{last.filename}:{last.lineno}"
            }
        os.write(sender, json.dumps(found).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        return {"ended": f"status {status}"}
    found: dict[str, Any] = json.loads(content)
    return found


def attempt(paths: list[Path]) -> dict[str, Any]:
    """Read files with a limit of memory; return the outcomes and the memory that this took."""
    source_checks.FLOOR_BYTES = FLOOR_BYTES
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = before + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = [read(path) for path in paths]
    return {
        "outcomes": outcomes,
        "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) << 10,
    }


def is_wrong(found: dict[str, Any], size: int) -> bool:
    """Return whether an attempt at files of so many bytes did not end as it must."""
    return "outcomes" not in found or found["grown"] > MOST_BYTES + 100 * size


def fuzz(files: int, seed: int, keep: str = "") -> dict[str, Any]:
    """Make and read files; return counts, and what is wrong with its seed."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    largest = 0
    folder = Path(tempfile.mkdtemp(prefix="gear_fuzz_arrow_"))
    try:
        for first in range(seed, seed + files, TOGETHER):
            seeds = range(first, min(first + TOGETHER, seed + files))
            made = make_all(folder, [*seeds])
            described = {Path(name): text for name, text in made}
            counts["not made"] += len(seeds) - len(described)
            paths = [*described]
            found = in_child(lambda paths=paths: attempt(paths), CPU_S)
            largest = max(largest, found.get("grown", 0))
            if not is_wrong(found, 0):
                counts.update(found["outcomes"])
            else:  # one of them, or a large file
                for path, text in described.items():
                    size = path.stat().st_size
                    alone = in_child(lambda path=path: attempt([path]), CPU_S)
                    counts.update(alone.get("outcomes", ["wrong"]))
                    if is_wrong(alone, size):
                        wrong.append(f"{path.name}: {size} bytes: {alone}: {text[:300]}")
                        if keep:
                            shutil.copy(path, keep)
            for path in paths:
                path.unlink()
    finally:
        shutil.rmtree(folder)
    return {"files": files, "counts": dict(counts), "largest_mib": largest >> 20, "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", default="", help="folder for the files that are wrong")
    given = parser.parse_args()
    result = fuzz(given.files, given.seed, given.keep)
    for line in result["wrong"]:
        print(line, file=sys.stderr)
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))

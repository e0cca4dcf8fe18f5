"""Rows of mapped files that are read ahead: equal batches, and the pages of the next one."""

import ctypes
import gc
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from replay_support import same, streams_of

from deepspeed_gear import Batch, Column, DatasetWriter, Replay, Schema
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.errors import DataError
from deepspeed_gear.replay import node_stores
from deepspeed_gear.sampling import batch_stream
from deepspeed_gear.sampling.batch_sizes import BatchInfo

SCHEMA = Schema(
    [
        Column("state", "float32", (11,), "observation", "T+1"),
        Column("wide", "float32", (700,)),  # of more than a page in two rows
        Column("flag", "bool", ()),
        Column("terminated", "bool", (), "terminated"),
        Column("word", "int64", (1,)),
        Column("half", "float16", (7,)),
        Column("reward", "float32", (), "reward"),
        Column("task", "int32", (3,), rows="1"),
    ]
)
PLAIN: dict[str, Any] = {name: {} for name in ("state", "wide", "flag", "word", "half", "task")}
PADDED: dict[str, Any] = {
    "before": {"column": "wide", "offset": -3, "length": 6},
    "left": {"column": "half", "offset": -2, "length": 5, "align": "left"},
    "edge": {"column": "state", "offset": -3, "length": 6, "pad": "edge"},
    "after": {"column": "word", "offset": 4, "length": 9, "pad": "edge"},
    "long": {"column": "flag", "as": "float32", "offset": 0, "length": 60},
    "step": {"derived": "timestep", "offset": -1, "length": 3},
}
GOALS: dict[str, Any] = {
    "goal": {"column": "word", "hindsight": "word"},
    "state": {"offset": -1, "length": 2},
}
STEPS: dict[str, Any] = {"unit": "step"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"fields": PLAIN, "sampler": STEPS},
    "padded": {"fields": PADDED, "sampler": STEPS},
    "prefetched": {"fields": PLAIN, "sampler": STEPS, "prefetch": 2},
    "threads": {"fields": PADDED, "sampler": STEPS, "threads": 3},
    "trajectories": {"fields": {**PADDED, **PLAIN}, "sampler": {"unit": "trajectory"}},
    "epochs": {"fields": PLAIN, "sampler": {"kind": "epoch", "unit": "step"}},
    "n-step": {
        "fields": {"word": {}, "next": {"column": "state", "offset": "n_step"}},
        "sampler": STEPS,
        "n_step": {"n": 3, "gamma": 0.9},
    },
    "goals": {"fields": GOALS, "sampler": STEPS, "hindsight": {}},
    "prioritized": {"fields": PADDED, "sampler": {"kind": "prioritized", "unit": "step"}},
}
LENGTHS = [1, 30, 2, 65, 7, 1, 44, 33]


def write(folder: Path, compress: Any = None) -> Path:
    with DatasetWriter(folder, SCHEMA, compress=compress) as writer:
        for number, steps in enumerate(LENGTHS):
            random = np.random.default_rng(number)
            lengths = {"T": (steps,), "T+1": (steps + 1,), "1": ()}
            writer.add(
                {
                    c.name: random.integers(0, 2, (*lengths[c.rows], *c.shape)).astype(c.dtype)
                    for c in SCHEMA
                }
                | {"terminated": np.arange(steps) == steps - 1}
            )
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ahead") / "data")


def run(
    data: Path, read_ahead: Any, parts: int = 1, count: int = 12, **options: Any
) -> list[Batch]:
    """Return batches, between reports where there are priorities."""
    source = {"path": str(data), "read_ahead": read_ahead}
    size = {"batch_size": 9} if parts == 1 else {}
    info = None if parts == 1 else BatchInfo(micro=5, accumulation=parts, data_world=1)
    kept = []
    with Replay(
        config_of(Path(source["path"]), data=source, **size, **options), info=info
    ) as replay:
        stream = streams_of(replay)["train"]
        assert stream.table.parts_ahead == int(read_ahead)
        for _ in range(count):
            batch = replay.sample()
            kept.append(batch.clone())
            if stream.spec.priorities is not None:
                replay.update_priorities(batch, (batch.anchor % 5).float() + 0.25)
    return kept


def check_equal(batches: list[Batch], others: list[Batch]) -> None:
    for batch, other in zip(batches, others, strict=True):
        assert same(batch, other)
        assert all(torch.equal(batch.mask[name], other.mask[name]) for name in batch.mask)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most_bytes", [1, 40_000, 1 << 20], ids=["samples", "blocks", "batches"])
def test_batches_are_those_that_are_not_read_ahead(
    data: Path, case: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requested sample by sample, in blocks and whole; each by one native call and by two."""
    monkeypatch.setattr(node_stores, "_LEAST_AHEAD_BYTES", most_bytes)
    monkeypatch.setattr(node_stores, "_MOST_AHEAD_BYTES", most_bytes)
    for parts in (1, 3):
        wanted = run(data, False, parts, **CASES[case])
        check_equal(run(data, True, parts, **CASES[case]), wanted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_stream, "is_plain", lambda state: False)
            check_equal(run(data, True, parts, **CASES[case]), wanted)


def test_packs_are_those_that_are_not_read_ahead(data: Path) -> None:
    fields: dict[str, Any] = {"wide": {}, "state": {"offset": 1}, "task": {}}
    found = []
    for read_ahead in (False, True):
        source = {"path": str(data), "read_ahead": read_ahead}
        section = config_of(data, data=source, fields=fields, pack={"tokens": 128})
        with Replay({**section, "rollout": {"trajectories": 4}}) as replay:
            micros = [micro for step in replay.rollout() for micro in step]
            found.append([{name: micro[name].clone() for name in fields} for micro in micros])
    for pack, other in zip(*found, strict=True):
        assert all(torch.equal(pack[name], other[name]) for name in fields)


def test_compressed_columns_are_read_ahead(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    folder = write(tmp_path / "data", compress=["wide"])
    fields = {"wide": {"offset": -1, "length": 3}, "flag": {}}
    options: dict[str, Any] = {"fields": fields, "sampler": STEPS}
    check_equal(run(folder, True, **options), run(folder, False, **options))


def missing_pages(array: np.ndarray) -> int:
    """Return how many pages of a mapped array are not in memory."""
    memory = array._mmap  # type: ignore[attr-defined]
    num_pages = -(-len(memory) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * num_pages)()
    first = np.frombuffer(memory, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(memory)), states)
    assert status == 0
    return sum(1 - (state & 1) for state in states)


def drop_pages(dataset: Dataset) -> None:
    """Remove the pages of a data set's files from memory: maps first, which keep them."""
    dataset.files.advise(mmap.MADV_DONTNEED)
    for path in dataset.path.rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("read_ahead", [False, True])
def test_the_pages_of_the_next_batch_are_requested(tmp_path: Path, read_ahead: bool) -> None:
    """The pages that the next batch reads, and no others, come into memory without being read."""
    schema = Schema([Column("wide", "float32", (1024,)), Column("reward", "float32", (), "reward")])
    writer = DatasetWriter(tmp_path / "data", schema)
    for number in range(64):
        rows = np.full((32, 1024), number, np.float32)
        writer.add({"wide": rows, "reward": np.zeros(32, np.float32)})
    writer.close()
    del writer  # and its maps
    gc.collect()
    source = {"path": str(tmp_path / "data"), "read_ahead": read_ahead}
    section = config_of(
        Path(source["path"]), data=source, batch_size=8, fields={"wide": {}}, sampler=STEPS, seed=5
    )
    with Replay(section) as replay:
        dataset = streams_of(replay)["train"].table.spec.dataset
        assert dataset is not None
        dataset.read_at_random()
        wide = dataset.columns["wide"]
        drop_pages(dataset)
        if missing_pages(wide) < 2000:
            pytest.skip("this file system keeps the pages of files in memory")
        # A row is 4 KiB: of 8 rows, with the array's header before them, 16 pages.
        replay.sample()
        own = 16
        until = time.monotonic() + 20
        while read_ahead and time.monotonic() < until:
            if missing_pages(wide) <= 2049 - own - 8:
                break
            time.sleep(0.01)
        held = 2049 - missing_pages(wide)
        assert held <= own if not read_ahead else own < held <= 2 * own


def test_a_file_that_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond the end of a truncated file has no effect; the next check names the file."""
    folder = write(tmp_path / "data")
    monkeypatch.setattr("deepspeed_gear.data.mapped_files.CHECK_EVERY_S", 0.0)
    source = {"path": str(folder), "read_ahead": True}
    section = config_of(
        Path(source["path"]), data=source, batch_size=9, fields=PADDED, sampler=STEPS
    )
    with Replay(section) as replay:
        replay.sample()
        os.truncate(folder / "columns" / "wide.npy", 4096)
        with pytest.raises(DataError, match=r"wide.npy must not change while it is mapped"):
            replay.sample()


def test_closing_leaves_no_thread_and_no_file(data: Path) -> None:
    left = []
    for _ in range(3):
        run(data, True, count=2, prefetch=2, **CASES["plain"])
        gc.collect()
        left.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert left[2] == left[0]


@pytest.mark.parametrize(
    ("available", "wanted"), [(1 << 10, 1), (1 << 40, 0)], ids=["larger", "smaller"]
)
def test_data_larger_than_memory_are_read_ahead(
    data: Path, available: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_gear.store.cgroup_limits import MemoryLimit

    limit = MemoryLimit("memory.max", available, "of a test")
    monkeypatch.setattr(node_stores, "tightest", lambda read: limit)
    with Replay(config_of(data, batch_size=4, fields=PLAIN, sampler=STEPS)) as replay:
        assert streams_of(replay)["train"].table.parts_ahead == wanted

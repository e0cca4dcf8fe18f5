"""Data sets that are truncated, foreign or changed: each is refused by the name of the file."""

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import config_of
from process_support import exit_status, in_child

from deepspeed_gear import Replay
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import fingerprint_of, npy_header, probe_digest
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.schema import Column, Schema

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("action", "bfloat16", (4,)),
    ]
)
REMAKE = "the file is not the one that was written; make the data set again with gear ingest"


def write(folder: Path) -> Dataset:
    """Write trajectories of 3, 1 and 33 steps: 40 rows."""
    with DatasetWriter(folder, SCHEMA) as writer:
        for steps in (3, 1, 33):
            writer.add(
                {
                    "observation": np.ones((steps + 1, 2), np.float32),
                    "action": np.ones((steps, 4), np.uint16),
                }
            )
    return Dataset.open(folder)


def poke(path: Path, at: int, byte: bytes = b"\xaa") -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(byte)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def other(path: Path, rows: np.ndarray) -> None:
    """Replace a column's file consistently with every digest."""
    np.save(path, rows)
    folder = path.parent.parent
    forge(folder, np.load(folder / EXTENTS))


ACTION = "columns/action.npy"
EXTENTS = "extents.npy"
MANIFEST = "schema.json"
STATS = "stats.json"
WRITTEN = f" must hold the bytes that were written; {REMAKE}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
IS_POINTER = " must contain the data, got 'a Git LFS pointer'; run git lfs pull in the clone"
POINTED = (MANIFEST, STATS, EXTENTS, ACTION)
OTHER = {"columns": [{"name": "x", "dtype": "f4"}]}
ROWS = np.zeros((40, 4), np.int32)
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    *((name, lambda p: p.write_text(POINTER), IS_POINTER) for name in POINTED),
    (
        MANIFEST,
        Path.unlink,
        " must exist; the folder is not a gear data set; make one with gear ingest",
    ),
    (
        MANIFEST,
        lambda p: p.write_text('{"type": 1}'),
        " must describe a gear data set; make one with gear",
    ),
    (
        MANIFEST,
        lambda p: edit(p, format=1),
        ": format must be 2, got 1; use the version of deepspeed_gear",
    ),
    (MANIFEST, lambda p: edit(p, num_rows="40"), f": num_rows must be int, got '40'; {REMAKE}"),
    (
        MANIFEST,
        lambda p: edit(p, schema=OTHER),
        ' must hold a valid schema, got "column x: dtype must be one',
    ),
    (
        MANIFEST,
        lambda p: edit(p, fingerprint="0"),
        f" must match its own fingerprint, got '0'; {REMAKE}",
    ),
    (
        STATS,
        lambda p: edit(p.parent / MANIFEST, split={"a": 0.1}),
        " must have been computed for the split",
    ),
    (STATS, lambda p: edit(p, split={"a": 0.1}), " must have "),
    (STATS, Path.unlink, " must exist; a file of the data set is missing"),
    (ACTION, Path.unlink, " must exist; a file of the data set is missing"),
    (
        ACTION,
        lambda p: os.truncate(p, 300),
        " must have 448 bytes, got 300; the file is truncated; copy it",
    ),
    (
        ACTION,
        lambda p: os.truncate(p, 600),
        " must have 448 bytes, got 600; the file is not the one that",
    ),
    (
        ACTION,
        lambda p: os.truncate(p, 60),
        " must have 448 bytes, got 60; the file is truncated; copy it",
    ),
    (
        ACTION,
        lambda p: p.write_bytes(b"hello" * 100),
        " must have 448 bytes, got 500; the file is not the",
    ),
    (
        ACTION,
        lambda p: other(p, ROWS),
        " must be uint16[40, 4] as in schema.json, got 'int32[40, 4]'",
    ),
    (
        ACTION,
        lambda p: other(p, ROWS.astype("u2", "F")),
        " must be uint16[40, 4] as in schema.json, got 'u",
    ),
    (
        ACTION,
        lambda p: other(p, ROWS[:39].astype("u2")),
        " must be uint16[40, 4] as in schema.json, got 'u",
    ),
    (ACTION, lambda p: other(p, np.array([{}])), ' must be a NumPy array, got "Array can'),
    (ACTION, lambda p: poke(p, -1), WRITTEN),
    (EXTENTS, lambda p: poke(p, -8), WRITTEN),
]


@pytest.mark.parametrize(("name", "damage", "text"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[Path], object], text: str
) -> None:
    write(tmp_path / "set").verify()
    damage(tmp_path / "set" / name)
    with pytest.raises(DataError) as caught:
        Dataset.open(tmp_path / "set")
    assert str(caught.value).startswith(f"{tmp_path / 'set' / name}{text}")


def test_verify_finds_what_open_does_not_look_at(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", Schema([Column("x", "uint8", (1000,))])) as writer:
        writer.add({"x": np.zeros((300, 1000), np.uint8)})
    poke(tmp_path / "set" / "columns" / "x.npy", 150_000)
    dataset = Dataset.open(tmp_path / "set")
    with pytest.raises(DataError, match=r"columns/x.npy must hold the bytes that were written"):
        dataset.verify()


def forge(folder: Path, extents: np.ndarray, **changes: Any) -> None:
    """Replace the extents as a program with a fault would leave them: consistent with
    every digest.
    """
    (folder / EXTENTS).write_bytes(npy_header(extents.dtype, extents.shape) + extents.tobytes())
    manifest = {**json.loads((folder / MANIFEST).read_text()), **changes}
    for name, entry in manifest["files"].items():
        file = folder / name
        entry.update(bytes=file.stat().st_size, probe=probe_digest(file))
    (folder / MANIFEST).write_text(
        json.dumps({**manifest, "fingerprint": fingerprint_of(manifest)})
    )


def test_extents_must_cover_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "set")
    good = np.load(tmp_path / "set" / EXTENTS)
    for row, value in ((0, (1, 2)), (1, (5, 1)), (1, (4, 0)), (2, (6, 32))):
        extents = good.copy()
        extents[row] = value
        forge(tmp_path / "set", extents)
        rule = r"extents.npy must cover the 40 rows without gaps or empty trajectories"
        with pytest.raises(DataError, match=rule):
            Dataset.open(tmp_path / "set")


def test_open_does_not_read_all_bytes(tmp_path: Path) -> None:
    """A column of 3 GB, almost all of it a hole, in a data set that is otherwise whole."""
    schema = Schema([Column("x", "float32", (256,))])
    with DatasetWriter(tmp_path / "set", schema) as writer:
        writer.add({"x": np.zeros((1, 256), np.float32)})
    path = tmp_path / "set" / "columns" / "x.npy"
    rows = 3 * 2**20
    path.write_bytes(npy_header(np.dtype(np.float32), (rows, 256)))
    os.truncate(path, path.stat().st_size + rows * 1024)
    forge(tmp_path / "set", np.array([[0, rows]]), num_rows=rows, num_steps=rows)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    dataset = Dataset.open(tmp_path / "set")
    assert bytes_read() - before < 2**20
    assert dataset.columns["x"].shape == (rows, 256)
    assert dataset.trajectory(0)["x"][-1, -1] == 0
    with path.open("rb") as file:
        resident = subprocess.run(
            ["fincore", "-nbo", "RES", path], capture_output=True, text=True, check=False
        )
        if resident.returncode == 0:
            assert int(resident.stdout) < 2**24, "pages of the column were brought in"
        assert file.read(6) == b"\x93NUMPY"


# ---- files that change while they are mapped -----------------------------------------------------

SAME = "must not change while it is mapped, got '.*"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p, 200), rf"{SAME}size \d+ -> 200"),
    "written again": (lambda p: poke(p, -1), rf"{SAME}modification time \(ns\) \d+ -> \d+"),
    "replaced": (
        lambda p: shutil.copy2(p, f"{p}.new") and os.replace(f"{p}.new", p),
        rf"{SAME}inode \d+ -> \d+",
    ),
    "removed": (Path.unlink, "must exist while it is used, got .*No such file"),
}


@pytest.mark.parametrize("name", [ACTION, "columns/observation.npy", EXTENTS])
@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_a_change_while_mapped_is_found(
    tmp_path: Path, change: Callable[[Path], object], text: str, name: str
) -> None:
    data = write(tmp_path / "data")
    data.files.check()
    change(tmp_path / "data" / name)
    with pytest.raises(DataError, match=f"/data/{name} {text}"):
        data.files.check()


def test_a_replay_finds_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it maps the files, and while it copies them; after that it has its own rows."""
    write(tmp_path / "data")
    monkeypatch.setattr("deepspeed_gear.data.mapped_files.CHECK_EVERY_S", 0.0)
    mapped, copied = (
        config_of(
            tmp_path / "data", data={"path": str(tmp_path / "data"), "load": load}, batch_size=4
        )
        for load in ("mmap", "memory")
    )
    found = pytest.raises(DataError, match=f"/data/{ACTION} must not change while it is mapped")
    with Replay(copied) as other:
        with Replay(mapped) as replay:
            replay.sample()
            poke(tmp_path / "data" / ACTION, -1)
            with found:
                replay.sample()
        other.sample()
    copy = np.copyto

    def copy_and_change(target: Any, source: Any) -> None:
        copy(target, source)
        poke(tmp_path / "data" / ACTION, -1, b"\xbb")

    poke(tmp_path / "data" / ACTION, -1, b"\x00")
    monkeypatch.setattr(np, "copyto", copy_and_change)
    with found:
        Replay(copied)


@pytest.mark.parametrize("has_faulthandler", [False, True])
def test_an_access_behind_the_end_names_the_file(tmp_path: Path, has_faulthandler: bool) -> None:
    """The signal goes on to the default action, or to faulthandler's handler."""
    data = write(tmp_path / "data")
    native = load_backend("cpu").native
    os.truncate(tmp_path / "data" / ACTION, 0)

    def read() -> None:
        os.dup2(os.open(tmp_path / "shown", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        faulthandler.enable(file=2) if has_faulthandler else faulthandler.disable()
        data.files.guard(native)
        data.columns["action"].sum()

    assert exit_status(in_child(read)) == -signal.SIGBUS
    shown = (tmp_path / "shown").read_text()
    assert (
        f"gear: fatal: the file {tmp_path}/data/{ACTION} was truncated, or its disk failed" in shown
    )
    assert ("Fatal Python error: Bus error" in shown) == has_faulthandler


def test_a_map_that_ended_is_not_named(tmp_path: Path) -> None:
    native = load_backend("cpu").native
    data = write(tmp_path / "data")
    data.files.guard(native)
    entry = native.map_guard_add(1 << 40, 4096, b"next free")
    native.map_guard_remove(entry)
    del data
    gc.collect()
    again = native.map_guard_add(1 << 40, 4096, b"first free")
    native.map_guard_remove(again)
    assert again < entry

"""Data sets that are truncated, foreign or changed: each is refused by the name of the file."""

from __future__ import annotations

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
from gear_support import prefix
from process_support import exit_status, in_child

from deepspeed_gear import Replay
from deepspeed_gear.data import mapped_files
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import FileRecord, fingerprint_of, npy_header, probe_digest
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.schema import Column, Schema

SCHEMA = Schema(
    [Column("observation", "float32", (2,), "observation", "T+1"), Column("action", "bfloat16", (4,))]
)
REMAKE = "the file is not the one that was written; make the data set again with gear ingest"


def write(folder: Path) -> Dataset:
    """Write trajectories of 3, 1 and 33 steps: 40 rows."""
    with DatasetWriter(folder, SCHEMA) as writer:
        for steps in (3, 1, 33):
            writer.add(
                {"observation": np.ones((steps + 1, 2), np.float32), "action": np.ones((steps, 4), np.uint16)}
            )
    return Dataset.open(folder)


def poke(path: Path, at: int, byte: bytes = b"\xaa") -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(byte)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


ACTION, EXTENTS, MANIFEST, STATS = "columns/action.npy", "extents.npy", "schema.json", "stats.json"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda p: (p / MANIFEST).unlink(),
        "/schema.json must exist; the folder is not a gear data set; make one with gear ingest SOURCE DEST",
    ),
    "foreign manifest": (
        lambda p: (p / MANIFEST).write_text('{"type": "object"}'),
        "/schema.json must describe a gear data set; make one with gear ingest SOURCE DEST",
    ),
    "another version": (
        lambda p: edit(p / MANIFEST, format=1),
        "/schema.json: format must be 2, got 1; use the version of deepspeed_gear that wrote it, "
        "or make the data set again with gear ingest",
    ),
    "an entry of another type": (
        lambda p: edit(p / MANIFEST, num_rows="40"),
        f"/schema.json: num_rows must be int, got '40'; {REMAKE}",
    ),
    "an edited schema": (
        lambda p: edit(p / MANIFEST, schema={"columns": [{"name": "x", "dtype": "f4"}]}),
        '/schema.json must hold a valid schema, got "column x: dtype must be one of bool, uint8, int8, '
        f"int16, int32, int64, float16, bfloat16, float32, float64, bytes, json, got 'f4'\"; {REMAKE}",
    ),
    "an edited fingerprint": (
        lambda p: edit(p / MANIFEST, fingerprint="0"),
        f"/schema.json must match its own fingerprint, got '0'; {REMAKE}",
    ),
    "an edited split": (
        lambda p: edit(p / MANIFEST, split={"eval": 0.1}),
        f"/stats.json must have been computed for the split {{'eval': 0.1}}, got {{}}; {REMAKE}",
    ),
    "a missing column": (
        lambda p: (p / ACTION).unlink(),
        "/columns/action.npy must exist; a file of the data set is missing",
    ),
    "a truncated column": (
        lambda p: os.truncate(p / ACTION, 300),
        "/columns/action.npy must have 448 bytes, got 300; the file is truncated; copy it again",
    ),
    "a longer column": (
        lambda p: os.truncate(p / ACTION, 600),
        "/columns/action.npy must have 448 bytes, got 600; "
        "the file is not the one that was written; copy it again",
    ),
    "a cut header": (
        lambda p: os.truncate(p / ACTION, 60),
        "/columns/action.npy must have a readable NumPy header, got ",
    ),
    "a foreign file": (
        lambda p: (p / ACTION).write_bytes(b"hello" * 100),
        f"/columns/action.npy must be a NumPy 1.0 array file; {REMAKE}",
    ),
    "another array": (
        lambda p: np.save(p / ACTION, np.zeros((40, 4), np.int32)),
        f"/columns/action.npy must be uint16[40, 4] as in schema.json, got 'int32[40, 4]'; {REMAKE}",
    ),
    "Fortran order": (
        lambda p: np.save(p / ACTION, np.asfortranarray(np.zeros((40, 4), np.uint16))),
        f"/columns/action.npy must be in C order; {REMAKE}",
    ),
    "a changed column": (
        lambda p: poke(p / ACTION, -1),
        f"/columns/action.npy must hold the bytes that were written; {REMAKE}",
    ),
    "changed extents": (
        lambda p: poke(p / EXTENTS, -8),
        f"/extents.npy must hold the bytes that were written; {REMAKE}",
    ),
    "changed statistics": (
        lambda p: edit(p / STATS, split={"eval": 0.1}),
        "/stats.json must have ",
    ),
    "no statistics": (
        lambda p: (p / STATS).unlink(),
        "/stats.json must exist; a file of the data set is missing",
    ),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], text: str
) -> None:
    write(tmp_path / "set").verify()
    damage(tmp_path / "set")
    with pytest.raises(DataError) as caught:
        Dataset.open(tmp_path / "set")
    found = str(caught.value).replace(str(tmp_path / "set"), "", 1)
    assert found.startswith(text) if text.endswith(" ") else found == text


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        rule = "must be the folder of a data set; make one with gear ingest SOURCE DEST"
        with pytest.raises(DataError, match=f"{name} {rule}$"):
            Dataset.open(tmp_path / name)


def test_verify_finds_what_open_does_not_look_at(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", Schema([Column("x", "uint8", (1000,))])) as writer:
        writer.add({"x": np.zeros((300, 1000), np.uint8)})
    poke(tmp_path / "set" / "columns" / "x.npy", 150_000)
    dataset = Dataset.open(tmp_path / "set")
    with pytest.raises(DataError, match=r"columns/x.npy must hold the bytes that were written"):
        dataset.verify()


def forge(folder: Path, schema: Schema, extents: np.ndarray, **changes: Any) -> None:
    """Replace the extents as a program with a fault would leave them: consistent with every digest."""
    (folder / EXTENTS).write_bytes(npy_header(extents.dtype, extents.shape) + extents.tobytes())
    manifest = {**json.loads((folder / MANIFEST).read_text()), **changes}
    for name, entry in manifest["files"].items():
        file = folder / name
        entry.update(bytes=file.stat().st_size, probe=probe_digest(file, name in (EXTENTS, STATS)))
    records = {name: FileRecord.from_json(name, entry) for name, entry in manifest["files"].items()}
    found = fingerprint_of(schema, manifest["num_trajectories"], manifest["num_rows"], records)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "fingerprint": found}))


def test_extents_must_cover_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "set")
    good = np.load(tmp_path / "set" / EXTENTS)
    for row, value in ((0, (1, 2)), (1, (5, 1)), (1, (4, 0)), (2, (6, 32))):
        extents = good.copy()
        extents[row] = value
        forge(tmp_path / "set", SCHEMA, extents)
        rule = r"extents.npy must cover the 40 rows without gaps or empty trajectories"
        with pytest.raises(DataError, match=rule):
            Dataset.open(tmp_path / "set")


def test_open_does_not_read_all_bytes(tmp_path: Path) -> None:
    """A column of 3 GB, almost all of it a hole, in a data set that is otherwise whole."""
    schema = Schema([Column("x", "float32", (256,))])
    with DatasetWriter(tmp_path / "set", schema) as writer:
        writer.add({"x": np.zeros((1, 256), np.float32)})
    path, rows = tmp_path / "set" / "columns" / "x.npy", 3 * 2**20
    path.write_bytes(npy_header(np.dtype(np.float32), (rows, 256)))
    os.truncate(path, path.stat().st_size + rows * 1024)
    forge(tmp_path / "set", schema, np.array([[0, rows]]), num_rows=rows, num_steps=rows)

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


# ---- files that change while they are mapped -------------------------------------------------------

SAME = "must not change while it is mapped, got '.*"
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: os.truncate(p, 200), rf"{SAME}size \d+ -> 200"),
    "written again": (lambda p: poke(p, -1), rf"{SAME}modification time \(ns\) \d+ -> \d+"),
    "replaced": (
        lambda p: shutil.copy2(p, f"{p}.new") and os.replace(f"{p}.new", p),
        rf"{SAME}inode \d+ -> \d+",
    ),
    "removed": (Path.unlink, "must exist while it is used, got 'No such file"),
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
    write(tmp_path / "data")
    monkeypatch.setattr(mapped_files, "CHECK_EVERY_S", 0.0)
    section = {"batch_size": 4, "shared_memory": {"prefix": prefix()}}
    data = {"path": str(tmp_path / "data"), "load": "mmap"}
    with (
        Replay({**section, "data": data}) as replay,
        Replay({**section, "data": {**data, "load": "memory"}}) as copied,
    ):
        replay.sample()
        copied.sample()
        poke(tmp_path / "data" / ACTION, -1)
        with pytest.raises(DataError, match=f"/data/{ACTION} must not change while it is mapped"):
            replay.sample()
        copied.sample()  # has its own rows


def test_a_change_during_the_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data")
    copy = np.copyto

    def copy_and_change(target: Any, source: Any) -> None:
        copy(target, source)
        poke(tmp_path / "data" / ACTION, -1)

    monkeypatch.setattr(np, "copyto", copy_and_change)
    section = {"batch_size": 4, "data": {"path": str(tmp_path / "data"), "load": "memory"}}
    with pytest.raises(DataError, match=f"/data/{ACTION} must not change while it is mapped"):
        Replay({**section, "shared_memory": {"prefix": prefix()}})


@pytest.mark.parametrize("has_faulthandler", [False, True])
def test_an_access_behind_the_end_names_the_file(tmp_path: Path, has_faulthandler: bool) -> None:
    """The signal goes on to the default action, or to faulthandler's handler."""
    data, native = write(tmp_path / "data"), load_backend("cpu").native
    os.truncate(tmp_path / "data" / ACTION, 0)

    def read() -> None:
        os.dup2(os.open(tmp_path / "shown", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        faulthandler.enable(file=2) if has_faulthandler else faulthandler.disable()
        data.files.guard(native)
        data.columns["action"].sum()

    assert exit_status(in_child(read)) == -signal.SIGBUS
    shown = (tmp_path / "shown").read_text()
    assert f"gear: fatal: the file {tmp_path}/data/{ACTION} was truncated, or its disk failed" in shown
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

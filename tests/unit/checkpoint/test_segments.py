"""Saves that link the segments of rows which have not changed since the save before."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from deepspeed_gear import CheckpointError, Column, Replay, Schema
from deepspeed_gear.checkpoint import segment_links, table_files
from deepspeed_gear.checkpoint.segment_links import WrittenFile
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import SlotRetention

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("code", "int64"),
        Column("truncated", "bool", role="truncated"),
        Column("advantage", "float32", late=True),
    ]
)
CAPACITY = 512  # rows: two of them begin a segment


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_LEAST_SEGMENT_BYTES", 0)


def make(count: int = 0) -> Replay:
    """Return a replay with so many trajectories of five steps."""
    table = {
        "capacity_steps": CAPACITY,
        "capacity_trajectories": 80,
        "max_length": 9,
        "remove": "fifo",
    }
    replay = Replay(
        {"tables": {"main": table}, "fields": {"code": {}}, "batch_size": 8},
        schemas={"main": SCHEMA},
    )
    for code in range(count):
        replay.add(trajectory(code, 5))
    return replay


def trajectory(code: int, steps: int) -> dict[str, Any]:
    codes = code * 10 + np.arange(steps + 1)
    observation = np.stack([codes, -codes], axis=1).astype(np.float32)
    return {"observation": observation, "code": codes[:-1], "truncated": np.zeros(steps, bool)}


def rows_in(folder: Path) -> dict[str, int]:
    """The inode of each file of rows."""
    return {path.name: path.stat().st_ino for path in folder.glob("rows-*")}


def num_linked(folder: Path) -> int:
    return sum(path.stat().st_nlink > 1 for path in (folder / "main").glob("rows-*"))


def ids_of(replay: Replay) -> list[int]:
    slots = replay.tables["main"].slots
    return sorted(slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist())


def stored(replay: Replay) -> dict[int, dict[str, bytes]]:
    """What a load restores: a trajectory that was open has ended there, truncated."""
    table = replay.tables["main"]
    found = {}
    is_open = table.views["retention"][:, SlotRetention.OPEN] != 0
    growing = table.slots[is_open, Slot.ID].tolist()
    for number in ids_of(replay):
        columns = {
            name: torch.as_tensor(values).numpy().copy()
            for name, values in replay.read([number])[0].items()
        }
        columns["truncated"][-1:] |= number in growing
        found[number] = {name: values.tobytes() for name, values in columns.items()}
    return found


def assert_loads(folder: Path, state: Any, expected: dict[int, dict[str, bytes]]) -> None:
    with make() as other:
        other.load(folder, state)
        assert stored(other) == expected


def test_what_has_not_changed_is_linked(tmp_path: Path) -> None:
    with make(20) as replay:
        before = replay.save(tmp_path)
        held = stored(replay)
        replay.add(trajectory(20, 5))
        replay.fill(3, advantage=np.ones(5, np.float32))
        after = replay.save(tmp_path)
        then = stored(replay)
        replay.save(tmp_path / "other")  # such as that of another tag
        assert num_linked(tmp_path / "other") == len(rows_in(tmp_path / "other" / "main"))
        old = rows_in(tmp_path / "main.old")
        new = rows_in(tmp_path / "main")
        written = {name for name, inode in new.items() if old.get(name) != inode}
        assert len({name.split(".")[0] for name in written}) == 2, (
            "a new segment, and that of the filled column"
        )
        assert len(written) == 2 * len(SCHEMA)
        for state, expected in ((before, held), (after, then)):
            assert_loads(tmp_path, state, expected)
        # After a load ids are given again: the ids of a segment do not say what it holds.
        replay.load(tmp_path, before)
        replay.add(trajectory(70, 5))
        again = replay.save(tmp_path)
        assert num_linked(tmp_path) == 0
        assert_loads(tmp_path, again, stored(replay))


def test_a_file_system_without_links(tmp_path: Path) -> None:
    with make() as replay:
        replay.add(trajectory(0, 5))
        replay.save(tmp_path)
        refused = PermissionError(errno.EPERM, "Operation not permitted")
        with patch.object(table_files.os, "link", side_effect=refused):
            state = replay.save(tmp_path)
        assert num_linked(tmp_path) == 0
        assert_loads(tmp_path, state, stored(replay))


def test_a_manifest_names_each_file(tmp_path: Path) -> None:
    with make() as replay:
        replay.add(trajectory(0, 5))
        replay.save(tmp_path)
    files = json.loads((tmp_path / "main" / "manifest.json").read_text())["files"]
    assert {path.name for path in (tmp_path / "main").iterdir()} == {*files, "manifest.json"}


@pytest.mark.parametrize("seed", range(3))
def test_every_change_is_saved(seed: int, tmp_path: Path) -> None:
    """Trajectories that are added, removed, filled late, grow and end: each save is what the table
    holds.
    """
    random = np.random.default_rng(seed)
    linked = 0
    unfilled = list[int]()
    with make() as replay:
        growing = replay.writer().trajectory()
        steps = 0
        code = 0
        for turn in range(120):
            kind = random.choice(["add", "add", "grow", "end", "fill", "remove", "save"])
            if kind == "add":
                code += 1
                unfilled.append(replay.add(trajectory(code, int(random.integers(1, 9)))))
            elif kind == "grow" and steps < 8:
                growing.append(observation=[turn, -turn], code=turn, truncated=False, publish=True)
                steps += 1
            elif kind == "end" and steps > 1:
                with growing:
                    growing.append(observation=[turn, -turn])
                growing = replay.writer().trajectory()
                steps = 0
            elif kind == "fill" and unfilled:
                number = unfilled.pop(int(random.integers(len(unfilled))))
                if number in ids_of(replay):
                    length = len(replay.read([number])[0]["code"])
                    replay.fill(number, advantage=np.full(length, turn, np.float32))
            elif kind == "remove" and len(replay):
                replay.remove(random.choice(ids_of(replay), 1).tolist())
            elif kind == "save" and len(replay):
                state = replay.save(tmp_path)
                linked += num_linked(tmp_path)
                assert_loads(tmp_path, state, stored(replay))
        growing.discard()
    assert linked > 50


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def flip_silently(path: Path) -> None:
    """Change a bit as a disk does that fails: the time of modification stays."""
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "flipped silently": flip_silently,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "removed": Path.unlink,
}


@pytest.mark.parametrize(
    ("damage", "other_folder"),
    [("flipped silently", True), *[(damage, False) for damage in DAMAGE]],
)
def test_a_damaged_file_is_written_anew(
    damage: str, other_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(4) as replay:
        before = replay.save(tmp_path)
        path = min((tmp_path / "main").glob("rows-*.observation.npy"))
        DAMAGE[damage](path)
        with make() as other, pytest.raises(CheckpointError, match=path.name):
            other.load(tmp_path, before)
        folder = tmp_path / "other" if other_folder else tmp_path
        with caplog.at_level(logging.WARNING):
            after = replay.save(folder)
            held = stored(replay)
        assert str(path) in caplog.text
        assert num_linked(folder) == len(rows_in(folder / "main")) - 1, (
            "only what is damaged is written anew"
        )
        assert_loads(folder, after, held)
        caplog.clear()
        again = replay.save(folder)
        assert not caplog.records, "the file that was written anew is whole"
        assert_loads(folder, again, held)


def test_the_error_of_a_damaged_save_names_a_whole_one(tmp_path: Path) -> None:
    """The newest save, that before it by its state, or none."""
    with make(4) as replay, make() as other:
        before = replay.save(tmp_path)
        last = max((tmp_path / "main").glob("rows-*.code.npy")).name
        replay.fill(3, advantage=np.ones(5, np.float32))
        newest = replay.save(tmp_path)["save"]["id"]
        flip(tmp_path / "main.old" / last)  # the newest save has another file for this segment
        with pytest.raises(
            CheckpointError, match=f"take another checkpoint: the newest save .*{newest}"
        ):
            other.load(tmp_path, before)
        flip(tmp_path / "main.old" / last)
        flip(tmp_path / "main" / last)
        whole = before["save"]["id"]
        with pytest.raises(
            CheckpointError, match=f"newest whole save in {tmp_path} is {whole}: load with"
        ):
            other.load(tmp_path)
        flip(min((tmp_path / "main").glob("rows-*.code.npy")))
        with pytest.raises(CheckpointError, match=f"no save in {tmp_path} is whole"):
            other.load(tmp_path)


def test_a_file_of_another_time_and_the_same_bytes_is_linked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as replay:
        replay.add(trajectory(0, 5))
        replay.save(tmp_path)
        for path in (tmp_path / "main").iterdir():
            os.utime(path, ns=(0, 0))  # as a backup that is restored
        replay.save(tmp_path)
        assert num_linked(tmp_path) == len(rows_in(tmp_path / "main"))
    assert not caplog.records


def test_every_linked_file_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that change silently are found within as many saves as there are parts, wherever they
    are.
    """
    monkeypatch.setattr(segment_links, "_LEAST_CHECKED_BYTES", 0)
    monkeypatch.setattr(segment_links, "_PARTS", 4)
    read: list[str] = []
    read_again = WrittenFile.read_again
    monkeypatch.setattr(
        WrittenFile, "read_again", lambda file, at: read.append(at.name) or read_again(file, at)
    )
    with make(4) as replay:
        replay.save(tmp_path)
        files = set(rows_in(tmp_path / "main"))
        counts = []
        for _ in range(4):
            replay.save(tmp_path)
            counts.append(len(read))
        assert set(read) == files
        assert max(np.diff([0, *counts])) < len(files), "a save reads a part of the files"

"""Saves of one process while others load, or would save into the same folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix
from process_support import in_child, kill

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.checkpoint import folder_locks, save_folders, table_files, table_loader
from deepspeed_gear.device import device_checkpoint
from deepspeed_gear.errors import CheckpointError

COLUMNS = {"x": {"dtype": "int64", "shape": [4]}, "number": {"dtype": "int64", "rows": "1"}}
TABLE = {"capacity_steps": 400, "max_length": 20, "remove": "fifo", "schema": {"columns": COLUMNS}}


def section(table: dict[str, Any] = TABLE) -> dict[str, Any]:
    return {"batch_size": 2, "shared_memory": {"prefix": prefix()}, "tables": {"main": table}}


def add(replay: Replay, number: int) -> None:
    """Replace the contents by 20 trajectories of a number."""
    for _ in range(20):
        replay.add({"x": np.full((20, 4), number), "number": number})


def content(replay: Replay) -> int:
    """Return the number that all rows have."""
    slots = replay.tables["main"].slots
    rows = replay.read(slots[slots[:, 0] == 2, 2].tolist())
    numbers = {int(value) for row in rows for value in (*row["x"].reshape(-1), row["number"])}
    assert len(rows) == 20
    assert len(numbers) == 1, "rows of several saves"
    return numbers.pop()


@pytest.fixture
def both() -> Iterator[tuple[Replay, Replay]]:
    """A run that saves, and a process that loads."""
    with Replay(section()) as saver, Replay(section()) as loader:
        add(saver, 0)
        yield saver, loader


def test_a_loop_of_loads_beside_a_loop_of_saves(tmp_path: Path) -> None:
    folder = tmp_path / "saves"

    def save_for_ever() -> None:
        with Replay(section()) as saver:
            number = 0
            while True:
                add(saver, number)
                saver.save(folder)
                number += 1

    child = in_child(save_for_ever)
    try:
        with Replay(section()) as loader:
            seen: list[int] = []
            while len(set(seen)) < 8:
                if (folder / save_folders.POSITION).exists():
                    loader.load(folder)
                    seen.append(content(loader))
            assert seen == sorted(seen)
    finally:
        kill(child)


@pytest.mark.parametrize("point", ["read_table", "open_rows", "load_rows"])
@pytest.mark.parametrize("num_saves", [1, 2])
def test_saves_at_any_point_of_a_load(
    both: tuple[Replay, Replay],
    tmp_path: Path,
    point: str,
    num_saves: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One save renames the files that are read; two remove them. The load is of a whole save in any
    case.
    """
    saver, loader = both
    first = saver.save(tmp_path)
    plain = getattr(table_loader, point)
    left = [num_saves]

    def disturbed(*arguments: Any) -> Any:
        while left[0]:
            add(saver, 1 + num_saves - left[0])
            left[0] -= 1
            saver.save(tmp_path)
        return plain(*arguments)

    monkeypatch.setattr(table_loader, point, disturbed)
    loader.load(tmp_path)
    # Once all files are open, the loader keeps them; before that it finds the renamed ones, or
    # begins anew.
    is_first = num_saves == 1 or point == "load_rows"
    assert content(loader) == (0 if is_first else num_saves)
    for _ in range(2):
        saver.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"must hold the save .* without a state, load takes the"
    ):
        loader.load(tmp_path, first)


def test_a_loader_gives_up_and_says_why(both: tuple[Replay, Replay], tmp_path: Path) -> None:
    saver, loader = both
    saver.save(tmp_path)
    plain = table_loader.read_table

    def removed(*arguments: Any) -> Any:
        for _ in range(2):
            saver.save(tmp_path)
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_loader, "read_table", removed)
        patch.setattr("deepspeed_gear.replay.replay_base._MOST_LOADS", 3)
        with pytest.raises(CheckpointError, match="3 were replaced meanwhile; save less often"):
            loader.load(tmp_path)
    assert len(loader) == 0
    loader.load(tmp_path)
    (tmp_path / "main" / "rows-000000.x.npy").write_bytes(b"damage")  # and no other save came
    with pytest.raises(CheckpointError, match=r"x.npy must be as it was saved"):
        loader.load(tmp_path)


def test_a_folder_that_vanishes_while_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "glob", vanished)
    with pytest.raises(CheckpointError, match=r"manifest\.json must be readable"):
        table_files.find_shards(tmp_path)


def test_a_device_replay_loads_beside_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = section(
        {**TABLE, "placement": "device", "schema": {"columns": {"x": {"dtype": "int64"}}}}
    )
    with DeviceReplay(config, "cpu") as saver, DeviceReplay(config, "cpu") as loader:
        saver.add_({"x": torch.ones(1, 5, dtype=torch.int64)})
        saver.save(tmp_path)
        plain = device_checkpoint.save_folders.find
        left = [2]

        def disturbed(*arguments: Any) -> Path:
            found: Path = plain(*arguments)
            while left[0]:
                left[0] -= 1
                saver.save(tmp_path)
            return found

        monkeypatch.setattr(device_checkpoint.save_folders, "find", disturbed)
        loader.load(tmp_path)
        assert loader.num_steps == 5
        with pytest.raises(CheckpointError, match="must be saved into by one run at a time"):
            loader.save(tmp_path)


def test_the_second_run_is_refused_by_name(both: tuple[Replay, Replay], tmp_path: Path) -> None:
    saver, other = both
    state = saver.save(tmp_path)
    other.load(tmp_path, state)
    with pytest.raises(
        CheckpointError, match=r"saved into by one run at a time, got .*process.*host"
    ):
        other.save(tmp_path)
    other.save(tmp_path / "own")
    add(saver, 1)
    saver.save(tmp_path)
    saver.close()
    other.save(tmp_path)
    assert content(other) == 0
    with Replay(section()) as third:
        third.load(tmp_path)
        assert content(third) == 0
        third.load(
            tmp_path, state
        )  # what the last one has loaded is kept, what it has not is not destroyed
        with pytest.raises(CheckpointError, match="one run at a time"):
            third.save(tmp_path)


def test_locks_are_bounded_and_those_of_a_deleted_folder_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_locks, "_MOST_HELD", 2)
    locks = folder_locks.FolderLocks()
    other = folder_locks.FolderLocks()
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
        locks.acquire(folder)
    locks.acquire(folders[1])
    other.acquire(folders[0])
    for folder in folders[1:]:
        with pytest.raises(CheckpointError, match="one run at a time"):
            other.acquire(folder)
    shutil.rmtree(folders[2])
    folders[2].mkdir()
    other.acquire(folders[2])
    with pytest.raises(CheckpointError, match="one run at a time"):
        locks.acquire(folders[2])
    del locks
    other.acquire(folders[1])
    other.release()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_locks, "try_lock", refuse)
    locks = folder_locks.FolderLocks()
    locks.acquire(tmp_path)
    assert "its file system has no locks" in caplog.text
    locks.release()

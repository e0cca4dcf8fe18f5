"""Sources that are read side by side: the data set and the errors of one after the other."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gear_support import wait_until

from deepspeed_gear import Column, Dataset
from deepspeed_gear.cli.main import main as command
from deepspeed_gear.data.ingest import ingest, open_source, side_by_side, step_blocks
from deepspeed_gear.data.ingest.output_columns import OutputColumns
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.errors import DataError

NUM_SOURCES = 7


def steps(number: int, lengths: tuple[int, ...], bad: bool = False) -> dict[str, np.ndarray]:
    """Return the steps of some episodes; with `bad`, a NaN in the last one."""
    random = np.random.default_rng(number)
    count = sum(lengths)
    rewards = random.random(count).astype(np.float32)
    rewards[-1] = np.nan if bad else rewards[-1]
    return {
        "observations": random.random((count, 3)).astype(np.float32),
        "actions": random.random((count, 2)).astype(np.float32),
        "rewards": rewards,
        "terminals": np.isin(np.arange(count), np.cumsum(lengths) - 1),
        "timeouts": np.zeros(count, np.bool_),
    }


def hdf5(folder: Path, bad: tuple[int, ...] = ()) -> list[Path]:
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(folder / f"{number}.hdf5")
        lengths = (1 + number, 3, 40 * number + 2)
        with h5py.File(paths[-1], "w") as file:
            for name, values in steps(number, lengths, number in bad).items():
                file.create_dataset(name, data=values, compression="gzip", chunks=True)
    return paths


def npz(folder: Path) -> list[Path]:
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(folder / f"{number}.npz")
        given = steps(number, (1 + number, 3, 40 * number + 2))
        given["observations"] = np.asfortranarray(given["observations"])
        np.savez_compressed(paths[-1], **given)
    return paths


def pickles(folder: Path) -> list[Path]:
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(folder / f"{number}.pkl")
        given = steps(number, (number + 2,))
        paths[-1].write_bytes(pickle.dumps([given, given]))
    return paths


def tables(folder: Path) -> list[Path]:
    """Tables of steps, whose episode numbers begin with 0 in each one."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(folder / f"{number}.parquet")
        lengths = (1 + number, 3, 40 * number + 2)
        given = steps(number, lengths)
        columns = {"episode_index": np.arange(3).repeat(lengths), "reward": given["rewards"]}
        columns["action"] = given["actions"][:, 0]
        parquet.write_table(arrow.table(columns), paths[-1])
    return paths


def rollouts(folder: Path) -> list[Path]:
    """Folders of two files each, whose groups begin with 0 in every file."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = []
    for number in range(NUM_SOURCES):
        paths.append(folder / str(number))
        paths[-1].mkdir()
        for part in range(2):
            rows = [
                {
                    "prompt_id": group,
                    "tokens": list(range(2 + number + part + group)),
                    "loss_mask": [0] + [1] * (1 + number + part + group),
                    "reward": float(group),
                    "text": "a" * (number + part),
                }
                for group in (0, 0, 1, 1)
            ]
            parquet.write_table(arrow.Table.from_pylist(rows), paths[-1] / f"{part}.parquet")
    return paths


def own_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("gear-")]


def digests(dataset: Dataset) -> tuple[str, dict[str, Any]]:
    described = {name: entry.to_json() for name, entry in dataset.statistics.items()}
    return dataset.fingerprint, {"source": dataset.source, "statistics": described}


SOURCES: dict[str, Callable[[Path], list[Path]]] = {
    "hdf5": hdf5,
    "npz": npz,
    "pickles": pickles,
    "tables": tables,
    "rollouts": rollouts,
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("ahead_bytes", [1, 2000, 1 << 28], ids=["episode", "some", "all"])
def test_the_data_set_does_not_depend_on_threads(
    tmp_path: Path, kind: str, ahead_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "CACHED_BYTES", ahead_bytes)
    monkeypatch.setattr(step_blocks, "BLOCK_BYTES", ahead_bytes)
    paths = SOURCES[kind](tmp_path)
    options: dict[str, Any] = {"group_scope": "file"} if kind == "rollouts" else {}

    def made(name: str, sources: list[Path], threads: int) -> tuple[str, dict[str, Any]]:
        opened = [open_source(p, allow_pickle=kind == "pickles" or None) for p in sources]
        return digests(ingest(opened, tmp_path / name, threads=threads, **options))

    wanted = made("all-1", paths, 1)
    monkeypatch.setattr(side_by_side, "HELD_BYTES", ahead_bytes)
    assert made("all-2", paths, 2) == wanted
    assert made("all-5", paths, 5) == wanted
    assert made("one-1", paths[3:4], 1) == made("one-2", paths[3:4], 2)
    assert own_threads() == []


def test_npz_files_beyond_a_bound_are_not_all_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of files that a command opens."""
    monkeypatch.setattr(side_by_side, "HELD_BYTES", 9000)
    paths = npz(tmp_path)
    held = [reader.held_bytes for reader in map(open_source, paths)]
    kept = [reader.held_bytes for reader in side_by_side.without_surplus(map(open_source, paths))]
    assert sum(held) > 20_000
    assert kept[:2] == held[:2]
    assert sum(kept) <= 9000
    left = []

    def sum_of_held(readers: list[Reader], dest: str, **options: Any) -> Dataset:
        left.append(sum(reader.held_bytes for reader in readers))
        return ingest(readers, dest, **options)

    monkeypatch.setattr("deepspeed_gear.data.ingest.ingest", sum_of_held)
    assert command(["ingest", *map(str, paths), str(tmp_path / "out"), "--quiet"]) == 0
    assert left == [sum(kept)]


def test_appending_gives_what_one_ingest_of_all_sources_gives(tmp_path: Path) -> None:
    paths = hdf5(tmp_path)
    wanted = ingest(paths, tmp_path / "whole", threads=1)
    ingest(paths[:3], tmp_path / "grown", threads=4)
    grown = ingest(paths[3:], tmp_path / "grown", append=True, threads=4)
    assert grown.fingerprint == wanted.fingerprint
    assert grown.columns["source"].tolist() == wanted.columns["source"].tolist()


@pytest.mark.parametrize("bad", [(0,), (3, 4), (6,)], ids=["first", "two", "last"])
def test_an_error_is_that_of_the_first_wrong_source_and_leaves_nothing(
    tmp_path: Path, bad: tuple[int, ...]
) -> None:
    """While it is read; and while it is opened."""
    paths = hdf5(tmp_path, bad)
    for threads in (1, 4):
        with pytest.raises(DataError, match=rf"{paths[bad[0]]}: episode 2: column reward"):
            ingest(paths, tmp_path / "out", threads=threads)
        assert not list(tmp_path.glob("out*"))
    for number in bad:
        paths[number].write_bytes(b"no HDF5")
    for threads in (1, 4):
        with pytest.raises(DataError, match=str(paths[bad[0]])):
            ingest(paths, tmp_path / "out", threads=threads)
        assert not list(tmp_path.glob("out*"))
    assert own_threads() == []


def test_an_interrupt_of_the_writer_ends_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also threads that wait for room."""
    monkeypatch.setattr(side_by_side, "CACHED_BYTES", 1)
    monkeypatch.setattr(step_blocks, "BLOCK_BYTES", 1)
    paths = hdf5(tmp_path)

    def interrupted(*arguments: Any, **options: Any) -> None:
        assert own_threads().count("gear-source") == 4
        raise KeyboardInterrupt

    monkeypatch.setattr("deepspeed_gear.data.ingest.DatasetWriter.add_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ingest(paths, tmp_path / "out", threads=4)
    assert not list(tmp_path.glob("out*"))
    assert own_threads() == []


def test_sources_that_are_waited_for_are_read_further_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block ahead at first, then all of each."""
    monkeypatch.setattr(side_by_side, "CACHED_BYTES", 1)
    monkeypatch.setattr(side_by_side, "MOST_WAITS", 0)
    monkeypatch.setattr(step_blocks, "BLOCK_BYTES", 1)
    paths = hdf5(tmp_path)[:4]
    with ExitStack() as stack:
        readers = [stack.enter_context(open_source(path)) for path in paths]
        outputs = [OutputColumns(reader, {}) for reader in readers]
        with side_by_side.SideBySide(outputs, 4) as sources:
            blocks = [len(list(sources.blocks(0)))]
            # Sources of more than one block, of which no one takes any.
            wait_until(lambda: own_threads() == [], "all sources to be read")
            blocks += [len(list(sources.blocks(index))) for index in (1, 2, 3)]
    assert blocks == [3, 3, 3, 3]


class OneThread(Reader):
    """A reader from outside, which is opened and read by the thread of the caller."""

    format = "one thread"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    def open(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.columns = (
            Column("action", "float32", (2,), "action"),
            Column("reward", "float32", role="reward"),
        )

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(3):
            assert threading.current_thread() is threading.main_thread()
            arrays = {"action": np.ones((4, 2), np.float32), "reward": np.ones(4, np.float32)}
            yield f"episode {number}", arrays


def test_readers_from_outside_run_in_the_callers_thread(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("source")
    name = f"{__name__}:OneThread"
    assert len(ingest(paths, tmp_path / "out", format=name, threads=4)) == 6
    readers = [open_source(path, name) for path in paths]
    assert len(ingest(readers, tmp_path / "again", threads=4)) == 6

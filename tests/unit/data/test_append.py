"""Data sets that grow: the same bytes as one ingest, at any kill the old one or the new one."""

import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, run_command, trajectory, write_dataset
from store_support import killed_at

from deepspeed_gear import Column, DatasetWriter, Schema
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data import partial_folder
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_parts import write_parts
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.partial_folder import PartialFolder
from deepspeed_gear.errors import DataError

Maker = Callable[..., Any]


@pytest.fixture
def sources(tmp_path: Path, d4rl: Maker) -> list[Path]:
    for name, lengths in (("a", (2, 5, 1)), ("b", (3,)), ("c", (33, 1, 7))):
        d4rl(tmp_path / name, lengths, ("terminals",) * len(lengths))
    return [tmp_path / name for name in "abc"]


def write_wide(dest: Path) -> Path:
    with DatasetWriter(dest, Schema([Column("x", "uint8", (1000,))])) as writer:
        writer.add({"x": np.zeros((300, 1000), np.uint8)})
    return dest / "columns" / "x.npy"


def publish_grown(dest: Path) -> None:
    """Append a trajectory; only what follows when all files are complete is traced."""
    trace = sys.gettrace()
    sys.settrace(None)
    publish = PartialFolder.publish

    def traced_publish(folder: PartialFolder) -> None:
        sys.settrace(trace)
        publish(folder)

    writer = DatasetWriter(dest, SCHEMA, append=True)
    writer.add(trajectory(7, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialFolder, "publish", traced_publish)
        writer.close()


def grow(dest: Path) -> Dataset:
    with DatasetWriter(dest, SCHEMA, append=True) as writer:
        writer.add(trajectory(9, 5, truncated=True))
    return Dataset.open(dest)


@pytest.mark.parametrize("allow_nan", [False, True])
def test_what_grew_is_one_ingest_of_all_sources(
    tmp_path: Path, sources: list[Path], allow_nan: bool
) -> None:
    split = {"eval": 0.3}
    dest = tmp_path / "grown"
    whole = ingest(sources, tmp_path / "whole", split=split, allow_nan=allow_nan)
    steps = [ingest(sources[:1], dest, split=split, allow_nan=allow_nan)]
    first = steps[0].trajectory(1)["observation"].copy()
    steps.append(ingest(sources[1:2], dest, append=True))
    assert run_command(command, str(sources[2]), str(dest), "--append", "--quiet") == 0
    steps.append(Dataset.open(dest))
    files = sorted(path.relative_to(whole.path) for path in whole.path.rglob("*.*"))
    assert files == sorted(path.relative_to(dest) for path in dest.rglob("*.*"))
    manifests = [json.loads((folder / "schema.json").read_text()) for folder in (whole.path, dest)]
    for file in files:
        if file.name != "schema.json":
            assert (whole.path / file).read_bytes() == (dest / file).read_bytes(), file
    grown_from = manifests[1].pop("grown_from")
    assert manifests[0] == manifests[1]
    assert grown_from == {steps[0].fingerprint: 3, steps[1].fingerprint: 4}
    parts = write_parts(steps[2], tmp_path / "parts", np.array([0, 3, 7]))
    for one in (steps[2], *parts):
        assert one.versions == {**grown_from, whole.fingerprint: 7}
    # Those that hold the old ones read them; a new process must not take the new one for an old
    # one.
    steps[0].files.check()
    np.testing.assert_array_equal(steps[0].trajectory(1)["observation"], first)
    with pytest.raises(DataError, match=r"must still have the fingerprint .*; open it again"):
        pickle.loads(pickle.dumps(steps[0]))
    with (dest / "columns" / "reward.npy").open("ab") as file:
        file.write(b"0")
    steps[0].files.check()
    with pytest.raises(DataError, match="must not change while it is mapped"):
        steps[2].files.check()


def test_what_cannot_be_appended_changes_nothing(
    tmp_path: Path, sources: list[Path], d4rl: Maker
) -> None:
    dest = ingest(sources[:1], tmp_path / "dest").path
    d4rl(tmp_path / "wider", infos__x=np.zeros(8))
    part = write_parts(Dataset.open(dest), tmp_path / "parts", np.array([0, 1, 3]))[0].path
    cases: list[tuple[Path, Path, str]] = [
        (
            tmp_path / "wider",
            dest,
            r"column infos.x must be as in .*/dest, absent, got 'float64\[\]",
        ),
        (sources[1], part, "part must not be appended to, got 'part 0 of 2.*; append to the whole"),
        (sources[1], tmp_path / "none", "must be the folder of a data set"),
    ]
    for source, at, text in cases:
        with pytest.raises(DataError, match=text):
            ingest([source], at, append=True)
    write_dataset(tmp_path / "mine", [2])
    with pytest.raises(DataError, match="schema must equal the schema of the appended"):
        DatasetWriter(tmp_path / "mine", Schema(list(SCHEMA)[:-1]), append=True)
    rows = np.load(write_wide(tmp_path / "wide"), mmap_mode="r+")
    rows[150] += 1  # Dataset.open does not look there
    with pytest.raises(DataError, match="column x must hold the bytes that were written"):
        DatasetWriter(tmp_path / "wide", Schema([Column("x", "uint8", (1000,))]), append=True)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_line_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Without an exchange of names (NFS) the next writer may have to move the old one back."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill loses no page
    if not exchanges:
        monkeypatch.setattr(partial_folder, "swap_names", lambda *_: False)
    dest = tmp_path / "set"
    line = 1
    found = Counter[str]()
    dataset = Dataset.open(write_dataset(dest, [2, 1]))
    traced = [
        "data/dataset_writer.py",
        "data/partial_folder.py",
        *(["file_system.py"] if exchanges else []),
    ]
    while found["new"] < 4 and killed_at(line, lambda: publish_grown(dest), traced):
        if not dest.exists():
            assert not exchanges
            with pytest.raises(DataError, match="must not exist yet"):
                DatasetWriter(dest, SCHEMA)
            found["moved back"] += 1
        now = Dataset.open(dest)
        now.verify()
        dataset.files.check()
        np.testing.assert_array_equal(now.columns["task"][: len(dataset)], dataset.columns["task"])
        found["new" if len(now) > len(dataset) else "old"] += 1
        line = line + 1
        dataset = now
    assert min(found["old"], found["new"]) > 3
    assert exchanges == (not found["moved back"])
    assert len(grow(dest)) > len(dataset)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]
    assert not (dest / ".gear-partial").exists()

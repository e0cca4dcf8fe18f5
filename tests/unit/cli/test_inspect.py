"""`gear inspect`: table and JSON."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import run_command

from deepspeed_gear.cli import dataset_summary, inspect
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import DataError, show_bytes
from deepspeed_gear.schema import Column, Schema

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("image", "uint8", (10, 10), "observation"),
        Column("action", "int64", (), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("return", "float64", (), "return", "1"),
    ]
)
SOURCE = {
    "sources": [{"name": "a.hdf5", "format": "d4rl", "episodes": 4, "notes": ["no timeouts"]}]
}


def write(folder: Path, lengths: tuple[int, ...] = (1, 2, 3, 4)) -> Dataset:
    with DatasetWriter(folder, SCHEMA, split={"eval": 0.4}, source=SOURCE) as writer:
        for i, length in enumerate(lengths):
            writer.add(
                {
                    "observation": np.tile(np.array([-1, 3], np.float32), (length + 1, 1)),
                    "image": np.full((length, 10, 10), i, np.uint8),
                    "action": np.zeros(length, np.int64),
                    "reward": np.ones(length, np.float32),
                    "terminated": np.zeros(length, bool),
                    "return": np.array(float(length)),
                }
            )
    return Dataset.open(folder)


run = partial(run_command, inspect)


def lines_of(text: str) -> dict[str, list[str]]:
    """Return the words of each line by its first word."""
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write(tmp_path / "set")
    assert run(str(tmp_path / "set")) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["fingerprint"] == [dataset.fingerprint]
    assert lines["trajectories"] == ["4"]
    assert lines["steps"] == ["10"]
    assert " ".join(lines["size"]) == show_bytes(dataset.num_bytes)
    assert lines["length"] == ["1", "1", "2", "4", "4", "2.5", "1.118"]
    assert lines["return"][:4] == ["float64", "[]", "1", "32"]
    assert lines["observation"] == ["float32", "[2]", "T+1", "112", "B", "1", "2", "-1", "3"]
    assert lines["image"][:6] == ["uint8", "[10,", "10]", "T", "1.37", "KiB"]
    assert lines["note:"] == ["no", "timeouts"]
    train = int(lines["train"][0])
    held_out = int(lines["eval"][0])
    assert train + held_out == 4
    assert train > 0
    assert int(lines["train"][2]) + int(lines["eval"][2]) == 10


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write(tmp_path / "set")
    assert run(str(tmp_path / "set"), "--json", "--verify") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["fingerprint"] == dataset.fingerprint
    assert summary["verified"] is True
    assert summary["return"] == summary["length"]
    assert summary["return"]["mean"] == 2.5
    assert summary["columns"]["observation"]["statistics"]["mean"] == [-1, 3]
    assert summary["columns"]["observation"]["overall"] == {
        "mean": 1,
        "std": 2,
        "min": -1,
        "max": 3,
    }
    assert summary["source"] == SOURCE
    assert set(summary["split"]) == {"train", "eval"}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({}, []),
        ({"sources": [{"name": "a.csv", "format": "csv"}]}, ["a.csv (csv)"]),
        ({"sources": [{"name": "a", "episodes": 2}, {"name": "b"}]}, ["a (2 episodes)", "b"]),
        ({"by": "a program", "seed": 3}, ['{"by": "a program", "seed": 3}']),
    ],
)
def test_a_source_that_records_something_else(
    source: dict[str, Any], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetWriter(
        tmp_path / "set", Schema([Column("code", "int64")]), source=source
    ) as writer:
        writer.add({"code": [1, 2]})
    run(str(tmp_path / "set"))
    assert re.findall(r"^  source +(.*)$", capsys.readouterr().out, re.M) == shown


def test_verify_finds_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "set", (800,) * 4)
    with (tmp_path / "set" / "columns" / "image.npy").open("r+b") as file:
        file.seek(150_000)
        file.write(b"\xff")
    assert run(str(tmp_path / "set")) == 0
    capsys.readouterr()
    with pytest.raises(DataError, match=r"image.npy must hold the bytes that were written"):
        run(str(tmp_path / "set"), "--verify")
    assert capsys.readouterr().out == ""


def test_returns_are_those_of_the_rewards_where_none_are_stored(tmp_path: Path) -> None:
    """Also beside columns of T+1 rows, and in bfloat16."""
    columns = [Column("reward", "bfloat16", (), "reward"), Column("x", "int8", rows="T+1")]
    with DatasetWriter(tmp_path / "set", Schema(columns)) as writer:
        for i, length in enumerate((1, 7, 3)):
            writer.add({"reward": np.arange(length) + i, "x": np.zeros(length + 1)})
    dataset = Dataset.open(tmp_path / "set")
    returns = dataset_summary.returns_of(dataset)
    assert returns is not None
    assert returns.tolist() == [0, 28, 9]
    assert dataset_summary.summarize(dataset)["return"]["mean"] == 37 / 3


def test_a_data_set_without_returns_or_finite_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetWriter(
        tmp_path / "set", Schema([Column("x", "float32", allow_nan=True)])
    ) as writer:
        writer.add({"x": np.full(3, np.nan, np.float32)})
    assert run(str(tmp_path / "set")) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["x"] == ["float32", "[]", "T", "12", "B", "-", "-", "-", "-"]
    assert "return" not in lines
    assert json.dumps(dataset_summary.summarize(Dataset.open(tmp_path / "set")), allow_nan=False)


def test_a_folder_without_files_of_gear_is_neither(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(
        DataError, match="must be the folder of a data set or of a checkpoint; it has neith"
    ):
        run(str(tmp_path))
    with pytest.raises(
        DataError, match="must be the folder of a data set, got 'nothing at this path'; check the"
    ):
        run(str(tmp_path / "none"))

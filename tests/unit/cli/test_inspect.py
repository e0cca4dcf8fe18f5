"""`gear inspect`: table, JSON, figure."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.cli import inspect, plot, value_distribution
from deepspeed_gear.cli.figures import bin_edges, new_figure, save
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_statistics import compute_statistics
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
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
SOURCE = {"sources": [{"name": "a.hdf5", "format": "d4rl", "episodes": 4, "notes": ["no timeouts"]}]}


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


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args(arguments))


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
    train, held_out = int(lines["train"][0]), int(lines["eval"][0])
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
    assert summary["columns"]["observation"]["overall"] == {"mean": 1, "std": 2, "min": -1, "max": 3}
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
    with DatasetWriter(tmp_path / "set", Schema([Column("code", "int64")]), source=source) as writer:
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


def test_plot(tmp_path: Path) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    write(tmp_path / "set", (5, 50, 500))
    assert run(str(tmp_path / "set"), "--plot", str(tmp_path / "a.png")) == 0
    image = matplotlib_image.imread(tmp_path / "a.png")
    assert image.shape[0] > 300
    assert image[..., :3].std() > 0.05, "an empty figure"
    with pytest.raises(ConfigError, match=r"--plot .*a.txt must be writable, got .*ends in .png"):
        run(str(tmp_path / "set"), "--plot", str(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="No such file or directory"):
        save(new_figure(1, 1), tmp_path / "nowhere" / "a.png")


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([1, 2, 2, 7], [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]),
        ([-3.0], [-3.5, -2.5]),
        ([0, 100], np.arange(-0.5, 110, 11)),  # 10 bins of 11 integers each
        ([0.5, 0.5], [0.475, 0.525]),
        ([1 + 2**-52, 1], [0.95, 1.05]),
        ([0.0, 0.9], np.linspace(0, 0.9, 11)),
        ([2.0**60, 2.0**60 + 256], [0.95 * 2.0**60, 1.05 * 2.0**60]),
    ],
)
def test_bins_of_a_histogram(values: list[float], edges: Sequence[float]) -> None:
    found = bin_edges(np.array(values, np.float64), 10)
    assert found.tolist() == pytest.approx(list(edges))
    assert np.histogram(values, found)[0].sum() == len(values)


def test_axes_of_constant_values() -> None:
    """One value stands in the middle, with the same numbers on the axis as in the table."""
    pytest.importorskip("matplotlib")
    axes = new_figure(4, 4).subplots(1, 3)
    plot._histogram(axes[0], np.full(20, 1000), "steps")
    assert axes[0].get_xlim() == (989.5, 1010.5)
    column = Column("x", "float32", (3,))
    for axis, value, limits in ((axes[1], 0.3, (0, 0.6)), (axes[2], 0.0, (-1, 1))):
        rows = np.full((8, 3), value)
        axis_statistics = compute_statistics(
            Schema([column]), {"x": rows.astype(np.float32)}, np.array([0]), np.array([8]), {}
        )["x"]
        plot._elements(axis, column, axis_statistics)
        assert axis.get_ylim() == pytest.approx(limits)


def test_returns_are_those_of_the_rewards_where_none_are_stored(tmp_path: Path) -> None:
    """And nothing is drawn of what there is not; the values of discrete actions are counted."""
    pytest.importorskip("matplotlib")
    action, reward = Column("action", "int64", (2,), "action"), Column("reward", "float32", (), "reward")
    for columns in ([action, reward], [action]):
        schema = Schema(columns)
        with DatasetWriter(tmp_path / "set", schema, overwrite=True) as writer:
            for i, length in enumerate((1, 7, 3)):
                actions = np.tile(np.array([[i, 5]]), (length, 1))
                rewards = np.arange(length, dtype=np.float32) + i
                known = {"action": actions, "reward": rewards}
                writer.add({column.name: known[column.name] for column in schema})
        dataset = Dataset.open(tmp_path / "set")
        returns = value_distribution.returns_of(dataset)
        if reward in columns:
            assert returns is not None
            assert returns.tolist() == [0, 28, 9]
            assert inspect.summarize(dataset)["return"]["mean"] == 37 / 3
        else:
            assert returns is None
        plot.plot_dataset(dataset, tmp_path / "a.svg")
        labels = re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
        assert ("return of a trajectory" in labels) == (reward in columns)
        assert labels.count("trajectories") == 1 + (reward in columns)
        assert {"element 0", "element 1", "value"} <= set(labels)
    axis = new_figure(4, 4).subplots()
    plot._classes(axis, action, dataset.columns["action"])
    counts = [[int(bar.get_height()) for bar in bars] for bars in axis.containers]
    assert counts == [[1, 7, 3, 0, 0, 0], [0, 0, 0, 0, 0, 11]]


def test_a_data_set_without_returns_or_finite_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    with DatasetWriter(tmp_path / "set", Schema([Column("x", "float32", allow_nan=True)])) as writer:
        writer.add({"x": np.full(3, np.nan, np.float32)})
    assert run(str(tmp_path / "set"), "--plot", str(tmp_path / "a.svg")) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["x"] == ["float32", "[]", "T", "12", "B", "-", "-", "-", "-"]
    assert "return" not in lines
    assert json.dumps(inspect.summarize(Dataset.open(tmp_path / "set")), allow_nan=False)


def test_a_folder_without_files_of_gear_is_neither(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(DataError, match="must be the folder of a data set or of a checkpoint; it has neith"):
        run(str(tmp_path))
    with pytest.raises(DataError, match="must be the folder of a data set; make one with gear ingest"):
        run(str(tmp_path / "none"))

"""`gear inspect --plot`: what pictures show, and what is refused before anything is written."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from gear_support import config_of, write_dataset

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from deepspeed_gear.cli import dataset_plots
from deepspeed_gear.cli.main import main
from deepspeed_gear.data import dataset_sample
from deepspeed_gear.schema import DTYPES

SVG = "{http://www.w3.org/2000/svg}"


def texts(file: Path) -> list[str]:
    """Return the texts of an SVG picture."""
    root = ElementTree.parse(file).getroot()
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def write_every_kind(folder: Path) -> Path:
    """Write a data set with a column of each dtype, images, missing values and odd names."""
    columns = [Column(f"a_{dtype}", dtype, allow_nan="float" in dtype) for dtype in DTYPES]
    columns += [
        Column("state", "float32", (3,), "observation", "T+1"),
        Column("matrix", "float64", (5, 2), rows="T+1", allow_nan=True),
        Column("rgb", "uint8", (12, 10, 3), "observation"),
        Column("stack", "uint8", (4, 9, 11)),
        Column("gray", "uint8", (10, 10)),
        Column("depth", "float32", (1, 8, 8), allow_nan=True),
        Column("note", "json", rows="1", max_bytes=20),
        Column("blob", "bytes", rows="1", max_bytes=3),
        Column("task", "int64", rows="1"),
        Column("größe", "int8"),
    ]
    schema = Schema(columns)
    with DatasetWriter(folder, schema) as writer:
        for number, length in enumerate((1, 7, 33)):
            row: dict[str, Any] = {}
            for column in schema:
                rows = length + int(column.rows == "T+1")
                values = (np.arange(rows * column.num_elements) % 2).astype(np.float64)
                values = values.reshape(rows, *column.shape)
                row[column.name] = torch.from_numpy(values).to(column.torch_dtype)
            row["a_float32"][0] = torch.nan
            row["depth"][:] = torch.inf
            row["note"] = None if number == 0 else {"n": number}
            row["blob"] = b"ab"
            row["task"] = number
            writer.add(row)
    return folder


def test_every_kind_of_column_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_every_kind(tmp_path / "set")
    file = tmp_path / "plot.svg"
    assert main(["inspect", str(folder), "--plot", str(file)]) == 0
    assert f"Plot in {file}: Values: all rows." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "set"]
    shown = texts(file)
    for name in ("set: 3 trajectories, 41 steps", "length of trajectories", "größe", "a_bfloat16"):
        assert any(name in one for one in shown), name
    for name in ("rgb", "stack", "gray", "depth"):
        assert any(one.startswith(f"{name}, ") and one.endswith("frames") for one in shown), name
    assert {"trajectory 0, step 0", "trajectory 2, step 0", "step 32"} <= set(shown)
    # Missing: 3 of 41 elements, all, and one of three notes.
    assert {"7.3%", "100.0%", "33.3%"} <= {one.strip() for one in shown}
    assert "return of trajectories" not in shown  # there are no rewards


@pytest.mark.parametrize("name", ["plot.PNG", "plot.html"])
def test_the_suffix_chooses_the_format(name: str, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", [1, 7])
    assert main(["inspect", str(folder), "--plot", str(tmp_path / name)]) == 0
    content = (tmp_path / name).read_bytes()
    if name == "plot.PNG":
        assert content.startswith(b"\x89PNG")
        return
    page = content.decode()
    assert page.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in page
    assert "steps of a trajectory" in page  # the table of a notebook
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)  # needs no other file


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", [1, 7, 33])
    for name in ("one.svg", "two.svg"):
        assert main(["inspect", str(folder), "--plot", str(tmp_path / name)]) == 0
    one, two = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert "return of trajectories" in texts(tmp_path / "one.svg")


@pytest.mark.filterwarnings("error")
def test_extreme_values_are_described_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums, deviations and ranges that float64 cannot hold, and names that the font lacks."""
    most = np.finfo(np.float64).max
    columns = {
        "extreme": np.array([-most, 0, most]),
        "large": np.full(3, most),
        "subnormal": np.array([0, 5e-324, 0]),
        "neighbours": np.array([1, np.nextafter(1, 2), 1]),
        "unknown": np.full(3, np.nan),
        "日本": np.arange(3.0),
        "pairs": np.array([[most, 1], [-most, 2], [0, 3]]),
        "integers": np.array([2**62, -(2**62), 0]),
    }
    schema = [
        Column(name, values.dtype.name, values.shape[1:], allow_nan=values.dtype.kind == "f")
        for name, values in columns.items()
    ]
    schema.append(Column("reward", "float64", role="reward"))
    with DatasetWriter(tmp_path / "set", Schema(schema)) as writer:
        writer.add({**columns, "reward": np.full(3, most)})
    file = tmp_path / "plot.svg"
    assert main(["inspect", str(tmp_path / "set"), "--plot", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["columns"]["extreme"]["overall"]["max"] == most
    assert document["columns"]["extreme"]["overall"]["std"] is None
    shown = texts(file)
    assert {"-1.798e+308", "1.798e+308", "no finite value", "日本", "extreme"} <= set(shown)


def test_one_step_and_an_existing_file(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", [1])
    file = tmp_path / "plot.svg"
    file.write_text("earlier")
    assert main(["inspect", str(folder), "--plot", str(file)]) == 0
    assert any("1 trajectories, 1 steps" in one for one in texts(file))


def test_large_data_are_sampled_and_the_sample_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataset_sample.DatasetSample.__init__, "__defaults__", (256,))
    folder = write_dataset(tmp_path / "set", [400] * 5)
    file = tmp_path / "plot.svg"
    assert main(["inspect", str(folder), "--plot", str(file), "--json"]) == 0
    plot = json.loads(capsys.readouterr().out)["plot"]
    assert (plot["steps"], plot["steps_of"], plot["trajectories_of"]) == (256, 2000, 5)
    sentence = "256 of 2,000 steps, in runs of 4 at even distances, and 5 of 5 trajectories"
    assert sentence in plot["sampled"]
    shown = texts(file)
    assert any(sentence in one for one in shown)
    assert any("256 rows" in one for one in shown)


def test_many_columns_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_plots, "MOST_COLUMNS", 2)
    folder = write_dataset(tmp_path / "set", [1, 7])
    assert main(["inspect", str(folder), "--plot", str(tmp_path / "plot.svg")]) == 0
    assert any("5 more columns have no histogram" in one for one in texts(tmp_path / "plot.svg"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_what_cannot_be_drawn_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dataset(tmp_path / "set", [1, 7])
    with Replay(config_of(folder, batch_size=2, sampler={"kind": "prioritized"})) as replay:
        replay.save(tmp_path / "saved")
    there = sorted(tmp_path.rglob("*"))
    error = refused(capsys, str(folder), "--plot", str(tmp_path / "plot.pdf"))
    assert re.search(r"--plot must end in .svg, .png or .html, got '.*plot.pdf'; for .*svg", error)
    error = refused(capsys, str(folder), "--plot", str(tmp_path / "plot"))
    assert "--plot must end in" in error
    for folder_name in (".", "/", str(tmp_path)):
        error = refused(capsys, str(folder), "--plot", folder_name)
        assert "--plot must be a file" in error
    error = refused(capsys, str(folder), "--plot", str(tmp_path / "none" / "plot.svg"))
    assert "--plot must be in a folder that exists" in error
    error = refused(capsys, str(tmp_path / "saved"), "--plot", str(tmp_path / "plot.svg"))
    assert "--plot must be of a data set" in error
    error = refused(capsys, "--living", "--plot", str(tmp_path / "plot.svg"))
    assert "--plot must be of a data set" in error
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refused(capsys, str(folder), "--plot", str(tmp_path / "plot.svg"))
    assert "pip install 'deepspeed_gear[plot]'" in error
    assert sorted(tmp_path.rglob("*")) == there


def test_a_plot_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dataset(tmp_path / "set", [1, 7])

    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    error = refused(capsys, str(folder), "--plot", str(tmp_path / "plot.svg"))
    assert "plot.svg must be writable, got '[Errno 28] No space left" in error
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_the_picture_of_the_docs_is_what_the_command_draws(checkout: Path, tmp_path: Path) -> None:
    """Other versions of matplotlib draw other bytes, but the same texts."""
    source = checkout / "examples" / "data" / "hopper_medium.hdf5"
    assert main(["ingest", str(source), str(tmp_path / "hopper"), "--quiet"]) == 0
    assert main(["inspect", str(tmp_path / "hopper"), "--plot", str(tmp_path / "plot.svg")]) == 0
    assert texts(tmp_path / "plot.svg") == texts(checkout / "docs/figures/inspect_hopper.svg")

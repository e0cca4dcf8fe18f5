"""`gear init`: what it writes fits the data set, and trains."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_support import free_port

from deepspeed_gear.cli import init
from deepspeed_gear.cli.main import main
from deepspeed_gear.config import check_against, parse
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

REWARD = Column("reward", "float32", (), "reward")
TERMINATED = Column("terminated", "bool", (), "terminated")
KINDS = {
    "continuous": [
        Column("observation", "float64", (5,), "observation", "T+1"),
        Column("action", "float32", (2,), "action"),
        REWARD,
        TERMINATED,
    ],
    "discrete": [
        Column("observation", "float32", (4,), "observation"),
        Column("next_observation", "float32", (4,), "observation"),
        Column("action", "int64", (), "action"),
        REWARD,
        TERMINATED,
    ],
    "multi_discrete": [
        Column("observation", "int64", (3,), "observation", "T+1"),
        Column("action", "int64", (2,), "action"),
    ],
    "mixed": [
        Column("observation.camera", "uint8", (3, 4, 4), "observation", "T+1"),
        Column("observation.touch", "bool", (2,), "observation", "T+1"),
        Column("observation.joints", "float32", (3,), "observation", "T+1"),
        Column("action.arm", "float32", (2,), "action"),
        Column("action.grip", "bool", (), "action"),
        Column("action.keys", "int64", (2,), "action"),
        REWARD,
        TERMINATED,
    ],
    "reserved_names": [
        Column("weight", "float32", (3,), "observation", "T+1"),
        Column("mask", "int8", (2,), "action"),
    ],
}


def make_dataset(folder: Path, kind: str, lengths: tuple[int, ...] = (5, 1, 30, 12, 40, 25)) -> Dataset:
    """Write a data set whose actions follow from its observations, so that cloning them can succeed."""
    rng = np.random.default_rng(0)
    schema = Schema(KINDS[kind])
    with DatasetWriter(folder, schema) as writer:
        for steps in lengths:
            hidden = rng.uniform(-1, 1, steps + 1)
            rows = {"T": hidden[:steps], "T+1": hidden}
            trajectory: dict[str, Any] = {}
            for column in schema:
                values = rows[column.rows].reshape(-1, *(1 for _ in column.shape))
                values = np.broadcast_to(values, (len(values), *column.shape))
                trajectory[column.name] = _encode(values, column)
            writer.add(trajectory)
    return Dataset.open(folder)


def _encode(values: np.ndarray, column: Column) -> np.ndarray:
    if column.dtype == "bool":
        return values > 0
    if column.dtype == "uint8":
        return ((values + 1) * 127).astype(np.uint8)
    if column.name == "mask":
        return (values > 0).astype(np.int8) * 2 - 1
    if column.dtype == "int64":
        return ((values + 1) * 1.5).astype(np.int64)
    return values.astype(column.dtype)


def run_init(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    init.add_arguments(parser)
    return init.run(parser.parse_args(arguments))


@pytest.mark.parametrize("kind", KINDS)
def test_config_fits_the_data(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = make_dataset(tmp_path / "data", kind)
    assert run_init(str(tmp_path / "data"), "--out", str(tmp_path / "out")) == 0
    assert f"deepspeed --num_gpus 1 {tmp_path / 'out' / 'train.py'}" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "gear_config.json").read_text())
    fields = check_against(parse(written["gear"]), {"main": dataset.schema})
    assert Path(written["gear"]["data"]["path"]) == dataset.path.resolve()
    assert {field.column.role for field in fields if field.column} >= {"observation", "action"}
    assert not any(field.column.name == "next_observation" for field in fields if field.column)
    assert all(field.length == 8 for field in fields)
    ast.parse((tmp_path / "out" / "train.py").read_text())


def test_observations_and_actions_by_type(tmp_path: Path) -> None:
    window = {"offset": 0, "length": 8}
    mixed = init.make_config(make_dataset(tmp_path / "mixed", "mixed"))["gear"]["fields"]
    assert mixed["observation.camera"] == {**window, "scale": 1 / 255, "as": "engine"}
    assert mixed["observation.touch"] == {**window, "as": "engine"}
    assert mixed["observation.joints"] == {**window, "normalize": "mean_std", "as": "engine"}
    assert mixed["action.arm"] == {**window, "as": "engine"}
    assert mixed["action.grip"] == window
    renamed = init.make_config(make_dataset(tmp_path / "reserved", "reserved_names"))["gear"]["fields"]
    assert renamed["weight"] == {**window, "normalize": "mean_std", "as": "engine"}
    assert renamed["mask_field"] == {"column": "mask", **window, "as": "float32"}  # has values below 0


def test_split_is_the_data_sets(tmp_path: Path) -> None:
    schema = Schema(KINDS["multi_discrete"])
    with DatasetWriter(tmp_path / "data", schema, split={"eval": 0.25}) as writer:
        for _ in range(20):
            writer.add({"observation": np.ones((4, 3), np.int64), "action": np.ones((3, 2), np.int64)})
    gear = init.make_config(Dataset.open(tmp_path / "data"))["gear"]
    assert gear["data"]["split"] == {"eval": 0.25}
    assert gear["fields"]["action"]["length"] == 3  # no longer than the longest trajectory


def test_refuses_to_overwrite(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", "continuous")
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(DataError, match=re.escape("train.py must not exist; overwrite it with --force")):
        run_init(str(tmp_path / "data"), "--out", str(tmp_path))
    assert (tmp_path / "train.py").read_text() == "mine"
    assert not (tmp_path / "gear_config.json").exists()
    assert run_init(str(tmp_path / "data"), "--out", str(tmp_path), "--force") == 0
    assert "gear_sample" in (tmp_path / "train.py").read_text()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "data", "discrete")
    command = ["init", str(tmp_path / "data"), "--out", str(tmp_path)]
    assert main(command) == 0
    assert main(command) == 2
    assert "gear: error: " in capsys.readouterr().err


def test_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be the folder of a data set"):
        run_init(str(tmp_path / "none"))
    with DatasetWriter(tmp_path / "data", Schema([KINDS["discrete"][0], REWARD])) as writer:
        writer.add({"observation": np.zeros((2, 4), np.float32), "reward": np.zeros(2, np.float32)})
    with pytest.raises(
        DataError, match=r"must have a column of role action; it has observation \(observation\)"
    ):
        run_init(str(tmp_path / "data"), "--out", str(tmp_path))
    make_dataset(tmp_path / "good", "discrete")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="must be a writable folder"):
        run_init(str(tmp_path / "good"), "--out", str(tmp_path / "file" / "inner"))


@pytest.mark.parametrize(("kind", "ranks"), [("continuous", 2), ("mixed", 1)])
def test_script_trains_under_the_launcher(tmp_path: Path, kind: str, ranks: int) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher) if launcher.exists() else shutil.which("deepspeed") or "deepspeed"]
    make_dataset(tmp_path / "data", kind)
    run_init(str(tmp_path / "data"), "--out", str(tmp_path))
    port = free_port()
    command += ["--num_gpus", str(ranks), "--master_port", str(port), "train.py", "--steps", "51"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    )
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        left.unlink()  # DeepSpeed's own buffers, which it leaves there
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", output)}
    assert sorted(losses) == [0, 50], output
    assert losses[50] < 0.5 * losses[0]

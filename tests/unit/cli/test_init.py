"""`gear init`: what it writes fits the data set, and trains."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import run_command
from process_support import environment, free_port, run_ranks

import deepspeed_gear
from deepspeed_gear.cli import init
from deepspeed_gear.cli.main import main
from deepspeed_gear.config import check_against, parse
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.errors import ConfigError, DataError
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


def make_dataset(
    folder: Path, kind: str, lengths: tuple[int, ...] = (5, 1, 30, 12, 40, 25)
) -> Dataset:
    """Write a data set whose actions follow from its observations, so that cloning them can
    succeed.
    """
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
            for column in schema.end_columns:
                trajectory[column.name][:-1] = False
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


run_init = partial(run_command, init)


def check_errors(script: str, gear: dict[str, Any]) -> None:
    """Run the script's model and errors on a batch, without an engine."""
    wanted = ("OBSERVATIONS", "model", "flat", "step_errors")
    parts = [
        node
        for node in ast.parse(script).body
        if isinstance(node, ast.FunctionDef | ast.Assign)
        and (node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0]))
        in wanted
    ]
    known: dict[str, Any] = {"torch": torch, "nn": torch.nn, "deepspeed_gear": deepspeed_gear}
    exec(compile(ast.Module(parts, []), "train.py", "exec"), known)
    known["engine"] = known["model"]
    with deepspeed_gear.Replay(gear) as replay:
        error, real = known["step_errors"](replay.sample())
        assert error.shape == real.shape == (4, 8)
        assert (error >= 0).all()
        error.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_config_fits_the_data(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path / "data", kind)
    assert run_init(str(tmp_path / "data"), "--out", str(tmp_path / "out")) == 0
    assert capsys.readouterr().out.endswith(f" {tmp_path / 'out' / 'train.py'}\n")
    written = json.loads((tmp_path / "out" / "gear_config.json").read_text())
    fields = check_against(parse(written["gear"]), {"main": dataset.schema})
    assert Path(written["gear"]["data"]["path"]) == dataset.path.resolve()
    assert {field.column.role for field in fields if field.column} >= {"observation", "action"}
    assert not any(field.column.name == "next_observation" for field in fields if field.column)
    assert all(field.length == 8 for field in fields)
    check_errors((tmp_path / "out" / "train.py").read_text(), {**written["gear"], "batch_size": 4})


def test_observations_and_actions_by_type(tmp_path: Path) -> None:
    window = {"offset": 0, "length": 8}
    mixed = init.make_config(make_dataset(tmp_path / "mixed", "mixed"))["gear"]["fields"]
    assert mixed["observation.camera"] == {**window, "scale": 1 / 255, "as": "engine"}
    assert mixed["observation.touch"] == {**window, "as": "engine"}
    assert mixed["observation.joints"] == {**window, "normalize": "mean_std", "as": "engine"}
    assert mixed["action.arm"] == {**window, "as": "engine"}
    assert mixed["action.grip"] == window
    renamed = init.make_config(make_dataset(tmp_path / "reserved", "reserved_names"))["gear"][
        "fields"
    ]
    assert renamed["weight"] == {**window, "normalize": "mean_std", "as": "engine"}
    assert renamed["mask_field"] == {
        "column": "mask",
        **window,
        "as": "float32",
    }  # has values below 0


def test_split_is_the_data_sets(tmp_path: Path) -> None:
    schema = Schema(KINDS["multi_discrete"])
    with DatasetWriter(tmp_path / "data", schema, split={"eval": 0.25}) as writer:
        for _ in range(20):
            writer.add(
                {"observation": np.ones((4, 3), np.int64), "action": np.ones((3, 2), np.int64)}
            )
    gear = init.make_config(Dataset.open(tmp_path / "data"))["gear"]
    assert gear["data"]["split"] == {"eval": 0.25}
    assert gear["fields"]["action"]["length"] == 3  # no longer than the longest trajectory


def test_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "data", "continuous")
    (tmp_path / "train.py").write_text("mine")
    command = ["init", str(tmp_path / "data"), "--out", str(tmp_path)]
    assert main(command) == 2
    assert "train.py must not exist; overwrite it with --force" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine"
    assert not (tmp_path / "gear_config.json").exists()
    assert main([*command, "--force"]) == 0
    assert "gear_sample" in (tmp_path / "train.py").read_text()


def test_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be the folder of a data set"):
        run_init(str(tmp_path / "none"))
    with DatasetWriter(tmp_path / "data", Schema([KINDS["discrete"][0], REWARD])) as writer:
        writer.add({"observation": np.zeros((2, 4), np.float32), "reward": np.zeros(2, np.float32)})
    text = r"must have a column of role action; it has observation \(observation\)"
    with pytest.raises(DataError, match=text):
        run_init(str(tmp_path / "data"), "--out", str(tmp_path))
    make_dataset(tmp_path / "good", "discrete")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="must be a writable folder"):
        run_init(str(tmp_path / "good"), "--out", str(tmp_path / "file" / "inner"))
    (tmp_path / "hosts").write_text("node0\n")
    with pytest.raises(ConfigError, match="line 1 must be 'HOST slots=NUMBER'"):
        run_init(
            str(tmp_path / "good"), "--out", str(tmp_path), "--hostfile", str(tmp_path / "hosts")
        )
    assert not (tmp_path / "train.py").exists()


ON_CPU = "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 3 train.py"


@pytest.mark.parametrize(
    ("accelerator", "gpus", "has_hosts", "wanted"),
    [
        ("cpu", 8, False, ON_CPU),
        ("cuda", 8, False, "deepspeed --num_gpus 8 train.py"),
        ("cuda", 0, False, ON_CPU),
        ("cuda", 8, True, "deepspeed --hostfile hosts train.py"),
        ("cuda", 0, True, "deepspeed --hostfile hosts train.py"),
    ],
)
def test_launch_line(
    accelerator: str,
    gpus: int,
    has_hosts: bool,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For the GPUs or the cores of this machine, or the hosts of a file."""
    make_dataset(tmp_path / "data", "discrete")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(init.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    Path("hosts").write_text("node0 slots=8\nnode1 slots=8\n")
    assert run_init("data", *(["--hostfile", "hosts"] if has_hosts else [])) == 0
    *notes, command = capsys.readouterr().out.splitlines()
    assert command == f"train with: {wanted}"
    assert any(".deepspeed_env" in note for note in notes) == has_hosts
    written = json.loads(Path("gear_config.json").read_text())
    num_ranks = 16 if has_hosts else int(wanted.split()[-2])
    assert 128 <= written["train_batch_size"] < 128 + num_ranks
    assert written["train_batch_size"] % num_ranks == 0
    assert "train_micro_batch_size_per_gpu" not in written, (
        "it would scale with the number of ranks"
    )
    assert written["gear"]["prefetch"] > 0
    assert f"    {wanted}\n" in Path("train.py").read_text()


def test_what_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data set's split, or one that this command chooses; nothing where all parts would be
    empty.
    """
    few = make_dataset(tmp_path / "few", "discrete", (3, 4))
    split, name = init.held_out_split(few)
    assert name in (None, "eval")
    assert (name is None) == (split == {})
    one = make_dataset(tmp_path / "one", "discrete", (3,))
    assert init.held_out_split(one) == ({}, None)
    assert run_init(str(tmp_path / "one"), "--out", str(tmp_path)) == 0
    assert "note: no trajectory can be held out" in capsys.readouterr().out
    assert "HELD_OUT = None  #" in (tmp_path / "train.py").read_text()
    many = make_dataset(tmp_path / "many", "discrete", (3,) * 40)
    assert init.held_out_split(many) == ({"eval": 0.1}, "eval")
    assert run_init(str(tmp_path / "many"), "--out", str(tmp_path), "--force") == 0
    assert "note: 10% of the trajectories are held out" in capsys.readouterr().out


def steps_of(output: str) -> dict[int, str]:
    """Return the printed loss of each printed step."""
    return {
        int(step): loss for step, loss in re.findall(r"step (\d+) of \d+, loss ([\d.]+\d)", output)
    }


def test_the_script_trains_and_continues_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed under the launcher after a save; started again, it repeats the steps after
    that save.
    """
    make_dataset(tmp_path / "data", "mixed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    run_init("data")
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("train with: ")
    ports = [free_port(), free_port()]
    line = line.replace("--num_gpus", f"--master_port {ports[0]} --num_gpus")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {line} --print-every 5 --save-every 20"],
        env=environment(PATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = ""
    for text in process.stdout:
        output += text
        if "step 40 of 2000" in text:
            break
    os.killpg(process.pid, signal.SIGKILL)
    output += process.communicate()[0]
    losses = steps_of(output)
    assert {5, 10, 35, 40} <= losses.keys(), output
    assert float(losses[40]) < float(losses[5])
    (tmp_path / "checkpoints" / "latest").write_text(
        "global_step20"
    )  # the kill may come after other saves
    options = ["--steps", "43", "--print-every", "5", "--save-every", "20"]
    continued = run_ranks(tmp_path / "train.py", 2, *options, MASTER_PORT=str(ports[1]))[0]
    for left in (left for port in ports for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*")):
        left.unlink()  # DeepSpeed's own buffers, which it leaves there
    assert "continuing after step 20\n" in continued
    assert continued.endswith("remove them after the run: gear clean\n")
    again = steps_of(continued)
    assert list(again) == [25, 30, 35, 40, 43]
    assert [again[step] for step in (25, 30, 35, 40)] == [losses[step] for step in (25, 30, 35, 40)]
    errors = dict(re.findall(r"step (\d+), held-out error ([\d.]+)", output + continued))
    assert {"20", "40", "43"} <= errors.keys()
    assert float(errors["43"]) < float(errors["20"])
    state = torch.load(
        tmp_path / "checkpoints" / "best" / "mp_rank_00_model_states.pt", weights_only=False
    )
    assert f"{state['best']:.4f}" == min(errors.values(), key=float)
    best = next(step for step, error in errors.items() if error == f"{state['best']:.4f}")
    assert state["global_steps"] == int(best)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step43"

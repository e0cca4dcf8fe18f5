"""`gear preview` against what a Replay hands out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import lengths_of, shared_files, write_dataset

from deepspeed_gear import Replay
from deepspeed_gear.cli.main import main
from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError, show_bytes
from deepspeed_gear.replay.preview import preview

FIELDS = {
    "observation": {"offset": -3, "length": 4},
    "action": {"offset": -3, "length": 4, "align": "right"},
    "reward": {},
    "timestep": {"offset": -3, "length": 4},
}
ENDS = {"inputs": ["observation", "mask.action"], "labels": ["action", "reward"]}
BYTES = {"observation": 12, "action": 8, "reward": 4, "timestep": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("preview") / "set", lengths_of(30))


def section(data: Path, **options: Any) -> dict[str, Any]:
    return {
        "data": str(data),
        "seed": 5,
        "fields": FIELDS,
        "pipeline": ENDS,
        "sampler": {"kind": "uniform", "unit": "step"},
        "shared_memory": {"prefix": "gpreview"},
        **options,
    }


def test_ranks_get_what_a_replay_gives(data: Path) -> None:
    """Ids, bytes and padding of the first micro batch; digests of global batches."""
    gear = section(data)
    found = preview(parse(gear), 4, 3, {"data": 2, "sequence": 2}, 1, 3)
    assert found.info.global_batch == 24
    with Replay({**gear, "batch_size": 24, "verify_every": 1}) as replay:
        digests, batches = [], []
        for _ in range(3):
            batches.append(replay.sample().clone())
            digests.append(replay.statistics()["digest"][1])
    assert found.digests == digests
    assert len(set(digests)) == 3
    for rank in found.ranks:
        place = rank.place
        mine = batches[0].trajectory_id[place.data_rank :: 6][:4]
        assert rank.ids == mine.tolist()
        assert rank.shapes["observation"] == (4, 2, 3)
        assert rank.num_bytes == 4 * (2 * (12 + 8 + 8) + 4)
        part = slice(2 * place.sequence_rank, 2 * place.sequence_rank + 2)
        masks = [batches[0].mask[name][place.data_rank :: 6] for name in FIELDS]
        shown = np.concatenate([m[:, part].flatten() if m.dim() == 2 else m for m in masks])
        assert rank.padding == pytest.approx(1 - shown.mean())
    assert shared_files("gpreview") == []


def test_stages_and_traffic(data: Path) -> None:
    """A row goes to a node once, of the fields that the node's stages read; inner nodes hold and get none."""
    gear = section(data)
    found = preview(parse(gear), 4, 1, {"pipe": 3, "data": 2, "tensor": 2}, 3, 1)
    shapes = [sorted(rank.shapes) for rank in found.ranks]
    assert shapes == [["mask.action", "observation"]] * 4 + [[]] * 4 + [["action", "reward"]] * 4
    with Replay({**gear, "batch_size": 8}) as replay:
        batch, lengths = replay.sample(), replay.datasets["main"].lengths
        size = lengths * replay.datasets["main"].schema.row_bytes
    before = np.concatenate([[0], np.cumsum(size)])
    middle = np.searchsorted(before, before[-1] / 2)
    second = batch.trajectory_id.numpy() >= middle
    real = {name: batch.mask[name].reshape(8, -1).sum(1).numpy() * BYTES[name] for name in FIELDS}
    wanted = np.zeros((3, 3), np.int64)
    wanted[2, 0] = real["observation"][second].sum()
    wanted[0, 2] = (real["action"] + real["reward"])[~second].sum()
    assert (found.traffic == wanted).all()


def test_a_thousand_ranks_fit_one_screen(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal ranks and nodes share lines; --full adds a line for each rank and each two nodes."""
    path, options = tmp_path / "gear.json", ["--pp", "4", "--dp", "64", "--tp", "4", "--nodes", "128"]
    path.write_text(json.dumps({**section(data), "micro_batch_size": 1}))
    shown = []
    for more in ([], ["--full"], ["--json"]):
        assert main(["preview", str(path), *options, *more]) == 0
        shown.append(capsys.readouterr().out)
    lines, full, known = shown[0].splitlines(), shown[1].splitlines(), json.loads(shown[2])
    assert len(lines) < 30
    assert max(map(len, lines)) < 120
    others = set(full) - set(lines)
    assert [line for line in full if line and line not in others] == [line for line in lines if line]
    traffic, ranks = np.array(known["traffic"]), known["ranks"]
    assert "ranks 0-255 (256): pipe 0 of 4, data 0-63 of 64, tensor 0-3 of 4" in lines
    assert "ranks 256-767 (512): pipe 1-2 of 4, data 0-63 of 64, tensor 0-3 of 4" in lines
    padding = [rank["padding"] for rank in ranks[:256]]
    text = f"{show_bytes(ranks[0]['bytes'])} a micro batch; padding {min(padding):.1%} to {max(padding):.1%}"
    assert any(text in line for line in lines)
    cells = next(re.split(r"  +", line) for line in lines if line.startswith("0-31 "))
    most = int(traffic[:32].sum(1).argmax())
    sizes = 8 * ranks[0]["bytes"], ranks[0]["bytes"], traffic[:32].sum()
    assert cells[1:5] == ["8", *map(show_bytes, sizes)]
    assert cells[5] == f"{show_bytes(traffic[most].sum())} (node {most})"
    text = f"between all nodes: {show_bytes(traffic.sum())}, at most {show_bytes(traffic.max())} from"
    assert any(text in line for line in lines)
    each = [line.split()[:2] for line in full if line[:1].isdigit() and "data" in line]
    assert each == [[str(rank["rank"]), str(rank["node"])] for rank in ranks]
    for a, b in np.argwhere(traffic).tolist():
        assert f"node {a} -> node {b}  {show_bytes(traffic[a, b])}" in full


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"train_batch_size": 24}, (12, 1)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (4, 3)),
        ({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 24}, (4, 3)),
        ({"train_micro_batch_size_per_gpu": 4}, (4, 1)),
    ],
)
def test_sizes_of_a_ds_config(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, int], wanted: Any
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**sizes, "gear": section(data)}))
    assert main(["preview", str(path), "--dp", "2", "--json", "--batches", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["micro"], shown["accumulation"]) == wanted
    assert [rank["data"] for rank in shown["ranks"]] == [0, 1]
    assert main(["preview", str(path), "--dp", "2", "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert f"digest {shown['digests'][0]}" in text
    assert "Rows between all nodes" in text


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"train_batch_size": 7}, ["--dp", "2"], "train_batch_size must be micro batch"),
        ({}, [], "gear.batch_size must be given where there is no engine"),
        ({"gradient_accumulation_steps": 2}, [], "train_batch_size must be given"),
        ({"train_batch_size": 8}, ["--nodes", "3"], "nodes must divide the 1 ranks, got 3"),
        ({"train_batch_size": 8}, ["--sp", "3"], "length must be a multiple of the sequence ranks (3)"),
    ],
)
def test_what_is_refused(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, int],
    options: list[str],
    text: str,
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**config, "gear": section(data)}))
    assert main(["preview", str(path), *options]) == 2
    assert text in capsys.readouterr().err


def test_without_data_there_is_nothing_to_draw() -> None:
    tables = {"main": {"capacity_steps": 9, "schema": {"columns": {"reward": {"dtype": "float32"}}}}}
    with pytest.raises(ConfigError, match="must hold a data set"):
        preview(parse({"tables": tables}), 2, 1, {}, 1, 1)

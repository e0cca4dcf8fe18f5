"""The code of docs/coming-from.md runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix

from deepspeed_gear import Column, DatasetWriter, Replay, Schema, TrajectoryWriter, TransitionBuffer

COLUMNS = {
    "observation": {"dtype": "float32", "shape": [3], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
}


def trajectory(steps: int) -> dict[str, Any]:
    return {
        "observation": np.arange(3.0 * (steps + 1), dtype=np.float32).reshape(-1, 3),
        "action": np.arange(steps),
        "reward": np.ones(steps, np.float32),
        "terminated": np.arange(1, steps + 1) == steps,
    }


def snippets(checkout: Path) -> dict[str, str]:
    """Return the code of each section."""
    page = (checkout / "docs" / "coming-from.md").read_text(encoding="utf-8")
    found = {}
    for section in page.split("\n## ")[1:]:
        code = re.search(r"```python\n(.*?)```", section, re.S)
        assert code is not None
        found[section.splitlines()[0]] = code[1]
    return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with a config and a data set, and the names that the page takes for granted."""
    monkeypatch.chdir(tmp_path)
    schema = Schema(
        [
            Column(n, c["dtype"], tuple(c.get("shape", ())), c["role"], c.get("rows", "T"))
            for n, c in COLUMNS.items()
        ]
    )
    with DatasetWriter(tmp_path / "data" / "hopper", schema, split={"eval": 0.1}) as writer:
        for i in range(200):
            writer.add(trajectory(1 + i % 7))
    table = {"capacity_steps": 1000, "schema": {"columns": COLUMNS}, "writers": 1, "max_length": 50}
    section = {"batch_size": 4, "tables": {"main": table}, "shared_memory": {"prefix": prefix()}}
    (tmp_path / "ds_config.json").write_text(json.dumps({"gear": section}))
    return {
        "Replay": Replay,
        "TrajectoryWriter": TrajectoryWriter,
        "schema": {"columns": COLUMNS},
        "trajectory": trajectory(5),
        "td_errors": lambda batch: torch.ones(len(batch.anchor)),
        "episode": [(np.zeros(3, np.float32), i, 1.0, i == 4) for i in range(5)],
        "last_observation": np.zeros(3, np.float32),
    }


def test_the_page_has_code_for_each(checkout: Path) -> None:
    assert list(snippets(checkout)) == ["TorchRL", "Reverb", "CleanRL", "Hugging Face datasets"]


@pytest.mark.parametrize("section", ["TorchRL", "Hugging Face datasets"])
def test_a_replay_of_the_page_samples(section: str, scene: dict[str, Any], checkout: Path) -> None:
    exec(snippets(checkout)[section], scene)
    replay = scene["replay"]
    with replay:
        assert len(scene["batch"].anchor) > 0


def test_the_transition_buffers_of_the_pages_sample(
    scene: dict[str, Any], checkout: Path, tmp_path: Path
) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="the pages act in its environments")
    page = (checkout / "docs" / "how-to" / "transition-buffer.md").read_text(encoding="utf-8")
    loop, options = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(loop, scene)
    assert len(scene["buffer"]) == 2000
    assert scene["data"].dones.shape == (128, 1)
    scene["act"] = lambda buffer: buffer.add(scene["obs"], scene["obs"], 1, 1.0, True, False)
    weights = torch.ones(4, requires_grad=True)
    scene["value"] = lambda observation: observation.sum(1, keepdim=True)
    scene["q"] = lambda observation, action: (observation @ weights)[:, None] + action
    exec(options, scene)
    assert weights.grad is not None
    assert (tmp_path / "runs" / "buffer" / "position.json").exists()
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    scene |= {"TransitionBuffer": TransitionBuffer, "envs": envs, "obs": envs.reset(seed=0)[0]}
    exec(snippets(checkout)["CleanRL"].replace("1_000_000", "10_000"), scene)
    assert scene["data"].observations.shape == (256, 4)
    scene["buffer"].close()


def test_the_writer_of_the_page_adds(scene: dict[str, Any], checkout: Path) -> None:
    config = json.loads(Path("ds_config.json").read_text())["gear"]
    with Replay(config) as replay:
        exec(snippets(checkout)["Reverb"], scene)
        assert len(replay) == 1

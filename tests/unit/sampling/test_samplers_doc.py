"""The examples of docs/how-to/samplers.md run as they stand."""

import re
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from page_support import HOW_TO, page_json

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.describe_options import alternatives, as_model, options
from deepspeed_gear.config.sampler_options import ExternalSampler

EXAMPLES: list[dict[str, Any]] = page_json("samplers.md")
SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("gain", "float32", (), "other", "1"),
        Column("version", "int64", (), "other", "1"),
    ]
)
ROOM = {"capacity_steps": 2000, "capacity_trajectories": 60}


@pytest.fixture
def my_masses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", (HOW_TO / "samplers.md").read_text(), re.DOTALL)
    (tmp_path / "my_masses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_masses", None)


def trajectory(number: int) -> dict[str, np.ndarray]:
    steps = 1 + number % 30
    return {
        "observation": np.full((steps + 1, 2), number, np.float32),
        "reward": np.ones(steps, np.float32),
        "gain": np.float32(number % 7 / 7),
        "version": np.int64(number // 10),
    }


def test_every_kind_has_an_example() -> None:
    models = [as_model(m) for m in alternatives(options(GearConfig)["sampler"].annotation)]
    own = [m for m in models if m is not None and m is not ExternalSampler]
    kinds = {get_args(m.model_fields["kind"].annotation)[0] for m in own}
    assert {example["kind"] for example in EXAMPLES} == kinds


@pytest.mark.usefixtures("my_masses")
@pytest.mark.parametrize("example", EXAMPLES, ids=[e["kind"] for e in EXAMPLES])
def test_example_runs(example: dict[str, Any]) -> None:
    tables = list(example.get("shares", {"main": 1}))
    section = {"tables": dict.fromkeys(tables, ROOM), "sampler": example, "batch_size": 12}
    prioritized = "prioritized" in str(example) or example["kind"] == "top_k"
    with Replay(section, schemas=dict.fromkeys(tables, SCHEMA)) as replay:
        for table in tables:
            for number in range(40):
                replay.add(trajectory(number), table)
        for _ in range(4):
            batch = replay.sample()
            assert batch.num_samples == 12
            assert (batch["observation"][:, 0] == batch.trajectory_id).all()
            assert (batch.anchor < batch.num_steps).all()
            assert ((batch.probability > 0) & (batch.probability <= 1)).all()
            assert ((batch.is_weight > 0) & (batch.is_weight <= 1)).all()
            if prioritized:
                replay.update_priorities(batch, 1.0 + batch.trajectory_id.double())
        if prioritized:
            assert replay.statistics()["priorities_applied"] == 3 * 12

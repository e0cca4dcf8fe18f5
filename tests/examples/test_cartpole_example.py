"""The CartPole example under the real launcher: a few steps on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gear_support import ROOT
from process_support import environment, launch
from warm_python import run_warm

from deepspeed_gear import Dataset

EXAMPLES = ROOT / "examples"
STEPS = 100


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "cartpole"
    done = run_warm(str(EXAMPLES / "cartpole_data.py"), str(path), env=environment())
    assert done.returncode == 0, done.stderr
    return path


def test_the_time_limit_is_no_failure(cartpole: Path) -> None:
    dataset = Dataset.open(cartpole)
    last = dataset.first_rows + dataset.lengths - 1
    assert len(dataset.lengths) == 57
    assert dataset.lengths.sum() == 26_964
    assert (dataset.columns["terminated"][last] == (dataset.lengths < 500)).all()
    assert (dataset.columns["truncated"][last] == (dataset.lengths == 500)).all()
    assert dataset.columns["terminated"].sum() == 42
    assert dataset.columns["truncated"].sum() == 15


def test_priorities_concentrate_on_two_ranks(cartpole: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="the example evaluates in CartPole-v1")
    config = str(ROOT / "configs" / "cartpole_dqn.json")
    options = ["--config", config, "--data", str(cartpole), "--steps", str(STEPS), "--out", str(tmp_path)]
    output = launch(EXAMPLES / "cartpole_dqn.py", 2, *options)
    lines = [line for line in output.splitlines() if line.startswith('{"return_before"')]
    assert len(lines) == 1, output
    result = json.loads(lines[0])
    assert (result["ranks"], result["steps"]) == (2, STEPS)
    # Uniform would be a share of 0.1 for the top tenth, and an effective sample size of all steps.
    assert result["top_tenth"] > 0.2
    assert result["effective"] < 0.85
    curves = json.loads((tmp_path / "result.json").read_text())["curves"]
    assert curves["top_tenth"][0][1] == pytest.approx(0.1, abs=1e-3)
    assert curves["loss"][-1][1] < curves["loss"][0][1]
    assert (tmp_path / "curves.png").stat().st_size > 0

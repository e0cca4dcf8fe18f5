"""The examples of every parallelism: a few steps each on real data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gear_support import ROOT, prefix, shared_files
from hopper_support import hopper_data
from process_support import run_ranks

STEPS = 12
EXAMPLES = {  # ranks, replicas
    "tensor": (2, 1),
    "pipeline": (2, 1),
    "sequence": (2, 1),
    "expert": (2, 2),
}
EXPECTED = {"loss_before", "loss_after", "ranks", "seconds", "steps", "replicas"}


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("mode", EXAMPLES)
def test_example_learns(mode: str, hopper: Path, tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / f"{mode}_parallel.json").read_text())
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    config["scheduler"]["params"]["warmup_num_steps"] = 2  # a few steps see no warm-up
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--config", str(tmp_path / "config.json"), "--data", str(hopper), "--steps", str(STEPS)]
    ranks, replicas = EXAMPLES[mode]
    output = "".join(run_ranks(ROOT / "examples" / f"{mode}_parallel.py", ranks, *options))
    (line,) = [line for line in output.splitlines() if line.startswith('{"loss_before"')]
    result = json.loads(line)
    assert set(result) >= EXPECTED
    assert (result["ranks"], result["replicas"], result["steps"]) == (ranks, replicas, STEPS)
    assert result["loss_after"] < 0.8 * result["loss_before"]
    assert shared_files(prefix()) == []


def test_examples_are_short() -> None:
    for mode in EXAMPLES:
        assert len((ROOT / "examples" / f"{mode}_parallel.py").read_text().splitlines()) <= 150

"""The examples of every parallelism under the real launcher: a few steps each on real data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gear_support import ROOT, prefix, shared_files
from process_support import environment, launch

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
    path = tmp_path_factory.mktemp("data") / "hopper"
    source = ROOT / "examples" / "data" / "hopper_expert.hdf5"
    gear = Path(sys.executable).parent / "gear"
    subprocess.run([gear, "ingest", source, path], env=environment(), check=True, capture_output=True)
    return path


def config_of(mode: str, folder: Path) -> Path:
    """Copy an example's config with a prefix of this test's own; a few steps see no warm-up."""
    config = json.loads((ROOT / "configs" / f"{mode}_parallel.json").read_text())
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    config["scheduler"]["params"]["warmup_num_steps"] = 2
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def result_of(mode: str, ranks: int, hopper: Path, folder: Path) -> dict[str, Any]:
    options = ["--config", str(config_of(mode, folder)), "--data", str(hopper), "--steps", str(STEPS)]
    output = launch(ROOT / "examples" / f"{mode}_parallel.py", ranks, *options)
    lines = [line for line in output.splitlines() if line.startswith('{"loss_before"')]
    assert len(lines) == 1, output
    return dict(json.loads(lines[0]))


@pytest.mark.parametrize("mode", EXAMPLES)
def test_example_learns(mode: str, hopper: Path, tmp_path: Path) -> None:
    ranks, replicas = EXAMPLES[mode]
    result = result_of(mode, ranks, hopper, tmp_path)
    assert set(result) >= EXPECTED
    assert (result["ranks"], result["replicas"], result["steps"]) == (ranks, replicas, STEPS)
    assert result["loss_after"] < 0.8 * result["loss_before"]
    assert shared_files(prefix()) == []


def test_examples_are_short() -> None:
    for mode in EXAMPLES:
        assert len((ROOT / "examples" / f"{mode}_parallel.py").read_text().splitlines()) <= 150

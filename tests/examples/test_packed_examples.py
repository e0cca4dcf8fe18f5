"""Short forms of the examples of packed batches, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gear_support import ROOT, prefix, shared_files
from process_support import run_ranks


def result_of(program: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """Run an example's ranks; the last line of the first one is the result."""
    output = run_ranks(ROOT / "examples" / program, ranks, *arguments)[0]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def test_grpo_trains_whole_groups_on_two_ranks(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / "grpo.json").read_text())
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    config["gear"]["rollout"]["groups"] = 16  # so few right answers as here make few groups that teach
    (tmp_path / "grpo.json").write_text(json.dumps(config))
    options = ["--iterations", "2", "--evaluate-every", "2", "--out", str(tmp_path), "--seed", "3"]
    options += ["--config", str(tmp_path / "grpo.json"), "--warm-accuracy", "0.005"]
    found = result_of("grpo.py", 2, *options)
    assert (found["ranks"], found["iterations"], found["seed"]) == (2, 2, 3)
    assert found["fill"] > 0.9
    assert len(json.loads((tmp_path / "result.json").read_text())["curve"]) == 2
    assert shared_files(prefix()) == []


def test_packed_and_padded_episodes_train_the_same_model() -> None:
    found = result_of("packed_sequences.py", 1, "--steps", "3")
    assert found["packed"]["losses"] == pytest.approx(found["padded"]["losses"], rel=1e-5)
    assert found["packed"]["losses"][-1] < found["packed"]["losses"][0]
    assert found["padded"]["fill"] < 0.5 < 0.9 < found["packed"]["fill"]

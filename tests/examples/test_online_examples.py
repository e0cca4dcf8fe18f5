"""Short forms of the examples that learn while actors write, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from gear_support import ROOT, prefix, shared_files, wait_until
from process_support import environment, run_ranks
from warm_python import PIPE, WarmProcess

pytest.importorskip("gymnasium", reason="the examples act in its environments")
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "configs"

LONG = pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")


def own(config: str, folder: Path) -> str:
    """Copy a config so that its stores have this test's prefix."""
    section = json.loads((CONFIGS / config).read_text())
    section["gear"]["shared_memory"] = {"prefix": prefix()}
    path = folder / config
    path.write_text(json.dumps(section))
    return str(path)


def started(program: str, *arguments: str) -> WarmProcess:
    return WarmProcess([str(EXAMPLES / program), *arguments], environment(), PIPE, PIPE, cwd=ROOT)


def result_of(program: str, *arguments: str) -> dict[str, Any]:
    """Run an example; its last line is its result."""
    with started(program, *arguments) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert shared_files(prefix()) == []
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def test_online(tmp_path: Path) -> None:
    options = ["--steps", "30", "--evaluate-every", "15", "--out", str(tmp_path), "--seed", "3"]
    options += ["--config", own("online.json", tmp_path)]
    result = json.loads(run_ranks(EXAMPLES / "online.py", 2, *options)[0].splitlines()[-1])
    assert shared_files(prefix()) == []
    assert set(result) >= {"return_before", "return_after", "seconds", "seed", "env_steps", "batches"}
    assert (result["ranks"], result["actors"], result["batches"], result["seed"]) == (2, 2, 30, 3)
    assert result["env_steps"] >= 2000  # what the table's rate asks for before the first batch
    curve = json.loads((tmp_path / "result.json").read_text())["curves"]["return"]
    assert len(curve) == 3


@LONG
def test_ppo(tmp_path: Path) -> None:
    result = result_of("ppo.py", "--config", own("ppo.json", tmp_path), "--updates", "2")
    assert (result["ranks"], result["updates"], result["env_steps"]) == (2, 2, 2048)
    assert result["return_after"] > 0


@LONG
def test_td3() -> None:
    result = result_of("td3.py", "--steps", "450", "--random-steps", "410")
    for buffer in ("plain", "gear"):
        assert set(result[buffer]) == {"return", "steps_per_s", "buffer_us_per_step"}
        assert -2000 < result[buffer]["return"] < 0


def test_ranks_and_actors_end_with_the_launcher(tmp_path: Path) -> None:
    """However early SIGTERM comes; the reapers remove what killed processes leave."""
    config = own("online.json", tmp_path)
    with started("online.py", "--config", config, "--steps", "100000") as process:
        wait_until(lambda: len(shared_files(prefix())) == 2, "a store and a board", 180)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode != 0
    wait_until(lambda: shared_files(prefix()) == [], "the end of all")

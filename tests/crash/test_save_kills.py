"""Processes are killed while they save over a checkpoint and load it; GEAR_LONG_TESTS=1 kills 600 times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from process_support import environment
from warm_python import run_warm

PROGRAM = Path(__file__).parent / "programs" / "save_kills.py"
LONG = os.environ.get("GEAR_LONG_TESTS") == "1"


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize(("what", "kills"), [("replay", 400 if LONG else 6), ("engine", 200 if LONG else 3)])
def test_no_kill_loses_a_checkpoint(what: str, kills: int, tmp_path: Path) -> None:
    command = [str(PROGRAM), what, "--folder", str(tmp_path), "--kills", str(kills)]
    done = run_warm(*command, env=environment(), timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == kills
    assert found["lost"] == 0
    assert found.get("loaded", 1) > 0

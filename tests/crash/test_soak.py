"""Memory, file descriptors and /dev/shm of a run that goes on; the long form is a command of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from process_support import environment
from warm_python import run_warm

PROGRAM = Path(__file__).parent / "programs" / "soak.py"
SECONDS = 120.0 if os.environ.get("GEAR_LONG_TESTS") else 8.0


def test_random_kills_while_saves_are_loaded() -> None:
    """The long form is a command of CONTRIBUTING.md."""
    program = PROGRAM.with_name("soak_kills.py")
    minutes = "2" if os.environ.get("GEAR_LONG_TESTS") else "0.1"
    command = [str(program), "--minutes", minutes, "--seed", "7"]
    found = run_warm(*command, env=environment(), timeout_s=280)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["failures"] == result["left_in_shm"] == []
    assert sum(result["kills"].values()) > 0


def test_a_run_that_goes_on_does_not_grow() -> None:
    mark = str(os.getpid())
    command = [str(PROGRAM), "--seconds", str(SECONDS)]
    found = run_warm(*command, env=environment(GEAR_SOAK=mark), timeout_s=280)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["wrong"] == 0
    assert result["grown"] == result["left"] == []
    assert result["added"] > 1_000, "every extent is used again and again"

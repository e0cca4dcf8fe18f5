"""Readers and writers at full speed on a small store; the long form is a command of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from process_support import environment
from warm_python import run_warm

PROGRAM = Path(__file__).parent / "programs" / "torn.py"
LONG_CASES = [("fifo", False)] if os.environ.get("GEAR_LONG_TESTS") else []
SECONDS = 60.0 if os.environ.get("GEAR_LONG_TESTS") else 4.0


def test_stopped_writers_end_nothing() -> None:
    mark, stops = str(os.getpid()), 100 if os.environ.get("GEAR_LONG_TESTS") else 4
    seconds = stops * 2.6  # 1 s of work and up to 3 s of standing still, 1.5 s in the mean
    command = [str(PROGRAM), "--seconds", str(seconds), "--stop", str(stops)]
    env = environment(GEAR_TORN=mark, GEAR_TORN_TIMEOUT="6")
    found = run_warm(*command, env=env, timeout_s=600)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["wrong"] == result["lost_rows"] == result["used_slots"] == 0
    assert result["stops"] > stops // 2
    assert result["writers"] == 4, "no writer has ended"


@pytest.mark.parametrize(("remove", "kill"), [("fifo", True), ("uniform", True), *LONG_CASES])
def test_no_batch_is_torn(remove: str, kill: bool) -> None:
    mark = str(os.getpid())
    command = [str(PROGRAM), "--seconds", str(SECONDS), "--least-added", "1200"]
    command += ["--kill"] if kill else []
    env = environment(GEAR_TORN=mark, GEAR_TORN_REMOVE=remove)
    found = run_warm(*command, env=env, timeout_s=280)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["wrong"] == result["lost_rows"] == result["used_slots"] == 0
    assert result["samples"] > 10_000
    assert result["added"] > 1_000, "every extent is used again and again"
    assert not kill or result["writers"] > 8
    assert not list(Path("/dev/shm").glob(f"geartorn{mark}*"))

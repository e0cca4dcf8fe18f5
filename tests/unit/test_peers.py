"""The comparison of speed: what is timed is checked, and this project's part runs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(checkout / "benchmarks"))
    return importlib.import_module("speed.work")


def test_this_project_is_timed(run_python: Any, checkout: Path) -> None:
    command = [str(checkout / "benchmarks" / "speed" / "run.py"), "--quick", "--only", "windows of 20"]
    environment = {"PYTHONPATH": os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])}
    done = run_python(*command, "gear", "limit", "numpy_ring", env=environment)
    rows = [line for line in done.stdout.splitlines() if "windows of 20" in line]
    assert len(rows) == 3, done.stderr
    assert "left out" not in done.stderr


def test_rows_of_other_steps_are_found(work: ModuleType) -> None:
    rows = {name: values[100:356] for name, values in work.steps(0, 1000).items()}
    work.check(rows, 256, 1, 1000)
    with pytest.raises(AssertionError, match="action of other steps"):
        work.check({**rows, "action": np.roll(rows["action"], 1, 0)}, 256, 1, 1000)
    with pytest.raises(AssertionError, match="never added"):
        work.check(rows, 256, 1, 200)
    windows = {name: values[:100].reshape(5, 20, -1) for name, values in rows.items()}
    work.check(windows, 5, 20, 1000)
    windows["reward"][2, 3] = 7
    with pytest.raises(AssertionError, match="do not follow"):
        work.check(windows, 5, 20, 1000)


def test_tables_have_a_column_for_each_system_that_was_timed(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = importlib.import_module("speed.table")
    rows = [
        {"work": "windows", "system": "gear", "us": 5.0},
        {"work": "windows", "system": "torchrl", "us": 1234.5},
        {"work": "windows", "system": "cpprb", "left out": "not offered"},
        {"work": "windows", "system": "reverb", "left out": "took over 240 s"},
    ]
    systems = {"gear": "1", "torchrl": "2", "cpprb": "3", "reverb": "4"}
    machine = {"cpu": "a CPU", "cores": 2}
    text = table.tables({"rows": rows, "machine": machine, "commit": "c", "command": "x", "systems": systems})
    assert "|  | deepspeed_gear | TorchRL |" in text
    assert "| windows | 5 | 1,234 |" in text
    assert "- Reverb, windows: took over 240 s" in text

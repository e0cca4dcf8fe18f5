"""Fixtures of the tests that start DeepSpeed's launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import lengths_of, write_dataset
from process_support import launch


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 40 trajectories of 1 to 29 steps."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3})


@pytest.fixture(scope="session")
def deepspeed_run() -> Callable[..., str]:
    """Run a program of `programs/` under the launcher with a task as JSON; return its output."""

    def run(program: str, count: int, task: dict[str, Any], timeout_s: float = 240.0) -> str:
        return launch(program, count, json.dumps(task), timeout_s=timeout_s)

    return run

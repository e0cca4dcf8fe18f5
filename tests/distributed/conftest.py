"""Fixtures of the tests that start DeepSpeed's launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import lengths_of, write_dataset
from process_support import launch, run_ranks


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 40 trajectories of 1 to 29 steps."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3})


@pytest.fixture(scope="session")
def ranks_run() -> Callable[..., str]:
    """Run a program of `programs/` with a task as JSON; return its output.

    With GEAR_LONG_TESTS=1 under DeepSpeed's launcher, which imports DeepSpeed twice before the first rank
    starts, and whose ranks import it for themselves. To a program it gives the same environment.
    """

    def run(program: str, count: int, task: dict[str, Any], timeout_s: float = 240.0) -> str:
        if os.environ.get("GEAR_LONG_TESTS") == "1":
            return launch(program, count, json.dumps(task), timeout_s=timeout_s)
        return "".join(run_ranks(program, count, json.dumps(task), timeout_s=timeout_s))

    return run

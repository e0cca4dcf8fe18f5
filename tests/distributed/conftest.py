"""Fixtures of the tests that start DeepSpeed's launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import SHM, lengths_of, write_dataset
from process_support import environment, launcher


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 40 trajectories of 1 to 29 steps."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3})


@pytest.fixture(scope="session")
def launched() -> Callable[..., str]:
    """Run a program under DeepSpeed's launcher; return its output.

    It must succeed. Buffers in /dev/shm that DeepSpeed itself leaves for this run's port are removed.
    """

    def run(program: Path | str, count: int, *arguments: str, timeout_s: float = 240.0) -> str:
        command = launcher(program, count, *arguments)
        port = command[command.index("--master_port") + 1]
        process = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{program} did not end within {timeout_s} s:\n{output}")
        finally:
            for left in SHM.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)
        assert process.returncode == 0, output
        return output

    return run


@pytest.fixture(scope="session")
def deepspeed_run(launched: Callable[..., str]) -> Callable[..., str]:
    """Run a program of `programs/` under the launcher with a task as JSON; return its output."""

    def run(program: str, count: int, task: dict[str, Any], timeout_s: float = 240.0) -> str:
        return launched(program, count, json.dumps(task), timeout_s=timeout_s)

    return run

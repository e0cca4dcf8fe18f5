"""examples/ddp_prioritized.py under torchrun: four DDP workers and one prioritized buffer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from process_support import environment, free_port

pytest.importorskip("gymnasium", reason="the example plays CartPole")
PROGRAM, WORKERS = Path(__file__).parent / "programs" / "ddp_example.py", 4


def torchrun(*command: str) -> str:
    """Run a program on four workers; return what it printed. It must succeed."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(WORKERS),
        "--master_port",
        str(free_port()),
    ]
    done = subprocess.run(
        [sys.executable, *launcher, *command], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example(checkout: Path) -> None:
    output = torchrun(str(checkout / "examples" / "ddp_prioritized.py"), "--steps", "24")
    result = json.loads(output.splitlines()[-1])
    assert result["workers"] == WORKERS
    assert result["added"] == 6
    assert result["trajectories"] == 6 * WORKERS
    assert result["return"] >= 1


def test_what_it_promises(checkout: Path) -> None:
    torchrun(str(PROGRAM), str(checkout / "examples" / "ddp_prioritized.py"), "24")

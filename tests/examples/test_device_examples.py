"""Short forms of the examples whose replay lies on a device, here the host's, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from gear_support import ROOT
from process_support import environment

pytest.importorskip("gymnasium", reason="the examples act in its environments")
SHORT = ("--device", "cpu", "--steps", "240", "--random-steps", "205", "--envs", "2", "--seed", "3")


def started(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / program), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(
    ("program", "buffer"), [("td3_device.py", "prioritized"), ("sac_device.py", "uniform")]
)
def test_it_acts_and_learns(program: str, buffer: str) -> None:
    run = started(program, *SHORT, "--buffer", buffer)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert -2000 < result.pop("return") < 0  # of one episode in each environment
    assert result.pop("steps_per_s") > 0
    flags = {"compile": False, "cudagraphs": False}
    assert result == {"device": "cpu", **flags, "buffer": buffer, "seed": 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_graphs_without_a_gpu_are_refused() -> None:
    run = started("td3_device.py", "--cudagraphs")
    assert run.returncode == 2
    assert "--cudagraphs needs a CUDA device" in run.stderr

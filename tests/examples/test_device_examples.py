"""Short forms of the examples whose replay lies on a device, here the host's, as a user starts them."""

from __future__ import annotations

import json
import math
import os
import subprocess
from typing import Any

import pytest
import torch
from gear_support import ROOT
from process_support import environment
from warm_python import run_warm

pytest.importorskip("gymnasium", reason="the examples act in its environments")
LONG = pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")
SHORT = ("--device", "cpu", "--steps", "240", "--random-steps", "205", "--envs", "2", "--seed", "3")


def started(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_warm(str(ROOT / "examples" / program), *arguments, env=environment(), cwd=ROOT)


@pytest.mark.parametrize(
    ("program", "options"),
    [("td3", ()), pytest.param("dqn", ("--compile",), marks=LONG)],
    ids=["td3", "dqn compiled"],
)
def test_it_acts_and_learns(program: str, options: tuple[str, ...]) -> None:
    """tests/unit/test_device_examples.py compares compiled and plain steps of all, without inductor."""
    buffer = "prioritized" if program == "td3" else "uniform"
    run = started(f"{program}_device.py", *SHORT, "--buffer", buffer, *options)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    low, high = (0, 501) if program == "dqn" else (-2000, 0)
    assert low < result.pop("return") < high  # of one episode in each environment at least
    assert low < result.pop("test") < high
    assert math.isfinite(result.pop("loss"))
    assert result.pop("turns_per_s") > 0
    flags = {"compile": "--compile" in options, "cudagraphs": False, "buffer": buffer}
    sizes = {"steps": 240, "random_steps": 205, "envs": 2, "held": 2 * 239}
    assert result == {"device": "cpu", "seed": 3, **flags, **sizes}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_graphs_without_a_gpu_are_refused() -> None:
    run = started("ppo_device.py", "--cudagraphs")
    assert run.returncode == 2
    assert "--cudagraphs needs a CUDA device" in run.stderr

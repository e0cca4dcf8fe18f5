"""Examples as processes of their own, and the results that they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from support import ROOT
from gpu_clock import Row

LEARNING, ROLLOUTS = ("--steps", "4000", "--random-steps", "500"), ("--steps", "6400")
PROGRAMS = {"td3": LEARNING, "sac": LEARNING, "dqn": LEARNING, "c51": LEARNING, "ppo": ROLLOUTS}
SMOKE = {"td3": ("--steps", "290", "--random-steps", "205")}
FLAGS = ((), ("--compile",), ("--cudagraphs",), ("--compile", "--cudagraphs"))


def missing(*packages: str) -> list[str]:
    """Return which packages are not installed."""
    return [name for name in packages if find_spec(name) is None]


def result_of(
    program: str,
    *arguments: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Run an example; return its last line, which is its result as JSON.

    Args:
        program: Its file in examples/.
        arguments: Its own.
        cwd: Where it runs.
        env: Laid over this process's environment.
        timeout_s: When it is killed.
    Raises:
        RuntimeError: It failed.
        subprocess.TimeoutExpired: It took too long.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{program} ended with {run.returncode}:\n{run.stderr[-4000:]}")
    return dict(json.loads(run.stdout.splitlines()[-1]))


def turns(device: torch.device, is_smoke: bool) -> Iterator[Row]:
    """Turns per second of the examples whose table lies on the device, compiled, captured, both and neither.

    On the CPU nothing is captured; the smoke form runs one example, and compiles nothing.
    """
    figure, absent = "example", missing("gymnasium")
    for name, options in (SMOKE if is_smoke else PROGRAMS).items():
        program = f"{name}_device.py"
        for flags in FLAGS[::2] if is_smoke else FLAGS:
            case = " ".join((program, *flags)) + f", {options[1]} turns"
            if absent:
                yield Row(figure, f"{case}: left out, not installed: {', '.join(absent)}", "", None)
            elif device.type == "cuda" or "--cudagraphs" not in flags:
                result = result_of(program, "--device", str(device), *options, *flags)
                known = ("turns_per_s", "return", "compile", "cudagraphs")
                more = {"program": program, **{name: result[name] for name in known}}
                yield Row(figure, case, "a turn", 1e6 / result["turns_per_s"], more=more)

"""The Hopper job as a process of its own: its return, and the part of its time that goes to waiting."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support import ROOT
from gpu_clock import Row
from gpu_programs import missing, result_of

from deepspeed_gear.data.ingest import ingest

CONFIGS = {"host": "hopper.json", "device": "hopper_device.json"}  # by the placement of their table
NEEDED = ("gymnasium", "mujoco", "matplotlib", "tensorboard")
STEPS, SMOKE_STEPS = 1000, 12
MOST_SHARE = 0.02  # of the loop's time, in gear_sample()


def prepare(folder: Path) -> None:
    """Put the data where the configs look for them."""
    (folder / "data").mkdir(parents=True)
    ingest([ROOT / "examples" / "data" / "hopper_expert.hdf5"], folder / "data" / "hopper")


def run_job(
    placement: str, device: torch.device, folder: Path, *arguments: str, timeout_s: float = 600.0
) -> dict[str, Any]:
    """Run the example on one rank with the config that the repository has; return its result.

    Args:
        placement: "host" or "device".
        device: Of the engine and of the batches.
        folder: As `prepare` has left it; gets `runs`.
        arguments: Of the example.
        timeout_s: When it is killed.
    Raises:
        RuntimeError: It failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(device.index or 0)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": device.type}
    given = "--config", str(ROOT / "configs" / CONFIGS[placement]), *arguments
    return result_of("hopper.py", *given, cwd=folder, env=place, timeout_s=timeout_s)


def waits(device: torch.device, is_smoke: bool) -> Iterator[Row]:
    """What the host waits in `gear_sample()` beside the training step of the Hopper job.

    The smoke form runs it in one placement.
    """
    steps, absent = SMOKE_STEPS if is_smoke else STEPS, missing(*NEEDED)
    with tempfile.TemporaryDirectory(prefix="gear-hopper-") as name:
        folder = Path(name)
        if not absent:
            prepare(folder)
        for placement in list(CONFIGS)[:1] if is_smoke else CONFIGS:
            case = f"table in the memory of the {placement}, {steps} steps"
            if absent:
                yield Row("hopper", f"{case}: left out, not installed: {', '.join(absent)}", "", None)
            else:
                count = str(steps)
                yield row_of(run_job(placement, device, folder, "--steps", count), case)


def row_of(result: dict[str, Any], case: str) -> Row:
    """Return the row of a result of the example."""
    more = {name: result[name] for name in ("sample_share", "return_before", "return_after")}
    step_us = result["sample_us"] / result["sample_share"]
    row = Row("hopper", case, "gear_sample()", result["sample_us"], "a step of the loop", step_us, more=more)
    row.judged, row.at_most = "sample_share", MOST_SHARE
    return row

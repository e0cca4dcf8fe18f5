"""What replay costs on one GPU, every figure against a ceiling that is measured in the same run.

    python benchmarks/gpu.py --json F                all figures; exit code 2 where torch sees no CUDA device
    python benchmarks/gpu.py --device cpu --smoke    the same code with tiny sizes; its numbers mean nothing

The GPU page says what the figures are. A figure that fails is a row with its error, and the exit code is 1; a
bound that is not met is only told.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import support  # noqa: F401  # puts the checkout first
import gpu_device_table
import gpu_hopper
import gpu_host_table
import gpu_programs
import gpu_replay
import torch
from support.report import Disturbance, document, print_table, write_json
from gpu_clock import Clock, Row

BLOCKS, BLOCK_S = 9, 0.05
Figure = Callable[[], Iterator[Row]]


def figures(clock: Clock, is_smoke: bool) -> dict[str, Figure]:
    """Return all figures by name."""
    device = gpu_device_table.SMOKE if is_smoke else gpu_device_table.Sizes()
    host = gpu_host_table.SMOKE if is_smoke else gpu_host_table.Sizes()
    return {
        "gather": lambda: gpu_device_table.gathers(clock, device),
        "draw, update": lambda: gpu_device_table.selection(clock, device),
        "sample and update": lambda: gpu_device_table.steps(clock, device),
        "host table": lambda: gpu_host_table.collections(clock, host),
        "replay from host memory": lambda: gpu_replay.replays(clock, host),
        "example": lambda: gpu_programs.turns(clock.device, is_smoke),
        "hopper": lambda: gpu_hopper.waits(clock.device, is_smoke),
    }


def measured(name: str, figure: Figure) -> Iterator[dict[str, Any]]:
    """Give the rows of a figure; where it fails, a row with the error behind those that it has given."""
    try:
        for row in figure():
            yield row.to_json()
    except Exception as error:
        traceback.print_exc()
        yield {"figure": name, "error": f"{type(error).__name__}: {error}"}


def card(device: torch.device) -> dict[str, Any]:
    """Describe the device as far as it decides the numbers."""
    more: dict[str, Any] = {"torch_cuda": torch.version.cuda}
    for package in ("torchrl", "tensordict"):
        try:
            more[package] = version(package)
        except PackageNotFoundError:
            more[package] = None
    if device.type != "cuda":
        return {"name": "cpu", **more}
    facts = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError) as error:
        driver = f"unknown: {error}"
    size = {"memory_bytes": facts.total_memory, "multiprocessors": facts.multi_processor_count}
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        **size,
        "driver": driver,
        **more,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print what was measured, and what is asked for."""
    columns = ("figure", "case", "what", "us", "gb_per_s", "ceiling_us", "fraction", "asked", "holds")
    good = [row for row in rows if "error" not in row]
    print_table(columns, [[row.get(column) for column in columns] for row in good])
    turns = [row for row in good if "steps_per_s" in row]
    if turns:
        print()
        columns = ("program", "compile", "cudagraphs", "steps_per_s", "return")
        print_table(columns, [[row[column] for column in columns] for row in turns])
    for row in rows:
        if "error" in row:
            print(f"{row['figure']}: {row['error']}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--device", default="cuda", help="a CUDA device, or cpu with --smoke")
    parser.add_argument(
        "--smoke", "--quick", action="store_true", dest="is_smoke", help="tiny sizes, to see that it runs"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu" and not options.is_smoke:
        parser.error("--device cpu needs --smoke: without a GPU there are no figures to take")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(
                f"gpu.py: error: torch {torch.__version__} sees no CUDA device, and these figures need one; "
                "--device cpu --smoke runs the code without them",
                file=sys.stderr,
            )
            sys.exit(2)
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    disturbance, rows = Disturbance(), list[dict[str, Any]]()
    clock = Clock(device, 2 if options.is_smoke else BLOCKS, 0.0 if options.is_smoke else BLOCK_S)
    for name, figure in figures(clock, options.is_smoke).items():
        for row in measured(name, figure):
            rows.append(row)
            if options.json is not None:  # what is there stays there, whatever comes
                extra = {"device": card(device), "smoke": options.is_smoke}
                write_json(options.json, document(disturbance, rows, **extra))
    print_rows(rows)
    sys.exit(1 if any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()

"""What the tests of stores and replays share: encoded trajectories, data sets and configs of them.

Every stored row says which trajectory and step it is, so a test sees from a batch alone whether it
holds the rows that it should.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.cli import add_options
from deepspeed_gear.schema import Column, Schema

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
STEP = 1000  # a row's code is trajectory * STEP + step
SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("action", "float32", (2,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
        Column("code", "int64"),
        Column("task", "int64", (), "other", "1"),
    ]
)


def trajectory(
    number: int, num_steps: int, terminated: bool = False, truncated: bool = False
) -> dict[str, Any]:
    """Make the trajectory of a number; its rows hold their codes."""
    codes = number * STEP + np.arange(num_steps + 1)
    ends = np.arange(num_steps) == num_steps - 1
    return {
        "observation": np.stack([codes, codes + 0.25, -codes], axis=1).astype(np.float32),
        "action": np.stack([codes[:-1], -codes[:-1]], axis=1).astype(np.float32),
        "reward": (np.arange(num_steps) % 7 + 1).astype(np.float32),
        "terminated": ends & terminated,
        "truncated": ends & truncated,
        "code": codes[:-1],
        "task": np.array(number, np.int64),
    }


def write_dataset(
    path: Path, lengths: Sequence[int], split: Mapping[str, float] | None = None
) -> Path:
    """Write a data set whose i-th trajectory is `trajectory(i, lengths[i])`."""
    from deepspeed_gear import DatasetWriter

    with DatasetWriter(path, SCHEMA, split=split or {}) as writer:
        for number, steps in enumerate(lengths):
            writer.add(
                trajectory(number, steps, terminated=number % 2 == 0, truncated=number % 2 == 1)
            )
    return path


def lengths_of(count: int, seed: int = 0, most: int = 30) -> list[int]:
    """Return some lengths, the first of them 1."""
    return [1, *np.random.default_rng(seed).integers(1, most, count - 1).tolist()]


def config_of(data: Path | None = None, /, **options: Any) -> dict[str, Any]:
    """Return a gear section: of a data set, or of a table with a capacity."""
    section: dict[str, Any] = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}}
    if data is not None:
        section["data"] = str(data)
    else:
        section["tables"] = {"main": {"capacity_steps": 2000, "capacity_trajectories": 60}}
    return {**section, **options}


def prefix() -> str:
    """Return a prefix of names in /dev/shm that no other test process uses."""
    return os.environ.get("GEAR_TEST_PREFIX", f"gtest{os.getpid()}")


def shared_files(prefix: str, folder: Path = SHM) -> list[str]:
    """List what lies in a node's /dev/shm under a prefix."""
    return sorted(path.name for path in folder.glob(f"{prefix}-*"))


def load_script(path: Path) -> ModuleType:
    """Import a program, or a module of a folder of scripts, which are no package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def run_command(command: Any, *arguments: str) -> int:
    """Run a subcommand of `gear`, by its module, in this process; its errors are raised."""
    parser = argparse.ArgumentParser()
    add_options(parser, command.OPTIONS)
    status: int = command.run(parser.parse_args(arguments))
    return status


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 280.0) -> None:
    """Wait for something that another process does, for nearly as long as a test may take."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.01)

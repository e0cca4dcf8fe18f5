"""Fixtures of the tests that start DeepSpeed's launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import lengths_of, write_dataset
from gradient_cases import CASES, EVERY, cases_of
from process_support import launch, run_ranks


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


@pytest.fixture(scope="session")
def ranks_run(deepspeed_run: Callable[..., str]) -> Callable[..., str]:
    """Run a program as `deepspeed_run` does, but without the launcher unless GEAR_LONG_TESTS=1.

    The launcher imports DeepSpeed twice, one after the other, before the first rank starts, and looks for the
    end of its ranks once a second. To a program it gives the same environment.
    """

    def run(program: str, count: int, task: dict[str, Any], timeout_s: float = 240.0) -> str:
        return "".join(run_ranks(program, count, json.dumps(task), timeout_s=timeout_s))

    return deepspeed_run if os.environ.get("GEAR_LONG_TESTS") == "1" else run


@pytest.fixture(scope="session")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function: what each rank of a world has found of packed gradients and of divisors.

    One launch for each number of ranks, where transformers is installed.
    """
    pytest.importorskip("transformers", reason="the model of packed gradients is transformers' Qwen2")
    known: dict[int, list[dict[str, Any]]] = {}

    def found(world: int) -> list[dict[str, Any]]:
        if world not in known:
            known[world] = []  # a launch that fails is not repeated
            out = tmp_path_factory.mktemp(f"gradients{world}")
            task = {"packed": cases_of(world, EVERY), "divisors": CASES[world], "out": str(out)}
            quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of each of DeepSpeed's collectives
            run_ranks("gradients.py", world, json.dumps(task), timeout_s=800.0, **quiet)
            known[world] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
        assert len(known[world]) == world, "the launch failed"
        return known[world]

    return found

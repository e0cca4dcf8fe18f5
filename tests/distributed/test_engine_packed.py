"""Packed batches under DeepSpeed's own launcher."""

from __future__ import annotations

from collections.abc import Callable

from gear_support import shared_files
from rollout_support import section


def test_packed_steps_of_an_engine(ranks_run: Callable[..., str]) -> None:
    """Weights, `global_samples`, skipped steps, steps out of order, settings that are refused or named."""
    gear = section(timeout_s=60.0)
    del gear["rollout"]
    ranks_run("engine_packed.py", 2, gear)
    assert shared_files(gear["shared_memory"]["prefix"]) == []

"""Measures the ways to a device on the table itself, and takes the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.collection.lane import Lane
from deepspeed_gear.ops.constants import R_ANCHOR, R_FIRST_ROW, R_MASS, R_NUM_STEPS, R_SLOT, RESOLUTION_WORDS
from deepspeed_gear.store.table import Table

ROUNDS = 5
MOST_STEPS = 1000  # of a trajectory that is made up
_MATMUL, _MATMULS = 4096, 32  # what keeps a device busy: 4 TFLOP, some milliseconds
Collect = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Figures:
    """Seconds of a batch by one way, from its call to the end of its work; the best of some.

    Args:
        idle_s: With nothing else to do.
        busy_s: Beside matrix products on the device; the same as idle on the CPU.
    """

    idle_s: float
    busy_s: float


def made_up_records(table: Table, count: int, num_rows: int, num_slots: int) -> torch.Tensor:
    """Return resolutions that lie anywhere in a table's memory, whatever it holds now.

    Args:
        table: Where they lie.
        count: How many.
        num_rows: Rows of its shortest column of steps that is collected.
        num_slots: Of its shortest column of one row per trajectory.
    Returns:
        [count, 8], int64; none where there is no room for a step.
    """
    words = np.random.default_rng(0)
    final = int(table.spec.schema.has_final_row)
    steps = min(num_rows - final, MOST_STEPS)
    if steps < 1 or num_slots < 1:
        return torch.empty(0, RESOLUTION_WORDS, dtype=torch.int64)
    records = np.zeros((count, RESOLUTION_WORDS), np.int64)
    records[:, R_FIRST_ROW] = words.integers(0, num_rows - final - steps + 1, count)
    records[:, R_NUM_STEPS], records[:, R_MASS] = steps, 1
    records[:, R_ANCHOR] = words.integers(0, steps, count)
    records[:, R_SLOT] = words.integers(0, num_slots, count)
    return torch.from_numpy(records)


def measure(collect: Collect, records: torch.Tensor, lane: Lane) -> Figures:
    """Time one way.

    Args:
        collect: Collects a batch on the lane; has done so before.
        records: What of.
        lane: The lane.
    """

    def seconds(prepare: Callable[[], None]) -> float:
        taken = []
        for _ in range(ROUNDS):
            prepare()
            begin = time.perf_counter()
            collect(records)
            lane.record().synchronize()
            taken.append(time.perf_counter() - begin)
        return min(taken)

    idle = seconds(lambda: None)
    return Figures(idle, idle if lane.device.type == "cpu" else seconds(_keep_busy(lane.device)))


def _keep_busy(device: torch.device) -> Callable[[], None]:
    matrix = torch.zeros(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(matrix)

    def multiply() -> None:
        torch.cuda.synchronize(device)
        for _ in range(_MATMULS):
            torch.mm(matrix, matrix, out=out)

    return multiply


def fastest(figures: Mapping[str, Figures]) -> str:
    """Return the way that is fastest beside work of the device; of equal ones the first."""
    return min(figures, key=lambda way: figures[way].busy_s)

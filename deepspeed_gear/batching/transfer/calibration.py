"""Measures the ways to a device on the table itself, and takes the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.batching.transfer.cuda_streams import TransferStream
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.store.table import Table

ROUNDS = 5
MOST_SLOWED = 0.05  # of the time of what the device does beside a batch
MOST_STEPS = 1000  # of a trajectory that is made up
_MATMUL, _MATMULS = 4096, 32  # what keeps a device busy: 4 TFLOP, some milliseconds
Gather = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class TransferTimings:
    """Seconds of a batch by one way, from its call to the end of its work; the best of some.

    Args:
        idle_s: With nothing else to do.
        busy_s: Beside matrix products on the device; the same as idle on the CPU.
        slowed: How much longer the products take beside a batch, of their own time; 0 on the CPU.
    """

    idle_s: float
    busy_s: float
    slowed: float = 0.0


def made_up_records(table: Table, count: int, num_rows: int, num_slots: int) -> torch.Tensor:
    """Return resolutions that lie anywhere in a table's memory, whatever it holds now.

    Args:
        table: Where they lie.
        count: How many.
        num_rows: Rows of its shortest column of steps that is gathered.
        num_slots: Of its shortest column of one row per trajectory.
    Returns:
        [count, 8], int64; none where there is no room for a step.
    """
    words = np.random.default_rng(0)
    final = int(table.spec.schema.has_final_row)
    steps = min(num_rows - final, MOST_STEPS)
    if steps < 1 or num_slots < 1:
        return torch.empty(0, Resolution.NUM_WORDS, dtype=torch.int64)
    records = np.zeros((count, Resolution.NUM_WORDS), np.int64)
    records[:, Resolution.FIRST_ROW] = words.integers(0, num_rows - final - steps + 1, count)
    records[:, Resolution.NUM_STEPS], records[:, Resolution.MASS] = steps, 1
    records[:, Resolution.ANCHOR] = words.integers(0, steps, count)
    records[:, Resolution.SLOT] = words.integers(0, num_slots, count)
    return torch.from_numpy(records)


def measure(gather: Gather, records: torch.Tensor, lane: TransferStream) -> TransferTimings:
    """Time one way.

    Args:
        gather: Gathers a batch on the lane; has done so before.
        records: What of.
        lane: The lane.
    """

    def seconds() -> float:
        begin = time.perf_counter()
        gather(records)
        lane.record().synchronize()
        return time.perf_counter() - begin

    idle = min(seconds() for _ in range(ROUNDS))
    if lane.device.type == "cpu":
        return TransferTimings(idle, idle)
    products = _Products(lane.device)
    alone = min(products.begin().seconds() for _ in range(ROUNDS))
    busy, beside = [], []
    for _ in range(ROUNDS):
        products.begin()
        busy.append(seconds())
        beside.append(products.seconds())
    return TransferTimings(idle, min(busy), min(beside) / alone - 1)


class _Products:
    """Matrix products that keep a device busy, as a training step does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix = torch.zeros(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=device)
        self._out = torch.empty_like(self._matrix)
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.begin().seconds()  # loads kernels

    def begin(self) -> _Products:
        """Give the products to the current stream of an idle device."""
        torch.cuda.synchronize(self._device)
        self._first.record()
        for _ in range(_MATMULS):
            torch.mm(self._matrix, self._matrix, out=self._out)
        self._last.record()
        return self

    def seconds(self) -> float:
        """Wait for the products; return how long they took."""
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) * 1e-3


def fastest(figures: Mapping[str, TransferTimings]) -> str:
    """Return the way that is fastest beside work of the device and hardly slows it; of equal ones the first.

    Where all of them slow it more than `MOST_SLOWED`, the one that does so least.
    """
    gentle = [way for way, of_way in figures.items() if of_way.slowed <= MOST_SLOWED]
    if not gentle:
        return min(figures, key=lambda way: figures[way].slowed)
    return min(gentle, key=lambda way: figures[way].busy_s)

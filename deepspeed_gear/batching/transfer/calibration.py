"""Calibration: measures the transfer methods on the table itself, and chooses the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.batching.transfer.cuda_streams import HostStream
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.store.table import Table

ROUNDS = 5
MOST_SLOWED = 0.05  # of the time of the device's concurrent work
MOST_STEPS = 1000  # of a synthetic trajectory
_MATMUL, _MATMULS = 4096, 32  # concurrent work: 4 TFLOP, some milliseconds
Gather = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class TransferTimings:
    """Seconds of a batch by one transfer method, from its call to the end of its work; best of several."""

    idle_s: float  # on an idle device
    busy_s: float  # during matrix products on the device; the same as idle on the CPU
    slowed: float = 0.0  # relative slowdown of the products during a batch; 0 on the CPU


def made_up_records(table: Table, count: int, num_rows: int, num_slots: int) -> torch.Tensor:
    """Return random resolutions within rows and slots of a table, [count, 8]; none if no step fits."""
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


def measure(gather: Gather, records: torch.Tensor, lane: HostStream) -> TransferTimings:
    """Measure one transfer method, by which `gather` has gathered a batch on the transfer stream before."""

    def seconds() -> float:
        begin = time.perf_counter()
        gather(records)
        lane.record().synchronize()
        return time.perf_counter() - begin

    idle = min(seconds() for _ in range(ROUNDS))
    if lane.device.type == "cpu":
        return TransferTimings(idle, idle)
    # Matrix products that keep the device busy, as a training step does.
    matrix = torch.zeros(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=lane.device)
    out = torch.empty_like(matrix)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin() -> None:
        """Enqueue the products on their device's current CUDA stream; the device is idle before."""
        torch.cuda.synchronize(lane.device)
        stream = torch.cuda.current_stream(lane.device)  # an event's default is that of the current device
        first.record(stream)
        for _ in range(_MATMULS):
            torch.mm(matrix, matrix, out=out)
        last.record(stream)

    def products_s() -> float:
        """Wait for the products; return their duration."""
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    alone, busy, beside = [], [], []
    for _ in range(1 + ROUNDS):  # the first time loads kernels
        begin()
        alone.append(products_s())
    for _ in range(ROUNDS):
        begin()
        busy.append(seconds())
        beside.append(products_s())
    return TransferTimings(idle, min(busy), min(beside) / min(alone[1:]) - 1)


def fastest(figures: Mapping[str, TransferTimings]) -> str:
    """Return the fastest method that slows a busy device by at most `MOST_SLOWED`, else the gentlest."""
    gentle = [way for way, of_way in figures.items() if of_way.slowed <= MOST_SLOWED]
    if not gentle:
        return min(figures, key=lambda way: figures[way].slowed)
    return min(gentle, key=lambda way: figures[way].busy_s)

"""Figures of a Replay with its table in host memory: the way it has chosen, and a training step beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_clock import Clock, Row, Run, median_us, rows_against
from gpu_host_table import Sizes, available_bytes
from torch import Tensor

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.batching.transfer.device_gather import DeviceGatherer

FIGURE, BESIDE = "replay from host memory", "training step beside replay"
PINNED_COPY, ALONE = "copy of as many pinned bytes", "the step alone"
MOST_SAMPLES = 1 << 16  # of a batch
STEPS = 20  # of a block


def replays(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Tables of every size, rows of every size: the chosen way against one copy of pinned memory."""
    for num_bytes in sizes.tables:
        free = min(available_bytes(), shared_bytes())
        if num_bytes * 1.2 > free:
            why = f"left out, {free} bytes are free in /dev/shm and in memory"
            yield Row(FIGURE, f"table of {num_bytes >> 20} MiB: {why}", "", None)
            continue
        for row_bytes in sizes.rows:
            case = f"table of {num_bytes >> 20} MiB, rows of {row_bytes} B"
            samples = min(MOST_SAMPLES, max(1, sizes.batch_bytes // row_bytes))
            with full_replay(num_bytes, row_bytes, samples, clock.device, sizes.slice_bytes) as replay:
                yield _chosen(clock, replay, f"{case}, B={samples}")
                if row_bytes in sizes.rows[-2:]:
                    yield _beside(clock, sizes, replay, f"{case}, B={samples}")


def shared_bytes() -> int:
    """Return what is free in /dev/shm."""
    status = os.statvfs(Path("/dev/shm"))
    return status.f_bavail * status.f_frsize


def full_replay(
    num_bytes: int, row_bytes: int, samples: int, device: torch.device, part_bytes: int
) -> Replay:
    """Return a replay that draws single rows; each row says which it is.

    On the CPU a way is named, as there is none to choose.

    Args:
        num_bytes: Of the table.
        row_bytes: Of a row.
        samples: Of a batch.
        device: Where batches go.
        part_bytes: Of what is added at a time.
    """
    elements, steps = row_bytes // 8, min(num_bytes, part_bytes) // row_bytes
    trajectories = num_bytes // (steps * row_bytes)
    table = {"capacity_steps": trajectories * steps, "capacity_trajectories": trajectories}
    section: dict[str, Any] = {"seed": 0, "tables": {"main": table}, "fields": {"row": {}}, "prefetch": 2}
    section |= {"sampler": {"kind": "uniform", "unit": "step"}, "batch_size": samples}
    if device.type == "cpu":
        section["transfer"] = {"way": "direct"}
    schema = Schema([Column("row", "int64", (elements,))])
    replay = Replay(section, schemas={"main": schema}, device=device)
    content = np.zeros((steps, elements), np.int64)
    for number in range(trajectories):
        content[:, 0] = np.arange(number * steps, (number + 1) * steps)
        replay.add({"row": content})
    return replay


def _chosen(clock: Clock, replay: Replay, case: str) -> Row:
    """Gather by the way that the Replay has chosen, again and again, on its own stream."""
    told, batch = replay.statistics()["transfer"], replay.sample()
    rows_right = _is_right(replay, batch)
    records, gather = batch.host_records.clone(), _gather(replay)
    num_bytes = batch["row"].nbytes
    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=clock.is_cuda)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    runs = {
        "chosen": lambda: gather(records),
        PINNED_COPY: lambda: target.copy_(pinned, non_blocking=True),
    }
    row = rows_against(FIGURE, case, clock.compare(runs), PINNED_COPY, 1, num_bytes)["chosen"]
    row.what = f"Replay, {told['way']}"
    row.more = {"way": told["way"], "rows_right": rows_right}
    row.more |= {name: told[name] for name in ("seconds", "refused", "registered_bytes", "not_registered")}
    return row


def _gather(replay: Replay) -> Any:
    """Return what gathers the samples of records by the chosen way; this stream waits for them."""
    maker, stream = replay._parts.assembler, replay._parts.streams["main"]["train"]
    placing = maker._placing
    assert placing is not None, "batches go to no device, and no way is named"
    reach = placing.reach(stream.table)
    gatherer: DeviceGatherer = maker._placed(stream.table, placing.transfer(placing.way), reach, 2)

    def gather(records: Tensor) -> None:
        gatherer.gather(records)
        placing.lane.hand_over(placing.lane.record(), [])

    return gather


def _is_right(replay: Replay, batch: Any) -> bool:
    steps = replay.tables["main"].num_steps // len(replay)
    numbers = (batch.trajectory_id * steps + batch.anchor).cpu()
    return bool(torch.equal(batch["row"].reshape(len(numbers), -1)[:, 0].cpu(), numbers))


def training_step(clock: Clock, sizes: Sizes) -> Run:
    """Return a step of matrix products."""
    side, num_matmuls = sizes.matmul
    dtype = torch.bfloat16 if clock.is_cuda else torch.float32
    a, b, c = (torch.ones(side, side, dtype=dtype, device=clock.device) for _ in range(3))

    def step() -> None:
        for _ in range(num_matmuls):
            torch.mm(a, b, out=c)

    return step


def _beside(clock: Clock, sizes: Sizes, replay: Replay, case: str) -> Row:
    """A loop of training steps that take a batch each, prepared beside them, against the steps alone."""
    step = training_step(clock, sizes)

    def loop() -> None:
        replay.sample()
        step()

    count = STEPS if clock.is_cuda else 2
    times = clock.compare({"loop": loop, ALONE: step}, count)
    growth = float(np.median(times["loop"] / times[ALONE])) - 1
    what = f"Replay, {replay.statistics()['transfer']['way']}"
    fraction = float(np.median(times[ALONE] / times["loop"]))
    before, beside = median_us(times[ALONE]), median_us(times["loop"])
    row = Row(BESIDE, case, what, beside, ALONE, before, fraction, more={"growth": growth})
    row.judged, row.at_most = "growth", 0.05
    return row

"""Figures of memory of the host that kernels of the device read in place.

Launches are those of a Replay: its number of blocks, samples in the order of their rows. A kernel
over the whole device, a sequential read and a copy of pinned memory in one piece stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.report import Row
from gpu_clock import Clock, Run, ask, median_us, row_of, rows_against
from torch import Tensor

from deepspeed_gear.batching.transfer.device_gather import _DIRECT_BLOCKS
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Pad, Resolution, Source

KERNEL_READ = "sequential read of the mapped table by a kernel"
PINNED_COPY = "copy of as many bytes in one piece"
ZERO_COPY = "zero-copy"
WHOLE = "zero-copy, blocks of the whole device"
TABLES = ("small", "large")  # names of `Sizes.tables`
MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
NONE = torch.empty(0)


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Args:
        tables: Bytes.
        rows: Bytes of a row.
        batch_bytes: Of a batch that kernels gather.
        slice_bytes: Of a part of the table that is read at a time.
        matmul: Side of the matrices of the training step; matmuls of it.
    """

    tables: tuple[int, ...] = (1 << 30, 12 << 30)
    rows: tuple[int, ...] = (256, 4096, 65_536)
    batch_bytes: int = 64 << 20
    slice_bytes: int = 64 << 20
    matmul: tuple[int, int] = (8192, 16)


SMOKE = Sizes((1 << 20, 1 << 21), (256, 4096, 65_536), 1 << 17, 1 << 18, (64, 2))


class MappedTable:
    """Bytes in host memory that is pinned and mapped, and the same as a tensor of the device.

    It is registered, not from torch's pinned allocator, which rounds sizes up to powers of two.

    Attributes:
        host: [bytes], uint8.
        mapped: The same memory as the device sees it. [bytes], uint8.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.zeros(num_bytes, dtype=torch.uint8)
        self.mapped = self.host
        self._is_registered = False
        if device.type == "cuda":
            _check(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), num_bytes, MAPPED))
            self._is_registered = True
            self.mapped = torch.as_tensor(_Alias(self.host), device=device)
            if self.mapped.data_ptr() != self.host.data_ptr():
                raise RuntimeError(
                    "the device must see the registered table at its own address, not a copy"
                )

    def close(self) -> None:
        """Give the registration back; nothing may use the table any more."""
        if self._is_registered:
            torch.cuda.synchronize()
            self._is_registered = False
            _check(torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr()))

    def __enter__(self) -> MappedTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Alias:
    """Host memory as the device addresses it, which is the same address for what is registered."""

    def __init__(self, host: Tensor) -> None:
        self._keep = host
        facts = {"shape": tuple(host.shape), "typestr": "|u1", "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**facts, "data": (host.data_ptr(), False)}


def _check(error: Any) -> None:
    if int(error) != 0:
        raise RuntimeError(f"registering the table gave CUDA error {int(error)}")


@dataclass
class Ways:
    """Ways to gather a batch, and the rows that each gathers."""

    runs: dict[str, Run]
    out: dict[str, Tensor]
    numbers: dict[str, Tensor]  # of the rows, in host memory


def ways(table: MappedTable, row_bytes: int, clock: Clock, sizes: Sizes) -> Ways:
    """Return the ways to gather random rows of a table.

    Args:
        table: In host memory.
        row_bytes: Of a row.
        clock: Of the device.
        sizes: Of the batches.
    """
    device = clock.device
    is_cuda = clock.is_cuda
    ops = load_backend("cuda" if clock.is_cuda else "cpu")
    elements = row_bytes // 8
    random = np.random.default_rng(row_bytes)
    column = table.mapped.view(torch.int64).view(-1, elements)
    counts = {ZERO_COPY: max(1, sizes.batch_bytes // row_bytes)}
    counts |= {WHOLE: counts[ZERO_COPY]}
    numbers = {
        name: torch.from_numpy(random.integers(0, len(column), n)) for name, n in counts.items()
    }
    numbers[WHOLE] = numbers[ZERO_COPY]
    blocks = {ZERO_COPY: _DIRECT_BLOCKS if is_cuda else 1, WHOLE: 1}  # 1: as many as fit
    out = {
        name: torch.zeros(n, 1, elements, dtype=torch.int64, device=device)
        for name, n in counts.items()
    }
    counters = torch.zeros(3, dtype=torch.int64, device=device)
    none = NONE.to(device)
    spec = [Source.STEPS, 0, 1, 0, 0, Pad.VALUE, elements, -1, 0, 1]

    def kernel(name: str) -> Run:
        records = _records(numbers[name]).to(device)
        order = numbers[name].argsort().to(device)
        rest = counters, [column], [none], [none], records, None, spec, [0.0], blocks[name], order
        return lambda: ops.gather_([out[name]], [], *rest)

    runs = {ZERO_COPY: kernel(ZERO_COPY), WHOLE: kernel(WHOLE)}
    return Ways(runs, out, numbers)


def _records(rows: Tensor) -> Tensor:
    """Return resolutions of trajectories of one step, one for each row. [B, 8]."""
    records = torch.zeros(len(rows), 8, dtype=torch.int64)
    records[:, Resolution.FIRST_ROW] = rows
    records[:, Resolution.NUM_STEPS] = 1
    records[:, Resolution.MASS] = 1
    return records


def collections(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Tables of every size: rows by every way against what reads or copies the same memory in one
    piece.
    """
    for num_bytes in sizes.tables:
        free = available_bytes()
        if num_bytes * 1.2 > free:
            case = (
                f"table of {num_bytes} bytes: left out, {free} bytes of host memory are available"
            )
            yield row_of("host table", case, "", None)
            continue
        with MappedTable(num_bytes, clock.device) as table:
            words = table.host.view(torch.int64)
            for row_bytes in sizes.rows:
                words[:: row_bytes // 8] = torch.arange(
                    num_bytes // row_bytes
                )  # rows say which they are
                yield from _collections_of(clock, sizes, table, row_bytes)
            yield from _beside(clock, sizes, table)


def _collections_of(
    clock: Clock, sizes: Sizes, table: MappedTable, row_bytes: int
) -> Iterator[Row]:
    found = ways(table, row_bytes, clock, sizes)
    part = min(sizes.slice_bytes, len(table.host))
    buffer = torch.zeros(part // 8, dtype=torch.int64, device=clock.device)
    slices = [
        slice(at, at + part // 8)
        for at in range(0, len(table.host) // 8 - part // 8 + 1, part // 8)
    ]
    mapped = table.mapped.view(torch.int64)
    host = table.host.view(torch.int64)

    def read() -> None:
        for where in slices:
            torch.bitwise_not(
                mapped[where], out=buffer
            )  # an elementwise kernel; copy_ takes the engine

    def copy() -> None:
        for where in slices:
            buffer.copy_(host[where], non_blocking=True)

    times = clock.compare({**found.runs, "read": read, "copy": copy})
    of_all = {"read": len(slices) * part, "copy": len(slices) * part}
    num_bytes = {**of_all, **{name: found.out[name].numel() * 8 for name in found.runs}}
    speeds = {name: num_bytes[name] / median_us(seconds) / 1e3 for name, seconds in times.items()}
    case = f"table of {len(table.host) >> 20} MiB, rows of {row_bytes} B"
    for name in found.runs:
        scaled = {
            key: times[key] / num_bytes[key] * num_bytes[name] for key in (name, "read", "copy")
        }
        against = {name: scaled[name], KERNEL_READ: scaled["read"], PINNED_COPY: scaled["copy"]}
        row = rows_against("host table", case, against, KERNEL_READ, 1, num_bytes[name])[name]
        of_copy = float(np.median(scaled["copy"] / scaled[name]))
        rows_right = bool(torch.equal(found.out[name][:, 0, 0].cpu(), found.numbers[name]))
        row |= {"of_pinned_copy": of_copy, "rows_right": rows_right}
        row |= {"kernel_read_gb_per_s": speeds["read"], "pinned_copy_gb_per_s": speeds["copy"]}
        if name == ZERO_COPY:
            ask(row, "fraction", at_least=0.9 if row_bytes >= 4096 else 0.75)
        yield row


def _beside(clock: Clock, sizes: Sizes, table: MappedTable) -> Iterator[Row]:
    """What a training step takes longer while batches are gathered beside it, on a stream of their
    own.
    """
    side, num_matmuls = sizes.matmul
    dtype = torch.bfloat16 if clock.is_cuda else torch.float32
    a, b, c = (torch.ones(side, side, dtype=dtype, device=clock.device) for _ in range(3))

    def step() -> None:
        for _ in range(num_matmuls):
            torch.mm(a, b, out=c)

    alone = clock.compare({"step": step})["step"]
    for row_bytes in sizes.rows[-2:]:
        found = ways(table, row_bytes, clock, sizes)
        gather = found.runs[ZERO_COPY]
        own = median_us(clock.compare({ZERO_COPY: gather})[ZERO_COPY])
        count = max(1, math.ceil(1.5 * median_us(alone) / own))
        pairs = [
            (clock.seconds(step, 1), clock.beside(step, gather, count)) for _ in range(clock.blocks)
        ]
        before, beside = np.array(pairs).T
        growth = float(np.median(beside / before)) - 1
        case = (
            f"table of {len(table.host) >> 20} MiB, rows of {row_bytes} B, {num_matmuls} x {side}^3"
        )
        row = row_of(
            "training step beside",
            case,
            ZERO_COPY,
            median_us(beside),
            "the step alone",
            median_us(before),
            float(np.median(before / beside)),
        )
        yield ask({**row, "growth": growth}, "growth", at_most=0.05)


def available_bytes() -> int:
    """Return the host's memory that programs can still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))

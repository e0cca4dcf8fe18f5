"""Time on a device: CUDA events and graphs, or wall clock and plain calls on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np
import torch
from support.report import Row

Run = Callable[[], object]
WARM_UP = 3


def row_of(
    figure: str,
    case: str,
    what: str,
    us: float | None,
    ceiling: str = "",
    ceiling_us: float | None = None,
    fraction: float | None = None,
    num_bytes: int | None = None,
) -> Row:
    """Return one measurement.

    Args:
        figure: What is measured.
        case: Sizes.
        what: Who is measured: gear's op, or what stands beside it.
        us: Microseconds of one call; median over blocks. None: it was left out.
        ceiling: What the ceiling is.
        ceiling_us: Of as many bytes, in the same run; None: there is none.
        fraction: Of the ceiling's speed: median of the fractions of neighbouring blocks.
        num_bytes: That a call gives.
    """
    row: Row = {"figure": figure, "case": case, "what": what, "us": us, "fraction": fraction}
    if us is not None and num_bytes is not None:
        row["gb_per_s"] = num_bytes / us / 1e3
    row |= {"ceiling": ceiling, "ceiling_us": ceiling_us, "bytes": num_bytes}
    return row | dict.fromkeys(("asked", "judged", "holds"))


def ask(row: Row, name: str, at_least: float | None = None, at_most: float | None = None) -> Row:
    """Add a bound to a row, its number that has the bound, and whether it holds."""
    sign, bound = ("<=", at_most) if at_least is None else (">=", at_least)
    holds = bool(row[name] <= bound if sign == "<=" else row[name] >= bound)
    row.update(asked=f"{name} {sign} {bound}", judged=row[name], holds=holds)
    return row


def captured(function: Run) -> Run:
    """Return the replay of a CUDA graph of a function.

    It is called three times before, on a side stream.
    """
    stream = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Clock:
    """Times calls on a device.

    Args:
        device: Where they run.
        blocks: How often everything that is compared has its turn.
        block_s: What a block of calls takes about.
    """

    def __init__(self, device: torch.device, blocks: int, block_s: float) -> None:
        self.device = device
        self.blocks = blocks
        self.block_s = block_s
        self.is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def graph(self, function: Run) -> Run:
        """Return the function as a captured graph; on the CPU as it is."""
        return captured(function) if self.is_cuda else function

    def seconds(self, run: Run, count: int) -> float:
        """Return the mean time of `count` calls, one after the other."""
        if not self.is_cuda:
            begin_s = perf_counter()
            for _ in range(count):
                run()
            return (perf_counter() - begin_s) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    def compare(self, runs: Mapping[str, Run], count: int | None = None) -> dict[str, np.ndarray]:
        """Time several things in turn.

        Args:
            runs: By name.
            count: Calls of a block; None: as many as take about `block_s`.
        Returns:
            Seconds a call of each block, by name. [blocks].
        """
        counts = {}
        for name, run in runs.items():
            run()
            one = self.seconds(run, 1)
            counts[name] = count or int(min(1000, max(2, self.block_s / max(one, 1e-7))))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.blocks):
            for name, run in runs.items():
                times[name].append(self.seconds(run, counts[name]))
        return {name: np.array(values) for name, values in times.items()}

    def beside(self, step: Run, background: Run, num_background: int) -> float:
        """Return the time of a step while something else runs on a stream of its own.

        On the CPU, which has no streams, the other thing comes first.
        """
        self.wait()
        side = torch.cuda.Stream() if self.is_cuda else None
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for _ in range(num_background):
                background()
        seconds = self.seconds(step, 1)
        self.wait()
        return seconds


def median_us(seconds: np.ndarray, calls: int = 1) -> float:
    """Return the median in microseconds, of one of the calls that each time holds."""
    return float(np.median(seconds)) / calls * 1e6


def rows_against(
    figure: str,
    case: str,
    times: Mapping[str, np.ndarray],
    ceiling: str,
    calls: int = 1,
    num_bytes: int = 0,
) -> dict[str, Row]:
    """Return a row for each thing that was compared with the ceiling, by name.

    Args:
        figure: As in `row_of`.
        case: Likewise.
        times: From `Clock.compare`; one is the ceiling.
        ceiling: Its name.
        calls: That each time holds.
        num_bytes: Of one call.
    """
    limit = times[ceiling]
    return {
        name: row_of(
            figure,
            case,
            name,
            median_us(seconds, calls),
            ceiling,
            median_us(limit, calls),
            float(np.median(limit / seconds)),
            num_bytes or None,
        )
        for name, seconds in times.items()
        if name != ceiling
    }


def card(device: torch.device) -> dict[str, Any]:
    """Describe the device as far as it decides the numbers."""
    if device.type != "cuda":
        return {"name": "cpu"}
    facts = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[0]
    except (OSError, subprocess.CalledProcessError) as error:
        driver = f"unknown: {error}"
    size = {"memory_bytes": facts.total_memory, "multiprocessors": facts.multi_processor_count}
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        **size,
        "driver": driver,
        "torch_cuda": torch.version.cuda,
    }

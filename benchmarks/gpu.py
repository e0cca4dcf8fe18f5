"""What replay costs on one GPU, every figure against a ceiling that is measured in the same run.

    python benchmarks/gpu.py --json F                       # all; exit code 2 without a CUDA device
    python benchmarks/gpu.py --figures gather steps         # some of them
    python benchmarks/gpu.py --figures host --tables small  # the small table in host memory
    python benchmarks/gpu.py --device cpu --smoke           # tiny sizes; the numbers mean nothing

The GPU page says what the figures are. A figure that fails is a row with its error, and the exit
code is 1; a bound that is not met is reported only.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import support  # noqa: F401  # puts the checkout first
import gpu_device_table
import gpu_host_table
import torch
from support.report import Report, Row, print_rows
from gpu_clock import Clock, card

from deepspeed_gear.ops.native_op import CudaOp

BLOCKS = 9
BLOCK_S = 0.05
Figure = Callable[[], Iterator[Row]]
FIGURES = ("gather", "selection", "kernels", "steps", "online", "host")


def figures(
    clock: Clock, is_smoke: bool, tables: Sequence[str] = gpu_host_table.TABLES
) -> dict[str, Figure]:
    """Return all figures by name.

    Args:
        clock: Of the device.
        is_smoke: Whether sizes are tiny.
        tables: Names of those in host memory.
    """
    device = gpu_device_table.SMOKE if is_smoke else gpu_device_table.Sizes()
    host = gpu_host_table.SMOKE if is_smoke else gpu_host_table.Sizes()
    sizes = zip(gpu_host_table.TABLES, host.tables, strict=True)
    host = replace(host, tables=tuple(size for name, size in sizes if name in tables))
    return {
        "gather": lambda: gpu_device_table.gathers(clock, device),
        "selection": lambda: gpu_device_table.selection(clock, device),
        "kernels": lambda: gpu_device_table.kernels(clock, device),
        "steps": lambda: gpu_device_table.steps(clock, device),
        "online": lambda: gpu_device_table.online(clock, device),
        "host": lambda: gpu_host_table.collections(clock, host),
    }


def measured(name: str, figure: Figure) -> Iterator[Row]:
    """Give the rows of a figure; where it fails, a row with the error behind those that it has
    given.
    """
    try:
        yield from figure()
    except Exception as error:
        traceback.print_exc()
        yield {"figure": name, "error": f"{type(error).__name__}: {error}"}


def show(rows: list[Row]) -> None:
    """Print what was measured, and what is asked for."""
    good = [row for row in rows if "error" not in row]
    print_rows(good, "figure case what us gb_per_s ceiling_us fraction asked holds")
    for row in rows:
        if "error" in row:
            print(f"{row['figure']}: {row['error']}")


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        also=("--smoke",),
        device=("cuda", "a CUDA device, or cpu with --smoke"),
        figures=(FIGURES, "which ones; all"),
        tables=(gpu_host_table.TABLES, "in host memory of the figure host: 1 GiB, 12 GiB; both"),
    )
    device = torch.device(report.options.device)
    is_smoke = report.options.quick
    if device.type == "cpu" and not is_smoke:
        report.parser.error(
            "--device cpu needs --smoke: without a GPU there are no figures to take"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(
                f"gpu.py: error: torch {torch.__version__} sees no CUDA device, and these figures "
                "need one; --device cpu --smoke runs the code without them",
                file=sys.stderr,
            )
            sys.exit(2)
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        # As a Replay's: on a CUDA stream other than the default one.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    rows = list[Row]()
    clock = Clock(device, 2 if is_smoke else BLOCKS, 0.0 if is_smoke else BLOCK_S)
    known = figures(clock, is_smoke, report.options.tables)
    for name in dict.fromkeys(report.options.figures):
        for row in measured(name, known[name]):
            rows.append(row)  # rows so far stay if a later one fails
            sources = CudaOp().source_digest()
            report.write(rows, kernel_sources=sources, device=card(device), smoke=is_smoke)
    show(rows)
    sys.exit(1 if any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()

"""The command line of every benchmark, what it writes beside its numbers, and how it
prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from support import ROOT

_PACKAGES = ("torch", "numpy", "deepspeed", "cpprb")
_TICKS = os.sysconf("SC_CLK_TCK")
Row = dict[str, Any]  # one measurement


def machine() -> dict[str, Any]:
    """Describe this machine as far as it decides the numbers."""
    text = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), ""
    )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "huge_pages": pages.read_text().strip() if pages.exists() else "unknown",
    }


def versions() -> dict[str, str]:
    """Name the versions of what runs."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Name the commit of the checkout; "+" behind it says that files differ from it."""
    try:
        name = _git("rev-parse", "HEAD")
        return name + (
            "+"
            if _git("status", "--porcelain", "--", "deepspeed_gear", "ops", "benchmarks")
            else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Disturbance:
    """How much other work the machine did during a measurement.

    The CPU time of this process and of its ended children counts as its own.
    """

    def __init__(self) -> None:
        self._start = time.monotonic(), *self._read()

    def _read(self) -> tuple[float, float, float]:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = sum(fields[:3]) + sum(fields[5:7])
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return busy / _TICKS, fields[7] / _TICKS, own

    def taken(self) -> dict[str, float]:
        """Return the cores that others used, and that the hypervisor withheld, on average since the
        start.
        """
        now = time.monotonic(), *self._read()
        seconds, busy, steal, own = (a - b for a, b in zip(now, self._start, strict=True))
        seconds = max(seconds, 1e-3)
        return {
            "seconds": round(seconds, 1),
            "other_cores": round(max(0.0, busy - own) / seconds, 2),
            "stolen_cores": round(steal / seconds, 2),
        }


def document(disturbance: Disturbance, rows: Sequence[Row], **extra: Any) -> dict[str, Any]:
    """Return rows with everything that is needed to judge and to repeat them."""
    arguments = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"python benchmarks/{arguments}",
        "machine": machine(),
        "versions": versions(),
        "disturbance": disturbance.taken(),
        **extra,
        "rows": list(rows),
    }


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a result, one row per line, so that two of them can be compared."""
    head = {key: value for key, value in content.items() if key != "rows"}
    lines = ",\n".join("  " + json.dumps(row) for row in content["rows"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"
    json.loads(text)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


class Report:
    """The command line of a benchmark, and where its rows go.

    Args:
        doc: Of its module, for `--help`.
        quick: What `--quick` does, which all have beside `--json`.
        also: Other names of `--quick`.
        **options: Its own: by name, a default and what it is for. A default of False makes a flag,
            a tuple several values, and a type a value that may be missing (None).
    """

    def __init__(
        self,
        doc: str | None,
        quick: str = "tiny sizes, to see that it runs",
        also: Sequence[str] = (),
        **options: tuple[Any, str],
    ) -> None:
        self._disturbance = Disturbance()
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--json", type=Path, help="write the rows to this file")
        self.parser.add_argument("--quick", *also, action="store_true", dest="quick", help=quick)
        for name, (default, text) in options.items():
            self.parser.add_argument(f"--{name.replace('_', '-')}", help=text, **_kind(default))
        self.options = self.parser.parse_args()

    def write(self, rows: Sequence[Row], path: Path | None = None, **extra: Any) -> None:
        """Write the rows to a file, or where `--json` wants them."""
        to = path or self.options.json
        if to is not None:
            write_json(to, document(self._disturbance, rows, **extra))

    def in_parts(self, parts: Mapping[str, Callable[[bool], Iterable[Row]]]) -> None:
        """Measure parts; print and write after each what is there, so that a failure takes no other
        with it.

        Args:
            parts: By the `what` of their rows; given whether sizes are tiny.
        """
        rows: list[Row] = []
        for part in parts.values():
            found = list(part(self.options.quick))
            rows += found
            print_rows([{key: row[key] for key in row if key != "what"} for row in found])
            print()
            self.write(rows)

    def meanwhile(self) -> None:
        """Print how much other work the machine did."""
        taken = self._disturbance.taken()
        others = taken["other_cores"]
        stolen = taken["stolen_cores"]
        print(f"\nmeanwhile others used {others} cores, the hypervisor took {stolen}")


def _kind(default: Any) -> dict[str, Any]:
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, tuple):
        choices = default if isinstance(default[0], str) else None
        return {"type": type(default[0]), "nargs": "+", "choices": choices, "default": default}
    return {"type": type(default), "default": default}


def judge(row: Row, value: float, bound: float, holds: bool) -> Row:
    """Add the number of a row that has a bound, the bound, and whether it is met."""
    row.update(judged=value, bound=bound, holds=holds)
    return row


def say(text: str) -> None:
    """Print the progress of a benchmark to stderr."""
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr, flush=True)


def print_rows(rows: Sequence[Row], columns: str | Sequence[str] = "") -> None:
    """Print rows as a table.

    Args:
        rows: What was measured; rows without a column leave its cell empty.
        columns: Their names, with spaces between them; all by default. "more" has all that no other
            has.
    """
    heads = columns.split() if isinstance(columns, str) else columns
    heads = heads or list(dict.fromkeys(head for row in rows for head in row))
    print_table(
        heads, [[_more(row, heads) if h == "more" else row.get(h) for h in heads] for row in rows]
    )


def _more(row: Row, heads: Sequence[str]) -> str:
    return " ".join(f"{key}={_text(value)}" for key, value in row.items() if key not in heads)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under their columns as a Markdown table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(_text, cells)) + " |")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)

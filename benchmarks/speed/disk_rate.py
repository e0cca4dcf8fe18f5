"""What the disk gives a program that does nothing but read: pages a second, as `fio` reads them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.report import Row

PAGE_BYTES = 4096
ENGINES = ("io_uring", "libaio", "psync")  # the first that the kernel and this fio have


class DiskRate:
    """Pages at random places of a file that `fio` reads a second, many at a time.

    It reads around the page cache, on one core and as a member of a control group, like the systems
    that it is compared with. It writes nothing.
    """

    def __init__(self, folder: Path, queue_depth: int, core: int, group: Path) -> None:
        """Prepare the runs.

        Args:
            folder: The largest file in it is read.
            queue_depth: Pages that are asked for at a time.
            core: The core that it runs on.
            group: The control group that it joins.
        """
        self._folder = folder
        self._queue_depth = queue_depth
        self._core = core
        self._group = group
        self._rates: list[float] = []
        self._engine = ""
        self._left_out = "" if shutil.which("fio") else "not installed: apt-get install fio"

    def run(self, count: int, seconds: float) -> None:
        """Read for some seconds, a few times."""
        for _ in range(0 if self._left_out else count):
            for engine in [self._engine] if self._engine else ENGINES:
                rate = self._run(engine, seconds)
                if rate is not None:
                    self._engine = engine
                    self._left_out = ""
                    self._rates.append(rate)
                    break

    def _run(self, engine: str, seconds: float) -> float | None:
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        file = max(files, key=lambda path: path.stat().st_size)
        with file.open("rb") as opened:  # writes would take the disk's time
            os.fsync(opened)
        options = {
            "name": "pages",
            "filename": str(file).replace(":", r"\:"),
            "rw": "randread",
            "bs": PAGE_BYTES,
            "direct": 1,
            "ioengine": engine,
            "iodepth": self._queue_depth,
            "runtime": seconds,
            "output-format": "json",
        }
        command = ["fio", "--readonly", "--time_based", "--norandommap", "--randrepeat=0"]
        command += [f"--{name}={value}" for name, value in options.items()]
        joining = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self._group / "cgroup.procs")]
        done = subprocess.run(
            [*joining, *command],
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {self._core}),
        )
        try:
            found = json.loads(done.stdout[done.stdout.index("{") :])
            return float(found["jobs"][0]["read"]["iops"]) or None
        except (ValueError, KeyError, IndexError):
            said = (done.stderr or done.stdout).strip().splitlines() or [
                f"status {done.returncode}"
            ]
            self._left_out = f"fio: {said[0]}"
            return None

    def rows(self, work: str, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of systems with the pages that they had read a second, and fio's row."""
        if not self._rates:
            return [*rows, {"work": work, "system": "fio", "left out": self._left_out}]
        rate = float(np.median(self._rates))
        found = []
        for row in rows:
            more: Row = {}
            if "read_mb" in row:
                pages = row["read_mb"] * 1e6 / PAGE_BYTES * row["batches_s"]
                more = {"pages_s": round(pages), "of_fio": round(pages / rate, 3)}
            found.append({**row, **more})
        low, high = np.quantile(self._rates, [0.25, 0.75])
        own: Row = {"work": work, "system": "fio", "pages_s": round(rate)}
        own |= {"quartiles": [round(low), round(high)], "queue_depth": self._queue_depth}
        return [*found, {**own, "engine": self._engine}]

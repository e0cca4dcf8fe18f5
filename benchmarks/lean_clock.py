"""Time a program between two steps of its vector environments: lean_clock.py FIRST LAST PROGRAM
OPTION...

It needs gymnasium and nothing else, so it runs under the interpreter of any program that steps a
SyncVectorEnv. The last line is JSON: seconds, and seconds of the process's CPU time, from the begin
of step FIRST to that of step LAST, where the program ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from gymnasium.vector import SyncVectorEnv


class Clock:
    """Counts the steps of vector environments, and ends the process at the last one."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._count = 0
        self._begin = (0.0, 0.0)

    def step(self) -> None:
        """Count a step that begins."""
        self._count += 1
        now = time.perf_counter(), time.process_time()
        if self._count == self._first:
            self._begin = now
        if self._count == self._last:
            seconds, cpu_seconds = (
                after - before for after, before in zip(now, self._begin, strict=True)
            )
            print("\n" + json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)
            os._exit(0)  # nothing of the program's own end is measured


def main() -> None:
    """Run the program with the clock in its environments."""
    first = int(sys.argv[1])
    last = int(sys.argv[2])
    program = sys.argv[3]
    clock = Clock(first, last)
    step = SyncVectorEnv.step

    def timed(envs: Any, actions: Any) -> Any:
        clock.step()
        return step(envs, actions)

    SyncVectorEnv.step = timed
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")
    raise SystemExit(f"{program} must take {last} steps of its environments")


if __name__ == "__main__":
    main()

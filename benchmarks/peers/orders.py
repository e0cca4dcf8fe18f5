"""A process that carries out orders: JSON lines on its stdin, an answer to each on its stdout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.environments import OWN, ROOT
from peers.interface import NotOfferedError

LIMIT_S = 240.0  # of one order: a system that needs longer is left out
ENDED = "its process ended"
Row = dict[str, Any]


class Child:
    """A system's process.

    Args:
        program: Module that it runs.
        system: Name of the system's module.
        python: Its interpreter.
        *arguments: Of the program.
        checkout: Where this project's package is taken from.
        env: Laid over the environment.
    """

    def __init__(
        self,
        program: str,
        system: str,
        python: Path | str,
        *arguments: str,
        checkout: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        path = [
            str(ROOT / "benchmarks"),
            *([str(checkout)] if system.rpartition(".")[2] in OWN else []),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **(env or {}),
        }
        environment.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # a package that pip installs has its byte code
        command = [str(python), "-m", program, system, *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=checkout,  # python -m imports from here first
            env=environment,
            text=True,
            **streams(),
        )

    def order(self, do: str, seconds: float = LIMIT_S, **more: Any) -> Row:
        """Have something done; return the answer, or what is in the way as "left out"."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps({"do": do, **more}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return {"left out": ENDED}
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            self.process.kill()
            return {"left out": f"took over {seconds:.0f} s"}
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"left out": ENDED}

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def streams() -> dict[str, Any]:
    """Return the streams of such a process; PEERS_VERBOSE=1 shows what it prints."""
    log = None if "PEERS_VERBOSE" in os.environ else subprocess.DEVNULL
    return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}


def carry_out(answer: Callable[[Row], Row]) -> None:
    """Answer orders until there are no more; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except NotOfferedError as error:
            found = {"left out": str(error) or "not offered"}
        except Exception as error:
            traceback.print_exc()
            first = str(error).splitlines()[0] if str(error) else ""
            found = {"left out": f"{type(error).__name__}: {first}"[:200]}
        print(json.dumps(found), file=answers, flush=True)

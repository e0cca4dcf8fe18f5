"""Start a program under DeepSpeed's launcher, from the program itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

RESULT = re.compile(r'^\{".*\}$')


def is_rank() -> bool:
    """Return whether a launcher has started this process."""
    return "RANK" in os.environ


def launch(program: str, ranks: int) -> int:
    """Start ranks of a program on this node with the same arguments; print their result as the last
    line.

    Returns:
        The exit status.
    """
    status, result = run(program, ranks, *sys.argv[1:])
    print(result, end="", flush=True)
    return status


def run(program: str, ranks: int, *arguments: str) -> tuple[int, str]:
    """Start ranks of a program on this node. Returns the exit status, and the line of
    their result.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--num_gpus", str(ranks), "--master_port", str(port), program, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result = ""
    pipe = subprocess.PIPE
    options = {"env": environment, "stdout": pipe, "text": True, "start_new_session": True}
    with subprocess.Popen([str(word) for word in command], **options) as process:
        assert process.stdout is not None
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # the launcher itself would not end its ranks
            signal.signal(number, lambda *_: os.killpg(process.pid, signal.SIGTERM))
        for line in process.stdout:
            if RESULT.match(line):
                result = line  # the launcher writes after it
            else:
                sys.stderr.write(line)
    for left in Path("/dev/shm").glob(
        f"deepspeed_allreduce_buffer_*_{port}_*"
    ):  # of DeepSpeed's own
        left.unlink(missing_ok=True)
    return process.returncode, result

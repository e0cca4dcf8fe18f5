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
    """Start ranks of a program on this node with the same arguments; print their result as the last line.

    Returns:
        The exit status.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--num_gpus", str(ranks), "--master_port", str(port), program, *sys.argv[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result, pipe = "", subprocess.PIPE
    with subprocess.Popen(list(map(str, command)), env=environment, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        for line in process.stdout:
            if RESULT.match(line):
                result = line  # the launcher writes behind it
            else:
                sys.stderr.write(line)
    print(result, end="", flush=True)
    return process.returncode

"""Processes of tests: children, ranks without a launcher, and programs under the real one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gear_support import ROOT, SHM, prefix
from warm_python import WarmProcess

_ports = itertools.count()
PROGRAMS = Path(__file__).resolve().parents[1] / "distributed" / "programs"


def in_child(action: Callable[[], Any]) -> int:
    """Run an action in a forked child; return its process id. `exit_status` collects it.

    The child does not outlive this process.
    """
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        action()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def exit_status(child: int) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    """Kill a child with SIGKILL and wait for its end."""
    os.kill(child, signal.SIGKILL)
    assert exit_status(child) == -signal.SIGKILL


def free_port() -> int:
    """Return a TCP port that no process listens on, and that the kernel gives to none that asks for any."""
    while True:
        port = 20_000 + (131 * os.getpid() + next(_ports)) % 12_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of ranks: CPU, one thread, the checkout and this module importable."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **fixed, "GEAR_TEST_PREFIX": prefix(), **extra}


class Ranks:
    """Python programs that form one process group, without DeepSpeed's launcher.

    Args:
        program: Path of the program, or its name in `programs/`.
        count: Number of ranks.
        arguments: Of the program.
        env: Extra environment.
    """

    def __init__(self, program: Path | str, count: int, *arguments: str, **env: str) -> None:
        self.port, path = str(free_port()), PROGRAMS / program
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            rank_env = environment(**{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, **place, **env})
            self.processes.append(self.start(rank, [str(path), *arguments], rank_env))

    def start(self, rank: int, program: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Start a rank."""
        del rank
        return WarmProcess(program, env, subprocess.PIPE, subprocess.STDOUT)

    def wait(self, timeout_s: float = 120.0) -> list[tuple[int, str]]:
        """Return exit status and output of every rank; kill what is left after the timeout."""

        def result(process: subprocess.Popen[str]) -> tuple[int, str]:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.end(process)
                output = process.communicate()[0] + "\n[killed: timed out]"
            return process.returncode, output

        # All at once: a rank whose pipe is full would block the others in a collective.
        with ThreadPoolExecutor(len(self.processes)) as readers:
            found = list(readers.map(result, self.processes))
        remove_buffers(self.port)
        return found

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a rank."""
        process.kill()

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for process in self.processes:
            self.end(process)
        for process in self.processes:
            process.communicate()
        remove_buffers(self.port)


def run_ranks(
    program: Path | str, count: int, *arguments: str, timeout_s: float = 240.0, **env: str
) -> list[str]:
    """Run ranks to their end; return their outputs. All must succeed.

    The first ones in a fresh checkout build DeepSpeed's op for collectives in shared memory, for a minute.
    """
    results = Ranks(program, count, *arguments, **env).wait(timeout_s)
    assert all(status == 0 for status, _ in results), "\n".join(f"[{s}] {out}" for s, out in results)
    return [output for _, output in results]


def launcher(program: Path | str, count: int, *arguments: str) -> list[str]:
    """Return the command of DeepSpeed's launcher for a program."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(count)]
    return [*command, "--master_port", str(free_port()), str(PROGRAMS / program), *arguments]


def launch(program: Path | str, count: int, *arguments: str, timeout_s: float = 240.0) -> str:
    """Run a program under the real launcher; return its output. It must succeed."""
    command = launcher(program, count, *arguments)
    port = command[command.index("--master_port") + 1]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    process = WarmProcess(command, environment(), pipe, both, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"{program} did not end within {timeout_s} s:\n{output}") from None
    finally:
        remove_buffers(port)
    assert process.returncode == 0, output
    return output


def remove_buffers(port: str) -> None:
    """Remove the buffers in /dev/shm that DeepSpeed itself leaves for a run's port, 69 MB a rank."""
    for left in SHM.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink(missing_ok=True)


def reapers(prefix: str) -> list[int]:
    """Return the process ids of the reapers of files of a prefix."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(f"{SHM}/{prefix}-".encode()) for word in words):
                found.append(int(process.name))
    return found

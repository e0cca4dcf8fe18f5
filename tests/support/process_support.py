"""Processes of tests: children, ranks without a launcher, and programs under the real one."""

import argparse
import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gear_support import ROOT, SHM, prefix
from warm_python import WarmProcess

_ports = itertools.count()
CALL = Path(__file__).with_name("rank_call.py")


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
    """Return a TCP port that no process listens on, and that the kernel gives to none that asks for
    any.
    """
    while True:
        port = 20_000 + (131 * os.getpid() + next(_ports)) % 12_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of ranks: CPU, one thread, the checkout and this module importable."""
    paths = [
        str(ROOT),
        str(ROOT / "tests" / "support"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **fixed, "GEAR_TEST_PREFIX": prefix(), **extra}


class Ranks:
    """Runs of a Python program that form one process group."""

    def __init__(self, program: Path | str, count: int, *arguments: str, **env: str) -> None:
        self.port = str(free_port())
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            rank_env = environment(
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, **place, **env}
            )
            self.processes.append(self.start(rank, [str(program), *arguments], rank_env))

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

    The first ones in a fresh checkout build DeepSpeed's op for collectives in shared memory, for a
    minute.
    """
    results = Ranks(program, count, *arguments, **env).wait(timeout_s)
    assert all(status == 0 for status, _ in results), "\n".join(
        f"[{s}] {out}" for s, out in results
    )
    return [output for _, output in results]


def results_of(
    run: Callable[[str], object], count: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return what a function of a test module returns on each rank; `run` runs `CALL` with an
    argument.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = write_call(folder, function, *arguments)
        run(call)
        return [result_of(call, rank) for rank in range(count)]


def write_call(folder: Path | str, function: Callable[..., Any], *arguments: Any) -> str:
    """Write which function of a test module `CALL` calls; return its argument."""
    call = Path(folder) / "call"
    call.write_bytes(pickle.dumps((inspect.getfile(function), function.__name__, arguments)))
    return str(call)


def result_of(call: str, rank: int) -> Any:
    """Return what the function has returned on a rank."""
    return pickle.loads(Path(call).with_suffix(f".{rank}").read_bytes())


def call_on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0, **env: str
) -> list[Any]:
    """Call a function of a test module on the ranks of a gloo group, as `run_ranks`; return their
    results.
    """
    run = functools.partial(run_ranks, CALL, count, timeout_s=timeout_s, **env)
    return results_of(run, count, function, *arguments)


def call_with_engines(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Call a function as `call_on_ranks`, with GEAR_LONG_TESTS=1 under DeepSpeed's launcher.

    The launcher imports DeepSpeed twice before the first rank starts, and its ranks import it for
    themselves. To a program it gives the same environment.
    """
    start: Callable[..., object] = launch if os.environ.get("GEAR_LONG_TESTS") == "1" else run_ranks
    run = functools.partial(start, CALL, count, timeout_s=timeout_s)
    return results_of(run, count, function, *arguments)


def launcher(program: Path | str, count: int, *arguments: str) -> list[str]:
    """Return the command of DeepSpeed's launcher for a program."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(count)]
    return [*command, "--master_port", str(free_port()), str(program), *arguments]


def launch(program: Path | str, count: int, *arguments: str, timeout_s: float = 240.0) -> str:
    """Run a program under the real launcher; return its output. It must succeed."""
    command = launcher(program, count, *arguments)
    port = command[command.index("--master_port") + 1]
    pipe = subprocess.PIPE
    both = subprocess.STDOUT
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
    """Remove the buffers in /dev/shm that DeepSpeed itself leaves for a run's port, 69
    MB a rank.
    """
    for left in SHM.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink(missing_ok=True)


def command_options(description: str | None, *flags: str, **defaults: Any) -> argparse.Namespace:
    """Return options of the command line: flags, and others by name, of the types of their
    defaults.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=shape)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def end_with(found: dict[str, Any], *wrong: str) -> None:
    """End a program: print what it has found as a line of JSON; with status 1 if any of `wrong` is
    true.
    """
    print(json.dumps(found))
    sys.exit(1 if any(found[name] for name in wrong) else 0)


def reapers(prefix: str) -> list[int]:
    """Return the process ids of the reapers of files of a prefix."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(f"{SHM}/{prefix}-".encode()) for word in words):
                found.append(int(process.name))
    return found

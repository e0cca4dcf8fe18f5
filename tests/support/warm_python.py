"""Python programs that start from one process with torch and DeepSpeed imported: in 0.1 s and not in 4.

A server imports them once for a test run. For each program it forks a child, which gets the arguments, the
environment and the pipes of that program, and then runs it as `python -u` would: as `__main__`, with the
interpreter's usual end. Variables that torch reads while it is imported are those of the server.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PIPE = subprocess.PIPE
# What ranks import; other modules a program imports itself. The first optimizer of a process imports
# torch._dynamo, the first engine Muon: together 4 s, where all the rest of a short program takes 0.4 s.
_IMPORTED = (
    "numpy torch torch.distributed torch.distributed.fsdp torch.utils.cpp_extension torch.utils.data "
    "torch._dynamo deepspeed deepspeed.pipe deepspeed.runtime.zero.muon.muon_optimizer deepspeed_gear "
    "deepspeed_gear.replay.replay deepspeed_gear.engine.attach deepspeed_gear.writer.vector_writer"
).split()
_MOST_BYTES = 1 << 17  # of a request
_server: socket.socket | None = None


class WarmProcess:
    """A program of the server, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: After `python -u`: a path, "-m" and a module, or "-c" and a text; and its arguments.
        env: The environment.
        stdout, stderr: As of Popen: None, PIPE, STDOUT or a file.
        stdin: None or PIPE.
        cwd: The working directory; None: that of the server.
        start_new_session, text: As of Popen.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        stdin: int | None = None,
        cwd: Path | None = None,
        start_new_session: bool = False,
        text: bool = True,
    ) -> None:
        self.args, self.returncode = list(arguments), None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self.stdin: IO[Any] | None = None
        theirs = [0, 1, 2]
        made: list[int] = []
        if stdin == PIPE:
            theirs[0], mine = os.pipe()
            made.append(theirs[0])
            self.stdin = os.fdopen(mine, "w" if text else "wb")
        for number, (name, given) in enumerate((("stdout", stdout), ("stderr", stderr)), 1):
            if given == PIPE:
                mine, theirs[number] = os.pipe()
                made.append(theirs[number])
                setattr(self, name, os.fdopen(mine, errors="replace") if text else os.fdopen(mine, "rb"))
            elif given == subprocess.STDOUT:
                theirs[number] = theirs[1]
            elif given == subprocess.DEVNULL:
                theirs[number] = os.open(os.devnull, os.O_WRONLY)
                made.append(theirs[number])
            elif given is not None:
                theirs[number] = given if isinstance(given, int) else given.fileno()
        self._status, status = os.pipe()
        request = {
            "arguments": [str(word) for word in arguments],
            "env": dict(env),
            "cwd": str(cwd or os.getcwd()),
            "session": start_new_session,
        }
        message = json.dumps(request).encode()
        assert len(message) < _MOST_BYTES
        socket.send_fds(_running(), [message], [*theirs, status])
        for one in (*made, status):
            os.close(one)
        self.pid = int(os.read(self._status, 16))

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status, or minus the signal that ended it."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            found = os.read(self._status, 16)
            os.close(self._status)
            assert found, "the server of warm processes has ended"
            self.returncode = int(found)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read its pipes to their ends and wait for it; return what `stdout` and `stderr` held."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            self.stdin.close()
        kept = self.__dict__.setdefault("_kept", {})
        pipes = {pipe.fileno(): pipe for pipe in (self.stdout, self.stderr) if pipe and not pipe.closed}
        for number in pipes:
            kept.setdefault(number, io.BytesIO())
        waiting = set(pipes)
        while waiting:
            left = None if until is None else max(until - time.monotonic(), 0)
            ready = select.select(waiting, [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for number in ready:
                part = os.read(number, 1 << 16)
                kept[number].write(part)
                if not part:
                    waiting.remove(number)
        self.wait(None if until is None else max(until - time.monotonic(), 0))
        found = {pipe: kept[number].getvalue().decode(errors="replace") for number, pipe in pipes.items()}
        for pipe in pipes.values():
            pipe.close()
        return (
            None if self.stdout is None else found.get(self.stdout, ""),
            None if self.stderr is None else found.get(self.stderr, ""),
        )

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def _running() -> socket.socket:
    """Return the socket of this process's server; start it at the first call."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (_server, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MOST_BYTES)
        command = [sys.executable, "-u", __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
    return _server


def run_warm(
    *arguments: str, env: Mapping[str, str], cwd: Path | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with captured output."""
    with WarmProcess(arguments, env, PIPE, PIPE, cwd=cwd) as process:
        try:
            output, errors = process.communicate(timeout_s)
        except BaseException:
            process.kill()
            raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, output or "", errors or "")


# ---- the server ----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Return the request in the child, None in the server at its end."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # status pipe of each
    while True:
        ready = select.select([requests, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            _collect(children)
        if requests not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not message:
            return None  # children live on, as those of a process that ends
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, given in enumerate(fds[:3]):
                os.dup2(given, number)
            for one in (*fds, wake, woken, *children.values()):
                os.close(one)
            requests.close()
            request: dict[str, Any] = json.loads(message)
            return request
        children[child] = fds[3]
        os.write(fds[3], b"%d" % child)
        for one in fds[:3]:
            os.close(one)


def _collect(children: dict[int, int]) -> None:
    """Write the exit status of each child that has ended to its pipe."""
    while children:
        with contextlib.suppress(ChildProcessError):
            child, status = os.waitpid(-1, os.WNOHANG)
            if child and (pipe := children.pop(child, None)) is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(pipe, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(pipe)
            if child:
                continue
        return


def _run(request: dict[str, Any]) -> None:
    """Run a program in a child: as `__main__`, with its own arguments and environment."""
    import numpy as np

    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    np.random.seed()
    first, *rest = request["arguments"]
    own = "" if first.startswith("-") else str(Path(first).resolve().parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [own, *(path for path in paths if path not in sys.path[1:])]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *rest[1:]] if first == "-c" else [first, *rest]
    text = rest[0] if first == "-c" else Path(first).read_bytes()
    program, main = compile(text, first, "exec"), sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]  # this module's own
    main["__file__"] = first
    exec(program, main)


if __name__ == "__main__":
    for _name in _IMPORTED:
        __import__(_name)
    gc.freeze()  # so that children do not copy what is collected
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        _run(_request)

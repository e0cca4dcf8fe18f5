"""Python programs that start from one process with torch and DeepSpeed imported: in 0.1 s and not
in 4.

A server imports them once for a process of pytest, or for all whose GEAR_WARM_SERVER names the
socket that one listens to: `warm_python.py SOCKET`. For each program it forks a child, which gets
the arguments, the environment and the pipes of that program, and then runs it as `python -u` would:
as `__main__`, with the interpreter's usual end. Variables that torch reads while it is imported are
those of the server.

A program may run in the namespaces of another process, as one of a node of `cluster_support`: then
the child waits for its own child there, as `nsenter` does.
"""

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

PIPE = subprocess.PIPE
# What ranks import; other modules a program imports itself. The first optimizer of a process
# imports torch._dynamo, the first engine Muon: together 4 s, where all the rest of a short program
# takes 0.4 s.
_IMPORTED = (
    "numpy torch torch.distributed torch.distributed.fsdp torch.utils.cpp_extension "
    "torch.utils.data torch._dynamo deepspeed deepspeed.pipe "
    "deepspeed.runtime.zero.muon.muon_optimizer deepspeed_gear deepspeed_gear.replay.replay "
    "deepspeed_gear.engine.attach deepspeed_gear.writer.vector_writer"
).split()
# Of the packages for examples and tests, which a user may have left out: 2.5 s.
_OPTIONAL = (
    "transformers.models.qwen2.modeling_qwen2 transformers.trainer h5py pyarrow.parquet "
    "scipy.stats torch.utils.tensorboard"
).split()
_NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")  # the last one hides this machine's /proc
_MOST_BYTES = 1 << 17  # of a request
SERVER = "GEAR_WARM_SERVER"
_server: socket.socket | None = None
#: A fork cannot use a GPU that DeepSpeed has looked for: every program starts anew there.
HAS_GPU = torch.cuda.is_available()


class WarmProcess(subprocess.Popen):
    """A program of the server, with the pipes and methods of a child of this process.

    Args:
        arguments: After `python -u`: a path, "-m" and a module, or "-c" and a text; and its
            arguments.
        env: The environment.
        stdout, stderr, text, **options: As of Popen, of which the server heeds `cwd` and
            `start_new_session`.
        inside: The process whose namespaces the program enters; `pid` is that of the one that waits
            for it.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        text: bool = True,
        inside: int | None = None,
        **options: Any,
    ) -> None:
        self._inside = inside
        errors = "replace" if text else None
        super().__init__(
            list(map(str, arguments)),
            env=env,
            stdout=stdout,
            stderr=stderr,
            errors=errors,
            **options,
        )

    def _execute_child(self, *given: Any) -> None:
        """Send the server what Popen has prepared; -1 is a stream of this process."""
        if HAS_GPU:
            command = [sys.executable, "-u", *given[0]]
            if self._inside is not None:
                where = f"--wd={given[5] or os.getcwd()}"
                command = [
                    *f"nsenter -t {self._inside} -n -u -i -m -p".split(),
                    where,
                    "--",
                    *command,
                ]
            super()._execute_child(command, *given[1:])
            return
        arguments = given[0]
        cwd = given[5]
        env = given[6]
        is_session = given[21]
        pipes = given[10:16]  # stdin, stdout, stderr: the end to read from, the end to write to
        theirs = [
            end if end != -1 else number
            for number, end in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        request = {
            "arguments": arguments,
            "env": dict(env),
            "cwd": str(cwd or os.getcwd()),
            "session": is_session,
            "inside": self._inside,
        }
        message = json.dumps(request).encode()
        assert len(message) < _MOST_BYTES
        self._status, status = os.pipe()
        socket.send_fds(_running(), [message], [*theirs, status])
        os.close(status)
        self._close_pipe_fds(*pipes)
        self.pid = int(os.read(self._status, 16))
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        if HAS_GPU:
            return super()._wait(timeout)
        if self.returncode is None:
            if not select.select(
                [self._status], [], [], None if timeout is None else max(timeout, 0)
            )[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            status = os.read(self._status, 16)
            os.close(self._status)
            assert status, "the server of warm processes has ended"
            self.returncode = int(status)
        return self.returncode

    def _internal_poll(self, **given: Any) -> int | None:
        if HAS_GPU:
            return super()._internal_poll(**given)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode


def _running() -> socket.socket:
    """Return a socket of the run's server, or of this process's own, which the first
    call starts.
    """
    global _server
    if _server is None and (path := os.environ.get(SERVER)):
        _server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MOST_BYTES)
        _server.connect(path)
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (_server, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MOST_BYTES)
        command = [sys.executable, "-u", __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
    return _server


def run_warm(
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = 240.0,
    inside: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with captured output."""
    with WarmProcess(arguments, env, PIPE, PIPE, cwd=cwd, inside=inside) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _serve(clients: list[socket.socket], listener: socket.socket | None) -> dict[str, Any] | None:
    """Fork a child for each request. Return the request in the child, None in the server at its
    end.

    The end is that of the last client, where no socket is listened to.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # status pipe of each
    while clients or listener:
        ready = select.select([*clients, wake, *([listener] if listener else [])], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            _collect(children)
        if listener and listener in ready:
            clients.append(listener.accept()[0])
        for client in [one for one in clients if one in ready]:
            message, fds, _, _ = socket.recv_fds(client, _MOST_BYTES, 4)
            if not message:  # children live on, as those of a process that ends
                clients.remove(client)
                client.close()
                continue
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, given in enumerate(fds[:3]):
                    os.dup2(given, number)
                for one in (*fds, wake, woken, *children.values()):
                    os.close(one)
                for end in (*clients, listener):
                    if end:
                        end.close()
                request: dict[str, Any] = json.loads(message)
                return request
            children[child] = fds[3]
            os.write(fds[3], b"%d" % child)
            for one in fds[:3]:
                os.close(one)
    return None


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


def _enter(process: int) -> None:
    """Enter the namespaces of a process, and return in a child, whose end is also that of this
    process.
    """
    setns = ctypes.CDLL(None, use_errno=True).setns
    for namespace in [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]:
        if setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    child = os.fork()
    if child == 0:
        return
    for stream in range(3):
        os.close(stream)  # a pipe ends with the program
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _run(request: dict[str, Any]) -> None:
    """Run a program in a child: as `__main__`, with its own arguments and environment."""
    import numpy as np

    if request["inside"] is not None:
        _enter(request["inside"])
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
    path = os.path.abspath(first)
    program = compile(text, first, "exec")
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]  # this module's own
    main["__file__"] = path
    exec(program, main)


if __name__ == "__main__":
    _clients: list[socket.socket] = []
    _listener: socket.socket | None = None
    if sys.argv[1].isdecimal():
        _clients = [socket.socket(fileno=int(sys.argv[1]))]
    else:
        ctypes.CDLL(None).prctl(
            1, signal.SIGTERM
        )  # PR_SET_PDEATHSIG: it ends with the shell that started it
        _listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _listener.bind(sys.argv[1])
        _listener.listen(64)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by an import: no test needs that network
    for _name in _IMPORTED:
        __import__(_name)
    for _name in _OPTIONAL:
        with contextlib.suppress(ImportError):
            __import__(_name)
    gc.freeze()  # so that children do not copy what is collected
    _request = _serve(_clients, _listener)
    if _request is not None:
        _run(_request)

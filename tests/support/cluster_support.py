"""Several machines for tests, on one: namespaces (`cluster/cluster.sh`) and DeepSpeed's launcher
over pdsh.

/dev/shm, the network, process ids and host names are each node's own; files, the boot id and the
clock are common.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gear_support import ROOT, wait_until
from process_support import CALL, Ranks, environment, results_of
from warm_python import WarmProcess, run_warm

SCRIPT = Path(__file__).resolve().parents[1] / "cluster" / "cluster.sh"
PROGRAMS = Path(__file__).resolve().parents[1] / "cluster" / "programs"
# in the environment of every process of a launch; its value is the launch's number
MARK = "GEAR_TEST_LAUNCH"
# What pdsh does not forward by itself.
FORWARDED = "DS_ACCELERATOR OMP_NUM_THREADS TORCH_EXTENSIONS_DIR GEAR_TEST_PREFIX PATH".split()


def why_no_cluster() -> str | None:
    """Say why this machine cannot run a cluster; None if it can."""
    checked = subprocess.run([str(SCRIPT), "check"], capture_output=True, text=True)
    return checked.stderr.strip() if checked.returncode else None


class Launch:
    """A command of node 0 that runs a program on nodes; its processes have a value of MARK to be
    known by.
    """

    def __init__(
        self, cluster: Cluster, mark: str, command: list[str], env: dict[str, str], log: Path
    ) -> None:
        self.cluster = cluster
        self.mark = mark
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                cluster.command(0, *command),
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """Return what all ranks and the launcher have written until now."""
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        """Return the launcher's exit status, or None while it runs."""
        return self.process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the launcher's end and return its exit status; a timeout fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {timeout_s} s:\n{self.output()}") from None

    def wait_for(self, pattern: str, timeout_s: float = 180.0) -> None:
        """Wait until the output matches a regular expression; an earlier end fails the test."""
        until = time.monotonic() + timeout_s
        while not re.search(pattern, self.output()):
            assert self.poll() is None, f"ended before {pattern!r} came:\n{self.output()}"
            assert time.monotonic() < until, (
                f"no {pattern!r} within {timeout_s} s:\n{self.output()}"
            )
            time.sleep(0.05)

    def pids(self, node: int, pattern: str = "") -> list[int]:
        """List this launch's processes in a node; see Cluster.pids."""
        return [pid for pid in self.cluster.pids(node, pattern) if _has_mark(pid, self.mark)]

    def kill(self) -> None:
        """Kill the launcher, pdsh and every process of this launch on every node."""
        if self.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for node in range(self.cluster.num_nodes):
            _kill(self.pids(node))


class Cluster:
    """Nodes node0 .. node<N-1> with the addresses 10.77.0.1 to 10.77.0.N; all see the files of the
    folder.
    """

    def __init__(self, folder: Path, num_nodes: int = 4) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self._env = {**os.environ, "GEAR_CLUSTER_DIR": str(folder / "state")}
        self._numbers = itertools.count()
        subprocess.run([str(SCRIPT), "up", str(num_nodes)], env=self._env, check=True)
        #: Process 1 of each node, as this machine numbers it.
        self.inits = [
            int((folder / "state" / f"init{node}").read_text()) for node in range(num_nodes)
        ]

    def down(self) -> None:
        """End every process in every node."""
        subprocess.run([str(SCRIPT), "down"], env=self._env, check=True)

    def command(self, node: int, *command: str) -> list[str]:
        """Return the command that runs a command in a node, for subprocess."""
        return [
            "env",
            f"GEAR_CLUSTER_DIR={self.folder / 'state'}",
            str(SCRIPT),
            "exec",
            str(node),
            *command,
        ]

    def call(
        self,
        node: int,
        *command: str,
        timeout_s: float = 180.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a node, in the checkout's root and with the environment of ranks, to its
        end.

        A command of this interpreter runs in a warm process, see `warm_python`.
        """
        if command[0] == sys.executable:
            merged = {**rank_environment(), **(env or {})}
            inside = self.inits[node]
            return run_warm(*command[1:], env=merged, cwd=ROOT, timeout_s=timeout_s, inside=inside)
        return subprocess.run(
            self.command(node, *command),
            env={**rank_environment(), **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def exec(self, node: int, *command: str, timeout_s: float = 180.0) -> str:
        """Run a command in a node; return its stdout. It must succeed."""
        done = self.call(node, *command, timeout_s=timeout_s)
        assert done.returncode == 0, (
            f"{command} in node{node}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def hostfile(self, nodes: int = 2, ranks: int = 1) -> Path:
        """Write the hostfile of the first `nodes` nodes with `ranks` slots each."""
        assert 1 <= nodes <= self.num_nodes
        path = self.folder / f"hostfile-{nodes}-{ranks}"
        path.write_text("".join(f"node{node} slots={ranks}\n" for node in range(nodes)))
        return path

    def start(
        self,
        program: Path | str,
        *arguments: str,
        nodes: int = 2,
        ranks: int = 1,
    ) -> Launch:
        """Start a program, by path or its name in `cluster/programs`, by DeepSpeed's launcher on
        node 0.

        It has `ranks` ranks on each of the first nodes.
        """
        number = next(self._numbers)
        given = {**rank_environment(), MARK: f"{os.getpid()}-{number}"}
        forwarded = {name: given[name] for name in [*FORWARDED, MARK] if name in given}
        forwarded["GLOO_SOCKET_IFNAME"] = "eth0"
        env_file = self.folder / f"env-{number}"
        env_file.write_text("".join(f"{name}={value}\n" for name, value in forwarded.items()))
        command = [
            *(
                str(Path(sys.executable).parent / "deepspeed"),
                "--hostfile",
                str(self.hostfile(nodes, ranks)),
            ),
            *("--launcher", "pdsh", "--force_multi"),
            # No other program of the node listens, and the kernel gives ports above 32768 to
            # clients.
            *("--master_addr", "10.77.0.1", "--master_port", str(20000 + number)),
            *(str(PROGRAMS / program), *arguments),
        ]
        own = {**given, "DS_ENV_FILE": str(env_file)}
        return Launch(self, given[MARK], command, own, self.folder / f"log-{number}")

    def run(
        self,
        program: Path | str,
        *arguments: str,
        nodes: int = 2,
        ranks: int = 1,
        timeout_s: float = 120.0,
    ) -> str:
        """Run a program, as `start` does, to its end; return its output. It must succeed."""
        launch = self.start(program, *arguments, nodes=nodes, ranks=ranks)
        status = launch.wait(timeout_s)
        assert status == 0, f"exit status {status}:\n{launch.output()}"
        return launch.output()

    def call_ranks(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        nodes: int = 2,
        ranks: int = 1,
        timeout_s: float = 120.0,
    ) -> list[Any]:
        """Call a function of a test module on the ranks of a gloo group; return their results.

        Without the launcher unless GEAR_LONG_TESTS=1: see `call_with_engines`.
        """

        def run(call: str) -> None:
            if os.environ.get("GEAR_LONG_TESTS") == "1":
                self.run(CALL, call, nodes=nodes, ranks=ranks, timeout_s=timeout_s)
                return
            results = NodeRanks(self, CALL, call, nodes=nodes, ranks=ranks).wait(timeout_s)
            assert all(status == 0 for status, _ in results), "\n".join(
                f"[{s}] {out}" for s, out in results
            )

        return results_of(run, nodes * ranks, function, *arguments)

    def pids(self, node: int, pattern: str = "") -> list[int]:
        """List a node's processes whose command line matches a regular expression; never its sshd.

        The numbers are this machine's, not the node's: `os.kill` takes them.
        """
        found = []
        for pid in _processes_of(self.inits[node]):
            command = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
            if command and not command.startswith("sshd:") and re.search(pattern, command):
                found.append(pid)
        return sorted(found)

    def link(self, node: int, state: str) -> None:
        """Pull a node's cable out ("down") or plug it in again ("up")."""
        subprocess.run([str(SCRIPT), "link", str(node), state], env=self._env, check=True)

    def sent_bytes(self, node: int) -> int:
        """Return what a node has sent since it started, with all headers."""
        lines = Path(f"/proc/{self.inits[node]}/net/dev").read_text().splitlines()
        fields = next(
            line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")
        )
        return int(fields[8])

    def shm(self, node: int) -> Path:
        """Return where this machine sees a node's /dev/shm."""
        return Path(f"/proc/{self.inits[node]}/root/dev/shm")

    def sweep(self) -> None:
        """Plug all cables in, kill all processes, and remove what DeepSpeed leaves in /dev/shm."""
        for node, init in enumerate(self.inits):
            self.link(node, "up")
            # Reapers end by themselves then, and remove stores.
            _kill([pid for pid in _processes_of(init) if _read(pid, "comm") != b"gear-reaper\n"])
            wait_until(lambda node=node: not self.pids(node, "reaper.py"), "their end")  # type: ignore[misc]
            for left in self.shm(node).glob("deepspeed_allreduce_buffer_*"):
                left.unlink(missing_ok=True)


class NodeRanks(Ranks):
    """Ranks on the first nodes of a cluster, as many on each, without a launcher, in warm
    processes.
    """

    def __init__(
        self, cluster: Cluster, program: Path | str, *arguments: str, nodes: int = 2, ranks: int = 1
    ) -> None:
        self.cluster = cluster
        self.ranks = ranks
        env = {
            "MASTER_ADDR": "10.77.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PATH": rank_environment()["PATH"],
        }
        super().__init__(PROGRAMS / program, nodes * ranks, *arguments, **env)

    def start(self, rank: int, program: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        local = {"LOCAL_RANK": str(rank % self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        node = self.cluster.inits[rank // self.ranks]
        return WarmProcess(
            program, {**env, **local}, subprocess.PIPE, subprocess.STDOUT, inside=node
        )

    def end(self, process: subprocess.Popen[str]) -> None:
        self.cluster.sweep()  # the process itself is only what has entered the namespaces
        process.kill()

    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)


def rank_environment() -> dict[str, str]:
    """Return the environment of ranks, with this interpreter's programs on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return environment(PATH=path)


def _processes_of(init: int) -> Iterator[int]:
    """List the living processes of a node but its process 1."""
    space = os.readlink(f"/proc/{init}/ns/pid")
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and int(entry.name) != init
                and os.readlink(entry / "ns/pid") == space
            ):
                yield int(entry.name)


def _kill(pids: list[int]) -> None:
    """Kill processes and wait until they are gone; a zombie has no command line."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not any(_read(pid, "cmdline") for pid in pids), "the end of killed processes"
    )


def _has_mark(pid: int, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""

"""Pretend machines to measure on: namespaces with links of their own, by
tests/cluster/cluster.sh.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import ROOT

SCRIPT = ROOT / "tests" / "cluster" / "cluster.sh"
INTERFACE = "eth0"
PORT = 29500
_POLL_S = 0.05


def address(node: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{node + 1}"


def why_no_nodes() -> str | None:
    """Return why namespaces cannot be made here: rights or programs that are missing; None if they
    can.
    """
    found = subprocess.run([str(SCRIPT), "check"], capture_output=True, text=True)
    return (
        None if found.returncode == 0 else found.stderr.strip().removeprefix("cluster.sh: error: ")
    )


class Nodes:
    """Nodes that run.

    Args:
        count: How many.
        folder: Where their state goes.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._folder = folder
        self._environment = {**os.environ, "GEAR_CLUSTER_DIR": str(folder / "cluster")}
        self._num_runs = 0

    def script(self, *arguments: str) -> None:
        """Call cluster.sh.

        Raises:
            RuntimeError: It failed; with its text.
        """
        found = subprocess.run(
            [str(SCRIPT), *arguments], env=self._environment, capture_output=True, text=True
        )
        if found.returncode:
            raise RuntimeError(found.stderr.strip())

    def open(self, rank: int, *command: str | Path, **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a node; the options are those of Popen, `env` is added to the
        environment.

        Its children, in the node, end with the node at the latest.
        """
        environment = {**self._environment, **options.pop("env", {})}
        return subprocess.Popen([SCRIPT, "exec", str(rank), *command], env=environment, **options)

    def limit_rate(self, rate: str) -> None:
        """Limit what each node sends, as "10gbit", with a queue of 20 ms."""
        for rank in range(self.count):
            limit = ["root", "tbf", "rate", rate, "burst", "2mb", "latency", "20ms"]
            self.script("exec", str(rank), "tc", "qdisc", "replace", "dev", INTERFACE, *limit)

    def run(
        self, function: str, *arguments: Any, count: int | None = None, limit_s: float = 600.0
    ) -> list[Any]:
        """Call a function on a rank of each node, in fresh processes with a gloo group.

        Args:
            function: "module:name", of a module in benchmarks/.
            *arguments: JSON-able.
            count: On how many of the nodes; None for all.
            limit_s: Longest time.
        Returns:
            What it returned on each rank, as JSON keeps it.
        Raises:
            RuntimeError: A rank failed; with the end of its output.
        """
        count = count or self.count
        self._num_runs += 1
        outs = [self._folder / f"{self._num_runs}.{rank}" for rank in range(count)]
        call = json.dumps([function, arguments])
        processes = []
        for rank, out in enumerate(outs):
            command = [sys.executable, Path(__file__).resolve(), call, out]
            with out.with_suffix(".log").open("wb") as log:
                streams = {"stdout": log, "stderr": subprocess.STDOUT}
                processes.append(
                    self.open(rank, *command, env=self.of_rank(rank, count), **streams)
                )
        try:
            until = time.monotonic() + limit_s
            while any(process.poll() is None for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.poll()]
                if failed or time.monotonic() > until:
                    break
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode:
                text = outs[rank].with_suffix(".log").read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"{function}: node {rank} ended with {process.returncode}:\n{text}"
                )
        return [json.loads(out.read_text()) for out in outs]

    def of_rank(self, rank: int, count: int, port: int | None = None) -> dict[str, str]:
        """Return the environment of a rank: its group's master listens on node 0."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(
                port or PORT + self._num_runs
            ),  # the one before it may be in TIME_WAIT
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        }


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Bring nodes up, and take them down with everything that runs in them."""
    with tempfile.TemporaryDirectory(prefix="gear-exchange-") as folder:
        found = Nodes(count, Path(folder))
        found.script("up", str(count), "1")
        try:
            yield found
        finally:
            found.script("down")


def _work(call: str, out: str) -> None:
    import torch.distributed as dist

    function, arguments = json.loads(call)
    module, name = function.split(":")
    dist.init_process_group("gloo")
    value = getattr(importlib.import_module(module), name)(*arguments)
    Path(out).write_text(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(*sys.argv[1:])

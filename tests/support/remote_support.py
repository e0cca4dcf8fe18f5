"""What the tests of remote writers share: a table, its gateway, and a network that cuts
connections.
"""

import json
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from gear_support import prefix
from process_support import environment
from warm_python import PIPE, WarmProcess

from deepspeed_gear import (
    Column,
    RemoteRolloutWorker,
    RemoteWriter,
    Replay,
    RolloutWorker,
    Schema,
    TrajectoryWriter,
)
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.writer.rollout_worker import LeaseWorker

TOKEN = "0123456789abcdef" * 2
WRONG = "another-token-of-32-characters!!"
STARTED: list[WarmProcess] = []  # which do not outlive their test
SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("terminated", "bool", (), "terminated"),
        Column("half", "bfloat16", (2,)),
        Column("number", "int64"),
        Column("checksum", "uint8", (), "other", "T"),
        Column("weight", "float64", (), "other", "1"),
    ]
)


def trajectory(number: int, steps: int = 250) -> dict[str, Any]:
    """Make the trajectory of a number; the same every time, and unlike all others."""
    drawn = np.random.default_rng(number)
    found = {
        "observation": drawn.standard_normal((steps + 1, 3), np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "half": drawn.integers(0, 0x7F80, (steps, 2), np.uint16),  # the bits of finite values
        "number": np.full(steps, number, np.int64),
        "weight": np.array(float(number + 1)),
    }
    sums = found["half"].astype(np.int64).sum(1) + number
    return {**found, "checksum": (sums % 251).astype(np.uint8)}


def section(**table: Any) -> dict[str, Any]:
    """Return a config whose table takes writers."""
    options = {"capacity_steps": 120_000, "capacity_trajectories": 500, "writers": 2, **table}
    return {
        "tables": {"main": options},
        "sampler": {"kind": "weighted", "weight": "weight"},
        "fields": {"half": {}},
        "batch_size": 1,
        "timeout_s": 2.0,
        "shared_memory": {"prefix": prefix()},
    }


@contextmanager
def served(
    config: dict[str, Any], schema: Schema | None = SCHEMA, **options: Any
) -> Iterator[tuple[Replay, Gateway]]:
    """Run a table and its gateway in this process; without a schema, the config has it."""
    schemas = {} if schema is None else {"main": schema}
    with Replay(config, schemas=schemas) as replay, serving(config, **options) as gateway:
        yield replay, gateway


@contextmanager
def serving(config: dict[str, Any] | str, **options: Any) -> Iterator[Gateway]:
    """Run the gateway of a table that exists."""
    gateway = Gateway(TrajectoryWriter.attach(config), TOKEN, **options)
    over = threading.Event()
    thread = threading.Thread(target=gateway.run, args=(over.is_set,))
    thread.start()
    try:
        yield gateway
    finally:
        over.set()
        thread.join()


def stored(replay: Replay) -> list[dict[str, np.ndarray]]:
    """Return all trajectories of the table, in the order in which they came."""
    table = replay.tables["main"]
    slots = table.slots_of(np.arange(len(replay)))
    return [{name: rows.copy() for name, rows in table.rows(int(slot)).items()} for slot in slots]


def assert_same(found: list[dict[str, np.ndarray]], numbers: range) -> None:
    """Check that these trajectories are stored: each once, to the byte."""
    assert [int(columns["number"][0]) for columns in found] == list(numbers)
    for number, columns in zip(numbers, found, strict=True):
        for name, wanted in trajectory(number, len(columns["number"])).items():
            assert columns[name].tobytes() == np.asarray(wanted).tobytes(), (number, name)


def write_token(path: Path) -> Path:
    """Write the token where only this user reads it."""
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    return path


def write_run(folder: Path, gear: dict[str, Any]) -> tuple[Path, Path]:
    """Write the ds_config.json of a run and its token; return both files."""
    config = folder / "ds_config.json"
    config.write_text(json.dumps({"gear": gear}))
    return config, write_token(folder / "token")


class Proxy:
    """Hands bytes on to a port, and ends all connections after so many bytes both ways, rising.

    Every second cut loses what the port says for a moment before it: what has arrived is not
    answered.
    """

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port = port
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_bytes = self.num_cuts = 0
        self._deaf_until: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in ready.select(0.02):
                    if key.fileobj is self._listener:
                        self._connect(ready)
                    elif key.fd in ready.get_map() and not self._pass_on(key):
                        self._cut(ready)
                if self._deaf_until is not None and time.monotonic() > self._deaf_until:
                    self._cut(ready)
            self._cut(ready)
        self._listener.close()

    def _connect(self, ready: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        ready.register(near, selectors.EVENT_READ, (far, True))
        ready.register(far, selectors.EVENT_READ, (near, False))

    def _pass_on(self, key: selectors.SelectorKey) -> bool:
        """Hand some bytes on; False ends all connections."""
        source: Any = key.fileobj
        target, is_upward = key.data
        left = self._cuts[0] - self.num_bytes if self._cuts else 1 << 16
        try:
            data = source.recv(min(left, 1 << 16))
            if is_upward or self._deaf_until is None:
                target.sendall(data)
        except OSError:
            return False
        self.num_bytes += len(data)
        if self._cuts and self.num_bytes >= self._cuts[0]:
            self._cuts.pop(0)
            self.num_cuts += 1
            if self.num_cuts % 2:
                return False
            self._deaf_until = time.monotonic() + 0.2
        return bool(data)

    def _cut(self, ready: selectors.BaseSelector) -> None:
        self._deaf_until = None
        for key in list(ready.get_map().values()):
            if key.fileobj is not self._listener:
                ready.unregister(key.fileobj)
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """End all connections."""
        self._over.set()
        self._thread.join()


def openssl_certificate(
    folder: Path, address: str = "IP:127.0.0.1", days: int = 2
) -> tuple[Path, Path]:
    """Make a certificate that signs itself, for localhost and an address; one of -1 days has
    expired.
    """
    chain = folder / "cert.pem"
    key = folder / "key.pem"
    request = folder / "request.pem"
    asked = (
        "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -addext"
    ).split()
    asked += [f"subjectAltName=DNS:localhost,{address}", "-keyout", str(key), "-out", str(request)]
    signed = [
        "x509",
        "-req",
        "-in",
        str(request),
        "-signkey",
        str(key),
        "-copy_extensions",
        "copyall",
    ]
    for arguments in (asked, [*signed, "-days", str(days), "-out", str(chain)]):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
    return chain, key


def connect(url: str, **options: Any) -> RemoteWriter:
    return RemoteWriter.connect(url, **{"token": TOKEN, "timeout_s": 20.0, **options})


def attached(url: str | None, config: dict[str, Any], stack: ExitStack) -> LeaseWorker:
    """Return a rollout worker of a gateway's url, or one of the node, which the stack closes."""
    worker: LeaseWorker = (
        RolloutWorker.attach(config)
        if url is None
        else RemoteRolloutWorker.connect(url, token=TOKEN, timeout_s=20.0)
    )
    stack.callback(worker.close)
    return worker


def serve(config: Path, token: Path, *options: str) -> tuple[WarmProcess, str]:
    """Start `gear serve`; return it and its url."""
    command = [
        "-m",
        "deepspeed_gear.cli.main",
        "serve",
        "--config",
        str(config),
        "--token-file",
        str(token),
    ]
    process = WarmProcess([*command, *options], environment(), PIPE)
    STARTED.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving table main at grpc://127.0.0.1:"), line
    return process, line.split()[-1]

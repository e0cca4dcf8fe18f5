"""How fast a remote actor adds, beside one on the node itself and beside a copy.

    python benchmarks/remote.py [--json F] [--quick]

Actor, gateway (`gear serve`) and store are processes of this machine, over loopback: they share its cores,
and no network limits them. Whatever is compared takes turns; a row is the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support import ROOT
from support.report import Disturbance, document, print_table, write_json

from deepspeed_gear import Column, RemoteWriter, Replay, Schema, TrajectoryWriter

TOKEN = "0123456789abcdef" * 2
STEPS = 250
SCHEMA = Schema(
    [
        Column("observation", "float32", (17,), "observation", "T+1"),
        Column("action", "float32", (6,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
    ]
)
Adder = Callable[[int], None]


def section(prefix: str) -> dict[str, Any]:
    """Return a config with a table that the oldest leave."""
    table = {"capacity_steps": 400_000, "capacity_trajectories": 2_000, "writers": 4, "remove": "fifo"}
    return {
        "tables": {"main": table},
        "sampler": {"kind": "uniform"},
        "fields": {"action": {}},
        "batch_size": 1,
        "shared_memory": {"prefix": prefix},
    }


def trajectory() -> dict[str, np.ndarray]:
    """Make a trajectory."""
    shapes = {c.name: (STEPS + (c.rows == "T+1"), *c.shape) for c in SCHEMA}
    return {c.name: np.ones(shapes[c.name], c.numpy_dtype) for c in SCHEMA}


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """Run a gateway; yield its url."""
    command = [
        sys.executable,
        "-m",
        "deepspeed_gear.cli.main",
        "serve",
        "--config",
        str(folder / "config.json"),
    ]
    command += ["--token-file", str(folder / "token"), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


def certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for loopback that signs itself."""
    chain, key = str(folder / "cert.pem"), str(folder / "key.pem")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", chain]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    return chain, key


def copies() -> Adder:
    """Return what copies a trajectory's columns, over and over."""
    source = trajectory()
    target = {name: np.empty_like(rows) for name, rows in source.items()}

    def copy(count: int) -> None:
        for _ in range(count):
            for name, rows in source.items():
                np.copyto(target[name], rows)

    return copy


def adds(writer: TrajectoryWriter | RemoteWriter) -> Adder:
    """Return what adds a trajectory, over and over, until all are stored."""
    source = trajectory()

    def add(count: int) -> None:
        for _ in range(count):
            writer.add(source)
        if isinstance(writer, RemoteWriter):
            writer.flush()

    return add


def measure(adders: dict[str, Adder], count: int, turns: int) -> list[dict[str, Any]]:
    """Time `count` trajectories of each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in adders}
    for _ in range(turns):
        for name, add in adders.items():
            begin = time.perf_counter()
            add(count)
            seconds[name].append(time.perf_counter() - begin)
    size = sum(rows.nbytes for rows in trajectory().values())
    medians = {name: float(np.median(found)) / count for name, found in seconds.items()}
    return [
        {
            "way": name,
            "steps_per_s": round(STEPS / median),
            "mb_per_s": round(size / median / 1e6, 1),
            "us_per_trajectory": round(median * 1e6, 1),
        }
        for name, median in medians.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="F")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    disturbance = Disturbance()
    with tempfile.TemporaryDirectory() as name:
        rows = run(Path(name), *((40, 1) if args.quick else (4_000, 7)))
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if args.json:
        write_json(args.json, document(disturbance, rows))


def run(folder: Path, count: int, turns: int) -> list[dict[str, Any]]:
    """Start everything and measure it."""
    config = section("gearbench")
    (folder / "config.json").write_text(json.dumps({"gear": config}))
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(TOKEN)
    chain, key = certificate(folder)
    tls = ("--tls-cert", chain, "--tls-key", key)
    with (
        Replay(config, schemas={"main": SCHEMA}),
        served(folder) as plain_url,
        served(folder, *tls) as tls_url,
        TrajectoryWriter.attach(config) as local,
        RemoteWriter.connect(plain_url, token=TOKEN) as plain,
        RemoteWriter.connect(tls_url, token=TOKEN, ca=chain) as secured,
    ):
        ways = {
            "copy": copies(),
            "on the node": adds(local),
            "remote": adds(plain),
            "remote, TLS": adds(secured),
        }
        return measure(ways, count, turns)


if __name__ == "__main__":
    main()

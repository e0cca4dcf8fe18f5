"""Prompts leased and groups committed per second by rollout workers, while a rank selects them.

python benchmarks/leases.py [--workers 2] [--remote] [--keep] [--json F] [--quick]
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.report import Report, print_rows

from deepspeed_gear import (
    Column,
    DatasetWriter,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    Schema,
    TrajectoryWriter,
)
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.store.shared_memory import remove_garbage

TOKEN = "0123456789abcdef"
TOKENS = 16  # of a response: the time is that of the account, not of bytes


def section(data: Path, size: int, groups: int, keep: bool) -> dict[str, Any]:
    """Return a gear section of groups of `size` responses."""
    slots = 4 * groups * size
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "reward": {"dtype": "float32", "rows": "1"},
        "prompt": {"dtype": "int64", "rows": "1"},
    }
    table = {
        "capacity_trajectories": slots,
        "capacity_steps": slots * TOKENS,
        "max_length": TOKENS,
        "max_times_sampled": 1,
        "writers": 16,
        "group": {"column": "prompt", "size": size},
        "prompts": {"data": str(data), "max_lag": 2},
        "schema": {"columns": columns},
    }
    return {
        "tables": {"rollouts": table},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 4096},
        "rollout": {"groups": groups},
        "shared_memory": {"prefix": f"leases{os.getpid()}", "keep": keep},
    }


def serve(config: dict[str, Any], url: Any) -> None:
    """Serve remote workers until the run ends."""
    gateway = Gateway(TrajectoryWriter.attach(config), TOKEN)
    url.send(gateway.url)
    gateway.run()


def work(config: dict[str, Any], url: str | None, size: int, count: int, at_once: int) -> None:
    """Lease and commit `count` prompts, through the gateway if there is one."""
    response = {"tokens": np.ones(TOKENS, np.int32), "reward": np.float32(1)}
    attached = (
        RemoteRolloutWorker.connect(url, token=TOKEN) if url else RolloutWorker.attach(config)
    )
    with attached as worker:
        while count > 0:
            for lease in worker.lease(min(at_once, count), timeout_s=60):
                lease.commit([response] * size)
                count -= 1


def measure(
    size: int, at_once: int, workers: int, batches: int, groups: int, remote: bool, keep: bool
) -> dict[str, Any]:
    """Train nothing of so many rollout batches, and time them from the first lease on."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts"
        start = multiprocessing.get_context("fork")
        with DatasetWriter(data, Schema([Column("tokens", "int32", role="token")])) as writer:
            for number in range(1000):
                writer.add({"tokens": np.full(4, number)})
        config = section(data, size, groups, keep)
        with Replay(config) as replay:
            url = None
            gateway = []
            if remote:
                receives, sends = start.Pipe()
                gateway = [start.Process(target=serve, args=(config, sends))]
                gateway[0].start()
                url = receives.recv()
            given = config, url, size, batches * groups // workers, at_once
            children = [start.Process(target=work, args=given) for _ in range(workers)]
            for child in children:
                child.start()
            table = replay.tables["rollouts"]
            while table.ledger is None or not table.ledger.account.report()["issued"]:
                time.sleep(1e-4)
            begin = time.perf_counter()
            for _ in range(batches):
                next(iter(replay.rollout()))  # ends with the loop over its steps
            elapsed_s = time.perf_counter() - begin
            for child in children:
                child.join()
        for child in gateway:
            child.join()
        remove_garbage(config["shared_memory"]["prefix"], kept=True)
    pairs = batches * groups / elapsed_s
    return {"size": size, "at_once": at_once, "pairs_per_s": pairs, "responses_per_s": pairs * size}


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        workers=(2, "rollout workers"),
        remote=(False, "workers lease through a gateway"),
        keep=(False, "in a store that outlives its job"),
    )
    given = report.options
    sizes = (4, 16) if given.quick else (24, 512)
    how = (given.remote, given.keep)
    rows = [measure(size, n, given.workers, *sizes, *how) for size, n in ((1, 1), (1, 64), (8, 16))]
    print_rows(rows)
    report.write(rows)


if __name__ == "__main__":
    main()

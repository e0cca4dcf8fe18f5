"""All ranks and the gateway are killed at any time; workers live on, and the next job has the same
store.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gear_support import prefix
from ledger_support import SIZE, check_books, ledger_section, responses, write_prompts
from process_support import exit_status, free_port, in_child
from remote_support import TOKEN
from rollout_support import micros

from deepspeed_gear import (
    FillWorker,
    LeaseExpiredError,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    TrajectoryWriter,
)
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.sampling.batch_sizes import BatchInfo
from deepspeed_gear.store.shared_memory import remove_garbage

GROUPS = 4
LAST = 9
LAG = 1
LIVES = 5


def write(path: Path, line: Any) -> None:
    with path.open("a") as log:
        log.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def generate(folder: Path, config: dict[str, Any], seed: int, port: int = 0) -> None:
    """Lease, generate for a random time, and commit in any order, over the lives of jobs."""
    words = random.Random(seed)
    url = f"grpc://127.0.0.1:{port}"
    connected = RemoteRolloutWorker.connect(url, token=TOKEN) if port else None
    with connected or RolloutWorker.attach(config) as worker:
        held: list[Any] = []
        while not (folder / "end").exists():
            held += [] if held else worker.lease(3, timeout_s=0.1)
            words.shuffle(held)
            time.sleep(words.expovariate(1 / 0.02))
            if held:
                lease = held.pop()
                with contextlib.suppress(
                    LeaseExpiredError
                ):  # its number was leased again by the next job
                    lease.heartbeat()
                    lease.commit(responses(lease))
                    write(folder / "commits", lease.number)


def serve(config: dict[str, Any], port: int) -> None:
    Gateway(TrajectoryWriter.attach(config), TOKEN, port=port).run()


def fill(folder: Path, config: dict[str, Any]) -> None:
    """Fill rewards, one at a time, over the lives of jobs."""
    with FillWorker.attach(config, "reward") as worker:
        while not (folder / "end").exists():
            for lease in worker.lease(1, timeout_s=0.1):
                lease.fill(1.0)
                write(folder / "fills", [int(lease.columns[name]) for name in ("prompt", "sample")])


def train(folder: Path, rank: int, config: dict[str, Any], life: int, loads: bool) -> None:
    """Train to batch `LAST`, saving now and then; log each batch once it is trained."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{life}", rank=rank, world_size=2)
    with Replay(config, info=BatchInfo(1, 1, 2)) as replay:
        if loads and (folder / "saved" / "position.json").exists():
            replay.load(folder / "saved")
        rollout = None
        while rollout is None or rollout.number < LAST:
            rollout = replay.rollout()
            numbers = rollout.values("prompt")[::SIZE].tolist()
            lags = [rollout.number + 1 - length for length in rollout.lengths[::SIZE].tolist()]
            if rollout.number % 3 == 1 and loads:
                replay.save(folder / "saved")  # while a batch is in training
            micros(rollout)
            if rank == 0:
                check_books(replay)
                write(folder / f"log{life}", [rollout.number, numbers, lags])
        dist.barrier()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loads", [True, False], ids=["from a checkpoint", "from the start"])
def test_no_committed_group_is_generated_again(loads: bool, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 11)
    words = random.Random(loads)
    group = {"group": {"needs": [] if loads else ["reward"]}}
    config = ledger_section(data, {"max_lag": LAG}, GROUPS, writers=4, timeout_s=30.0, **group)
    config["shared_memory"] = {"prefix": f"{prefix()}k{int(loads)}", "keep": True}
    config["pack"]["pad"]["multiple"] = 4
    port = free_port()
    ports = (0 if loads else port, port)  # of workers; 0: of one that is local
    workers = [in_child(lambda n=n: generate(tmp_path, config, n, ports[n])) for n in range(2)]
    workers += [] if loads else [in_child(lambda: fill(tmp_path, config))]
    try:
        for life in itertools.count():
            ranks = [
                in_child(lambda r=rank, n=life: train(tmp_path, r, config, n, loads))
                for rank in range(2)
            ]
            workers.insert(0, in_child(lambda: serve(config, port)))
            batches = words.randint(1, 4)
            until = time.monotonic() + 30
            if life % 2:  # while it starts
                time.sleep(words.random() * 0.4)
            while (
                life % 2 == 0
                and len(read(tmp_path / f"log{life}")) < batches
                and time.monotonic() < until
            ):
                time.sleep(0.01 * words.random())
            if life == LIVES - 1:
                break
            for child in words.sample([*ranks, workers[0]], 3):
                os.kill(child, signal.SIGKILL)
            for child in (*ranks, workers.pop(0)):
                exit_status(child)
        statuses = [exit_status(rank) for rank in ranks]
        assert statuses == [0, 0]
        (tmp_path / "end").touch()
        assert [exit_status(worker) for worker in workers[1:]] == [0] * len(workers[1:])
        commits = read(tmp_path / "commits")
        lives = [read(tmp_path / f"log{n}") for n in range(life + 1)]
        assert len(set(commits)) == len(commits)
        fills = Counter(map(tuple, read(tmp_path / "fills")))
        assert bool(fills) != loads
        assert fills.total() - len(fills) < LIVES  # again: that was under way when a job began
        for line, numbers, lags in itertools.chain(*lives):
            assert numbers == list(range(GROUPS * line, GROUPS * (line + 1)))
            assert max(lags) <= LAG
        assert lives[-1][-1][0] == LAST
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                exit_status(worker)
        remove_garbage(config["shared_memory"]["prefix"], kept=True)

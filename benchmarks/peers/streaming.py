"""MosaicML Streaming: epochs of a data set of shards on ranks that are processes, and windows of
its rows.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from speed import work
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

from peers.interface import Buffer, Rows, System

COLUMNS = {
    "observation": f"ndarray:float32:{work.EPISODE},{work.OBSERVATION}",
    "action": f"ndarray:float32:{work.EPISODE},{work.ACTION}",
    "reward": f"ndarray:float32:{work.EPISODE}",
    "done": f"ndarray:uint8:{work.EPISODE}",  # there is no bool
}


def write(count: int, folder: Path) -> None:
    with MDSWriter(columns=COLUMNS, out=str(folder / "shards")) as writer:
        for rows in work.trajectories(count // work.EPISODE):
            writer.write({**rows, "done": rows["done"].view(np.uint8)})


class Stored(Buffer):
    def __init__(self, count: int, batch: int, length: int, folder: Path) -> None:
        self._data = StreamingDataset(local=str(folder / "shards"), batch_size=batch)
        self._batch = batch
        self._length = length
        self._random = np.random.default_rng(0)

    def sample(self) -> Any:
        numbers = self._random.integers(self._data.num_samples, size=self._batch)
        firsts = self._random.integers(work.EPISODE - self._length + 1, size=self._batch)
        windows = []
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            trajectory = self._data[number]
            windows.append([trajectory[name][first : first + self._length] for name in COLUMNS])
        columns = zip(*windows, strict=True)
        return {name: np.stack(parts) for name, parts in zip(COLUMNS, columns, strict=True)}

    def rows(self, found: Any) -> Rows:
        return dict(found)


# ---- epochs --------------------------------------------------------------------------------------


def _write(folder: str, count: int) -> None:
    with MDSWriter(out=folder, columns={"number": "int"}) as writer:
        for number in range(count):
            writer.write({"number": number})


def _loader(folder: str, batch: int, workers: int) -> Any:
    dataset = StreamingDataset(local=folder, batch_size=batch, shuffle=True)
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)


def _rank(
    rank: int, ranks: int, port: int, job: tuple[str, int, int, int], holds: bool, results: Any
) -> None:
    os.setsid()  # a group of its own, with its helpers
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    folder, batch, used, workers = job
    loader = _loader(folder, batch, workers)
    batches = iter(loader)
    taken = [next(batches) for _ in range(used)]
    if holds:
        results.put((rank, len(taken)))
        time.sleep(1000)  # until it is killed
    if used:
        state = loader.state_dict()
        loader = _loader(folder, batch, workers)
        loader.load_state_dict(state)
        batches = iter(loader)
    results.put(
        (rank, [int(number) for taken in batches for number in np.atleast_1d(taken["number"])])
    )


def _start(
    ranks: int, job: tuple[str, int, int, int], holds: bool = False
) -> tuple[list[Any], dict[int, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    given = [(rank, ranks, port, job, holds, results) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=arguments) for arguments in given]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < ranks:
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank ended with an error")
        if not results.empty():
            found.update([results.get()])
        time.sleep(0.05)
    return processes, found


class Streaming(System):
    def epoch(
        self, count: int, batch: int, ranks: int, used: int, workers: int = 0
    ) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as folder:
            _write(folder, count)
            processes, found = _start(ranks, (folder, batch, used, workers))
            for process in processes:
                process.join()
        return [found[rank] for rank in range(ranks)]

    def restart(self) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as folder:
            _write(folder, 10)
            held, _ = _start(2, (folder, 1, 1, 0), holds=True)
            for process in held:
                os.killpg(process.pid, signal.SIGKILL)
            processes, found = _start(2, (folder, 1, 0, 0))
            for process in [*held, *processes]:
                process.join()
        return [found[rank] for rank in range(2)]


SYSTEM = Streaming("mosaicml-streaming", write=write, stored=Stored)

"""Reverb: a server with one table in this process, and its client."""

from __future__ import annotations

import multiprocessing
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import reverb

from peers.interface import (
    Array,
    Moment,
    NotOfferedError,
    Sampled,
    StepBuffer,
    Steps,
    System,
    Window,
    WindowBuffer,
    Windows,
)
from peers.reverb_reader import TABLE, Reader


class ReverbSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        self._need = need
        self._open()

    def _open(self, folder: Path | None = None) -> None:
        need = self._need
        alpha = need.alpha if need.prioritized else None
        self._reader = Reader(need.capacity, alpha, need.batch, [[1]] * 4, folder)
        self._writer = self._reader.client.trajectory_writer(num_keep_alive_refs=1)

    def add(self, moment: Moment) -> None:
        columns = (moment.obs, moment.next_obs, moment.reward, moment.terminated.astype(np.float32))
        for row in zip(*columns, strict=True):
            self._writer.append(row)
            self._writer.create_item(TABLE, 1.0, tuple(column[-1:] for column in self._writer.history))
        self._writer.flush()
        self._reader.changed()

    def sample(self) -> Sampled:
        need, found = self._need, self._reader.next()
        obs, next_obs, reward, terminated = (column.numpy()[:, 0] for column in found.data)
        weight = (found.info.probability.numpy() * found.info.table_size.numpy()) ** -need.beta
        keys = found.info.key.numpy().tolist()
        return Sampled(obs, next_obs, reward, need.gamma * (1 - terminated), weight / weight.max(), keys)

    def update(self, sampled: Sampled, priorities: Array) -> None:
        reported = dict(zip(sampled.handle, priorities.tolist(), strict=True))
        self._reader.client.mutate_priorities(TABLE, updates=reported)
        self._reader.changed()

    def __len__(self) -> int:
        return int(self._reader.client.server_info()[TABLE].current_size)

    def save(self, folder: Path) -> None:
        made = self._reader.client.checkpoint()
        if self._reader.folder != folder:  # the server's own folder: it goes on with the one of the save
            shutil.copytree(made, folder / Path(made).name)
            self.load(folder)

    def load(self, folder: Path) -> None:
        self.close()
        self._open(folder)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()


class ReverbWindows(WindowBuffer):
    def __init__(self, need: Windows) -> None:
        if not need.whole:
            raise NotOfferedError
        self._length = need.length
        self._reader = Reader(need.capacity, None, need.batch, [[need.length]])

    def add(self, obs: Array) -> None:
        length = self._length
        with self._reader.client.trajectory_writer(num_keep_alive_refs=length) as writer:
            for number, value in enumerate(obs):
                writer.append((value,))
                if number + 1 >= length:
                    writer.create_item(TABLE, 1.0, (writer.history[0][-length:],))
            writer.end_episode()
        self._reader.changed()

    def sample(self) -> Window:
        obs = self._reader.next().data[0].numpy()
        return Window(obs, np.ones(obs.shape, bool))

    def close(self) -> None:
        self._reader.close()


def _draw(port: int, batches: int, results: Any) -> None:
    client = reverb.Client(f"localhost:{port}")
    found = [one[0].data[0] for one in client.sample(TABLE, num_samples=64 * batches)]
    results.put(np.array(found).astype(np.int64))


class Reverb(System):
    name = "Reverb"
    forks = False  # a worker makes a client of its own

    def version(self) -> str:
        return version("dm-reverb")

    def steps(self, need: Steps) -> StepBuffer:
        return ReverbSteps(need)

    def windows(self, need: Windows) -> WindowBuffer:
        return ReverbWindows(need)

    def shared(self, priorities: Array, processes: int, batches: int) -> list[Array]:
        reader = Reader(len(priorities), 1.0, 64, [[]])
        for number, priority in enumerate(priorities.tolist()):
            reader.client.insert((np.float32(number),), priorities={TABLE: priority})
        port, context = reader.server.port, multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        workers = [context.Process(target=_draw, args=(port, batches, results)) for _ in range(processes)]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=100) for _ in workers]
        reader.close()
        return found


SYSTEM = Reverb()

"""Reverb: a server with one table in this process, and its client."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

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

TABLE = "main"


WAIT_MS = 1000  # an empty table makes a reader wait; here no longer than this


class Reader:
    """A table and its `TrajectoryDataset`; another iterator after each change, as iterators read ahead."""

    def __init__(self, capacity: int, alpha: float | None, batch: int, shapes: list[list[int]]) -> None:
        sampler = reverb.selectors.Uniform() if alpha is None else reverb.selectors.Prioritized(alpha)
        limiter = reverb.rate_limiters.MinSize(1)
        signature = tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
        table = reverb.Table(TABLE, sampler, reverb.selectors.Fifo(), capacity, limiter, signature=signature)
        self.server = reverb.Server([table], port=None)
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self._batches = reverb.TrajectoryDataset.from_table_signature(
            self.client.server_address,
            TABLE,
            max_in_flight_samples_per_worker=batch,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=WAIT_MS,
        ).batch(batch)
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """Return a batch of what is in the table now."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
        for found in self._iterator:
            return found
        self._iterator = None
        raise TimeoutError(f"the table has had no item for {WAIT_MS} ms")

    def changed(self) -> None:
        self._iterator = None

    def close(self) -> None:
        self._iterator = None
        self.server.stop()


class ReverbSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        self._need = need
        self._reader = Reader(need.capacity, need.alpha if need.prioritized else None, need.batch, [[1]] * 4)
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
        _port, context = reader.server.port, multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        workers = [
            context.Process(target=_draw, args=(reader.server.port, batches, results))
            for _ in range(processes)
        ]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=100) for _ in workers]
        reader.close()
        return found


SYSTEM = Reverb()

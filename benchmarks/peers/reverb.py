"""Reverb: one server and its client in this process, as with any number of clients.

Cases take batches of its `TrajectoryDataset`; the comparison of speed samples by the client, which
is faster.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from speed import work

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System, Windows

TABLE = "main"
WAIT_MS = 1000  # an empty table makes a reader wait; here no longer than this
MOST_ITEMS = 20_000  # single steps or windows as items; more of them take minutes to insert
STATE = ("observation", "next_observation", "reward", "done")


def table_of(name: str, capacity: int, alpha: float | None, signature: Any = None) -> Any:
    """Return a table of the newest items, with priorities or without."""
    selectors = reverb.selectors
    limiter = reverb.rate_limiters.MinSize(1)
    sampler = selectors.Uniform() if alpha is None else selectors.Prioritized(alpha)
    return reverb.Table(name, sampler, selectors.Fifo(), capacity, limiter, signature=signature)


class Served(Buffer):
    """A buffer whose table is on a server of its own.

    Args:
        capacity: Items.
        alpha: Exponent of priorities; None: draws are uniform.
        signature: Of a table that a dataset reads.
        folder: The server's checkpoints, of which it begins with the newest.
    """

    def serve(
        self, capacity: int, alpha: float | None, signature: Any = None, folder: Path | None = None
    ) -> None:
        keeper = None if folder is None else reverb.checkpointers.DefaultCheckpointer(str(folder))
        table = table_of(TABLE, capacity, alpha, signature)
        self.server = reverb.Server([table], port=None, checkpointer=keeper)
        self.folder = folder
        self.client = reverb.Client(f"localhost:{self.server.port}")

    def __len__(self) -> int:
        return int(self.client.server_info()[TABLE].current_size)

    def close(self) -> None:
        self.server.stop()


# ---- for cases -----------------------------------------------------------------------------------


class ReverbData(Served):
    """Batches of the `TrajectoryDataset`; another iterator after each change, as iterators read
    ahead.
    """

    def read(
        self,
        capacity: int,
        alpha: float | None,
        batch: int,
        shapes: list[list[int]],
        folder: Path | None,
    ) -> None:
        """Serve items with columns of these shapes."""
        signature = tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
        self.serve(capacity, alpha, signature, folder)
        self._batches = reverb.TrajectoryDataset.from_table_signature(
            self.client.server_address,
            TABLE,
            max_in_flight_samples_per_worker=batch,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=WAIT_MS,
        ).batch(batch)
        self._iterator: Iterator[Any] | None = None

    def sample(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._batches)
        for found in self._iterator:
            return found
        self._iterator = None
        raise TimeoutError(f"the table has had no item for {WAIT_MS} ms")

    def close(self) -> None:
        self._iterator = None
        super().close()


class ReverbSteps(ReverbData):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        self._need = need
        self._open()

    def _open(self, folder: Path | None = None) -> None:
        need = self._need
        alpha = need.alpha if need.prioritized else None
        self.read(need.capacity, alpha, need.batch, [[1, 1], [1, 1], [1], [1]], folder)
        self._writer = self.client.trajectory_writer(num_keep_alive_refs=1)

    def add(self, rows: Rows) -> None:
        columns = [rows[name].astype(np.float32) for name in STATE]
        for row in zip(*columns, strict=True):
            self._writer.append(row)
            self._writer.create_item(
                TABLE, 1.0, tuple(column[-1:] for column in self._writer.history)
            )
        self._writer.flush()
        self._iterator = None

    def rows(self, found: Any) -> Rows:
        rows = {name: column.numpy()[:, 0] for name, column in zip(STATE, found.data, strict=True)}
        info = found.info
        weight = (info.probability.numpy() * info.table_size.numpy()) ** -self._need.beta
        return {**rows, "weight": weight / weight.max()}

    def update(self, found: Any, priorities: Array) -> None:
        keys = found.info.key.numpy().tolist()
        self.client.mutate_priorities(
            TABLE, updates=dict(zip(keys, priorities.tolist(), strict=True))
        )
        self._iterator = None

    def save(self, folder: Path) -> None:
        made = self.client.checkpoint()
        if self.folder != folder:  # the server's own folder: it goes on with the one of the save
            shutil.copytree(made, folder / Path(made).name)
            self.load(folder)

    def load(self, folder: Path) -> None:
        self.close()
        self._open(folder)

    def close(self) -> None:
        self._writer.close()
        super().close()


class ReverbWindows(ReverbData):
    def __init__(self, need: Windows) -> None:
        if not need.whole:
            raise NotOfferedError
        self._length = need.length
        self.read(need.capacity, None, need.batch, [[need.length]], None)

    def add(self, rows: Rows) -> None:
        length = self._length
        with self.client.trajectory_writer(num_keep_alive_refs=length) as writer:
            for number, value in enumerate(rows["observation"]):
                writer.append((value,))
                if number + 1 >= length:
                    writer.create_item(TABLE, 1.0, (writer.history[0][-length:],))
            writer.end_episode()
        self._iterator = None

    def rows(self, found: Any) -> Rows:
        return {"observation": found.data[0].numpy()}


class Numbers(ReverbData):
    """Items that are their number."""

    def __init__(self, priorities: Array) -> None:
        self.read(len(priorities), 1.0, 64, [[]], None)
        for number, priority in enumerate(priorities.tolist()):
            self.client.insert((np.float32(number),), priorities={TABLE: priority})

    def rows(self, found: Any) -> Rows:
        return {"number": found.data[0].numpy()}


def _draw(port: int, batches: int, results: Any) -> None:
    client = reverb.Client(f"localhost:{port}")
    found = [one[0].data[0] for one in client.sample(TABLE, num_samples=64 * batches)]
    results.put(np.array(found).astype(np.int64))


# ---- for the comparison of speed -----------------------------------------------------------------


class ReverbBatches(Served):
    def __init__(
        self, capacity: int, batch: int, prioritized: bool = False, client: Any = None
    ) -> None:
        self._batch = batch
        self.count = capacity
        self._table = TABLE
        self.server = None
        if client is None:
            self.serve(capacity, 0.6 if prioritized else None)
        else:
            self.client = client

    def of(self, table: str, names: Iterable[str]) -> ReverbBatches:
        """Take another table of the server, with these columns."""
        self._table = table
        self._names = sorted(names)
        return self

    def insert(self, parts: Any, length: int) -> None:
        """Insert trajectories, and an item for every window of so many steps."""
        names: list[str] = []
        with self.client.trajectory_writer(num_keep_alive_refs=length) as writer:
            for rows in parts:
                names = list(rows)
                for at in range(len(rows[names[0]])):
                    writer.append({name: values[at] for name, values in rows.items()})
                    if at + 1 >= length:
                        window = {name: writer.history[name][-length:] for name in names}
                        writer.create_item(self._table, 1.0, window)
                writer.end_episode()
        self._names = sorted(names)

    def sample(self) -> Any:
        found = list(self.client.sample(self._table, num_samples=self._batch, emit_timesteps=False))
        return found, [np.stack(rows) for rows in zip(*(one.data for one in found), strict=True)]

    def update(self, found: Any, priorities: Array) -> None:
        keys = [one.info.key for one in found[0]]
        self.client.mutate_priorities(
            self._table, updates=dict(zip(keys, priorities.tolist(), strict=True))
        )

    def rows(self, found: Any) -> Rows:
        return dict(zip(self._names, found[1], strict=True))

    def close(self) -> None:
        if self.server is not None:
            super().close()


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Buffer:
    count = min(count, MOST_ITEMS)
    made = ReverbBatches(count, batch, prioritized)
    made.insert((work.steps(first, work.EPISODE) for first in range(0, count, work.EPISODE)), 1)
    return made


def windows(count: int, batch: int, length: int) -> Buffer:
    count = min(count, MOST_ITEMS if length < work.EPISODE else 10 * MOST_ITEMS)
    made = ReverbBatches(count, batch)
    made.insert(work.trajectories(count // work.EPISODE), length)
    return made


def frames(count: int, batch: int, length: int) -> Buffer:
    made = ReverbBatches(count, batch)
    made.insert(work.frames(count // 500, 500), length)
    return made


class ReverbAdding(ReverbBatches):
    """Steps of environments, each of which has a writer."""

    def __init__(self, num_envs: int, capacity: int) -> None:
        super().__init__(capacity, 256)
        self._writers = [
            self.client.trajectory_writer(num_keep_alive_refs=1) for _ in range(num_envs)
        ]

    def add(self, rows: Rows) -> None:
        ends = rows["done"] | rows["truncated"]
        for env, writer in enumerate(self._writers):
            writer.append({name: values[env] for name, values in rows.items()})
            writer.create_item(TABLE, 1.0, {name: writer.history[name][-1:] for name in rows})
            writer.flush(block_until_num_items=64)
            if ends[env]:
                writer.end_episode(clear_buffers=False)

    def held(self) -> int:
        for writer in self._writers:
            writer.flush()
        return len(self)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        super().close()


def calls(capacity: int) -> Buffer:
    return ReverbAdding(1, capacity)


class ReverbWhole(ReverbBatches):
    """Trajectories as one item each."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity // work.EPISODE, 1)
        self._writer = self.client.trajectory_writer(num_keep_alive_refs=work.EPISODE)

    def add(self, rows: Rows) -> None:
        writer = self._writer
        for at in range(work.EPISODE):
            writer.append({name: values[at] for name, values in rows.items()})
        writer.create_item(
            TABLE, 1.0, {name: writer.history[name][-work.EPISODE :] for name in rows}
        )
        writer.end_episode()

    def close(self) -> None:
        self._writer.close()
        super().close()


class Reverb(System):
    forks = False  # a worker makes a client of its own
    steps = ReverbSteps
    windows = ReverbWindows

    def shared(self, priorities: Array, processes: int, batches: int) -> list[Array]:
        held = Numbers(priorities)
        context = multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        arguments = held.server.port, batches, results
        workers = [context.Process(target=_draw, args=arguments) for _ in range(processes)]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=100) for _ in workers]
        held.close()
        return found


SYSTEM = Reverb(
    "dm-reverb",
    transitions=transitions,
    windows=windows,
    frames=frames,
    adding=ReverbAdding,
    calls=calls,
    whole=ReverbWhole,
)

"""Reverb: one server and its client in this process, as with any number of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version as version_of
from typing import Any

import numpy as np
import reverb

from speed import work
from speed.work import Adding, Array, Batches, Rows

TABLE = "main"
MOST_ITEMS = 20_000  # single steps or windows as items; more of them take minutes to insert


def version() -> str:
    return version_of("dm-reverb")


def _serve(capacity: int, prioritized: bool, folder: str | None = None) -> tuple[Any, Any]:
    sampler = reverb.selectors.Prioritized(0.6) if prioritized else reverb.selectors.Uniform()
    table = reverb.Table(TABLE, sampler, reverb.selectors.Fifo(), capacity, reverb.rate_limiters.MinSize(1))
    checkpointer = None if folder is None else reverb.checkpointers.DefaultCheckpointer(folder)
    server = reverb.Server([table], port=None, checkpointer=checkpointer)
    return server, reverb.Client(f"localhost:{server.port}")


class ReverbBatches(Batches):
    def __init__(self, capacity: int, batch: int, prioritized: bool = False, client: Any = None) -> None:
        self._batch, self.count, self._table = batch, capacity, TABLE
        self._server, self._client = (None, client) if client else _serve(capacity, prioritized)

    def of(self, table: str, names: Iterable[str]) -> ReverbBatches:
        """Take another table of the server, with these columns."""
        self._table, self._names = table, sorted(names)
        return self

    def insert(self, parts: Any, length: int, period: int) -> None:
        """Insert trajectories, and an item for every `period`-th window of so many steps."""
        names: list[str] = []
        with self._client.trajectory_writer(num_keep_alive_refs=length) as writer:
            for rows in parts:
                names = list(rows)
                for at in range(len(rows[names[0]])):
                    writer.append({name: values[at] for name, values in rows.items()})
                    if at + 1 >= length and (at + 1 - length) % period == 0:
                        window = {name: writer.history[name][-length:] for name in names}
                        writer.create_item(self._table, 1.0, window)
                writer.end_episode()
        self._names = sorted(names)

    def sample(self) -> Any:
        found = list(self._client.sample(self._table, num_samples=self._batch, emit_timesteps=False))
        return found, [np.stack(rows) for rows in zip(*(one.data for one in found), strict=True)]

    def update(self, found: Any, priorities: Array) -> None:
        keys = [one.info.key for one in found[0]]
        self._client.mutate_priorities(self._table, updates=dict(zip(keys, priorities.tolist(), strict=True)))

    def rows(self, found: Any) -> Rows:
        return dict(zip(self._names, found[1], strict=True))

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    count = min(count, MOST_ITEMS)
    made = ReverbBatches(count, batch, prioritized)
    made.insert((work.steps(first, work.EPISODE) for first in range(0, count, work.EPISODE)), 1, 1)
    return made


def windows(count: int, batch: int, length: int) -> Batches:
    count = min(count, MOST_ITEMS if length < work.EPISODE else 10 * MOST_ITEMS)
    made = ReverbBatches(count, batch)
    made.insert(work.trajectories(count // work.EPISODE), length, 1)
    return made


def frames(count: int, batch: int, length: int) -> Batches:
    made = ReverbBatches(count, batch)
    made.insert(work.frames(count // 500, 500), length, 1)
    return made


class ReverbAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._server, self._client = _serve(capacity, False)
        self._writers = [self._client.trajectory_writer(num_keep_alive_refs=1) for _ in range(num_envs)]

    def add(self, step: Rows) -> None:
        ends = step["truncated"]
        for env, writer in enumerate(self._writers):
            writer.append({name: values[env] for name, values in step.items()})
            writer.create_item(TABLE, 1.0, {name: writer.history[name][-1:] for name in step})
            writer.flush(block_until_num_items=64)
            if ends[env]:
                writer.end_episode(clear_buffers=False)

    def sample(self) -> Any:
        found = list(self._client.sample(TABLE, num_samples=256, emit_timesteps=False))
        return [np.stack(rows) for rows in zip(*(one.data for one in found), strict=True)]

    def held(self) -> int:
        for writer in self._writers:
            writer.flush()
        return int(self._client.server_info()[TABLE].current_size)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._server.stop()


adding = ReverbAdding


def whole(capacity: int) -> tuple[Callable[[Rows], None], Callable[[], None]]:
    server, client = _serve(capacity // work.EPISODE, False)
    writer = client.trajectory_writer(num_keep_alive_refs=work.EPISODE)

    def add(rows: Rows) -> None:
        for at in range(work.EPISODE):
            writer.append({name: values[at] for name, values in rows.items()})
        writer.create_item(TABLE, 1.0, {name: writer.history[name][-work.EPISODE :] for name in rows})
        writer.end_episode()

    def close() -> None:
        writer.close()
        server.stop()

    return add, close

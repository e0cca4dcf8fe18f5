"""Reverb: a server with one table in this process, and its client."""

from __future__ import annotations

import multiprocessing
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

TABLE = "main"


def _serve(capacity: int, alpha: float | None, folder: str | None = None) -> tuple[Any, Any]:
    sampler = reverb.selectors.Uniform() if alpha is None else reverb.selectors.Prioritized(alpha)
    table = reverb.Table(TABLE, sampler, reverb.selectors.Fifo(), capacity, reverb.rate_limiters.MinSize(1))
    checkpointer = None if folder is None else reverb.checkpointers.DefaultCheckpointer(folder)
    server = reverb.Server([table], port=None, checkpointer=checkpointer)
    return server, reverb.Client(f"localhost:{server.port}")


class ReverbSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        self._need, self._alpha = need, need.alpha if need.prioritized else None
        self._server, self._client = _serve(need.capacity, self._alpha)

    def add(self, moment: Moment) -> None:
        columns = (moment.obs, moment.next_obs, moment.reward, moment.terminated)
        for row in zip(*columns, strict=True):
            self._client.insert(list(row), priorities={TABLE: 1.0})

    def sample(self) -> Sampled:
        need = self._need
        found = [sample[0] for sample in self._client.sample(TABLE, num_samples=need.batch)]
        obs, next_obs, reward, terminated = (np.array([one.data[k] for one in found]) for k in range(4))
        chance = np.array([one.info.probability * one.info.table_size for one in found])
        weight = chance**-need.beta
        keys = [one.info.key for one in found]
        return Sampled(obs, next_obs, reward, need.gamma * (1 - terminated), weight / weight.max(), keys)

    def update(self, sampled: Sampled, priorities: Array) -> None:
        reported = dict(zip(sampled.handle, priorities.tolist(), strict=True))
        self._client.mutate_priorities(TABLE, updates=reported)

    def __len__(self) -> int:
        return int(self._client.server_info()[TABLE].current_size)

    def save(self, folder: Path) -> None:
        self.close()
        raise NotOfferedError

    def close(self) -> None:
        self._server.stop()


class ReverbWindows(WindowBuffer):
    def __init__(self, need: Windows) -> None:
        if not need.whole:
            raise NotOfferedError
        self._need = need
        self._server, self._client = _serve(need.capacity, None)

    def add(self, obs: Array) -> None:
        length = self._need.length
        with self._client.trajectory_writer(num_keep_alive_refs=length) as writer:
            for number, value in enumerate(obs):
                writer.append({"obs": value})
                if number + 1 >= length:
                    writer.create_item(TABLE, 1.0, {"obs": writer.history["obs"][-length:]})
            writer.end_episode()

    def sample(self) -> Window:
        found = self._client.sample(TABLE, num_samples=self._need.batch, emit_timesteps=False)
        obs = np.stack([one.data[0] for one in found])
        return Window(obs, np.ones(obs.shape, bool))

    def close(self) -> None:
        self._server.stop()


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
        server, client = _serve(len(priorities), 1.0)
        for number, priority in enumerate(priorities.tolist()):
            client.insert([np.float32(number)], priorities={TABLE: priority})
        context = multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        workers = [
            context.Process(target=_draw, args=(server.port, batches, results)) for _ in range(processes)
        ]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=100) for _ in workers]
        server.stop()
        return found


SYSTEM = Reverb()

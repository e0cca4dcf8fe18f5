"""Reverb: one server, and a client in each trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import reverb

from speed import team, work
from speed.systems.reverb import ReverbBatches
from speed.work import Batches, NotOfferedError

TIMED = "timed"
MOST_ITEMS, MOST_BATCH = 20_000, 1000  # more take minutes


def _table(name: str, capacity: int, alpha: float) -> Any:
    selectors = reverb.selectors
    limiter = reverb.rate_limiters.MinSize(1)
    return reverb.Table(name, selectors.Prioritized(alpha), selectors.Fifo(), capacity, limiter)


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        count = min(count, MOST_ITEMS)
        known = [str(trainers) for trainers in range(2, team.MOST + 1)]
        tables = [_table(TIMED, count, 0.6), *(_table(name, team.ITEMS, 1.0) for name in known)]
        self._server = reverb.Server(tables, port=None)
        self.given = f"localhost:{self._server.port}"
        client = reverb.Client(self.given)
        filler = ReverbBatches(count, 1, client=client).of(TIMED, ())
        filler.insert((work.steps(first, work.EPISODE) for first in range(0, count, work.EPISODE)), 1, 1)
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for number in range(team.ITEMS):
                writer.append({"number": np.int64(number)})
                for name in known:
                    item = {"number": writer.history["number"][-1:]}
                    writer.create_item(name, float(team.SHARES[number]), item)

    def close(self) -> None:
        self._server.stop()


share = Shared


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        self._client = reverb.Client(given)

    def open(self, is_timed: bool, trainers: int, batch: int) -> Batches:
        if batch > MOST_BATCH:
            raise NotOfferedError("a batch takes over a second")
        table, names = (TIMED, work.steps(0, 1)) if is_timed else (str(trainers), ["number"])
        return ReverbBatches(0, batch, client=self._client).of(table, names)

"""Reverb: one server, and a client in each trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import reverb
from peers.interface import Buffer, NotOfferedError
from peers.reverb import MOST_ITEMS, ReverbBatches, table_of

from speed import team, work

TIMED = "timed"
MOST_BATCH = 1000  # a larger one takes seconds


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        count = min(count, MOST_ITEMS)
        known = [str(trainers) for trainers in range(2, team.MOST + 1)]
        tables = [table_of(TIMED, count, 0.6), *(table_of(name, team.ITEMS, 1.0) for name in known)]
        self._server = reverb.Server(tables, port=None)
        self.given = f"localhost:{self._server.port}"
        client = reverb.Client(self.given)
        filler = ReverbBatches(count, 1, client=client).of(TIMED, ())
        filler.insert(
            (work.steps(first, work.EPISODE) for first in range(0, count, work.EPISODE)), 1
        )
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for number in range(team.ITEMS):
                writer.append({"number": np.int64(number)})
                for name in known:
                    item = {"number": writer.history["number"][-1:]}
                    writer.create_item(name, float(team.SHARES[number]), item)

    def close(self) -> None:
        self._server.stop()


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        self._client = reverb.Client(given)

    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        if batch > MOST_BATCH:
            raise NotOfferedError("a batch takes over a second")
        table, names = (TIMED, work.steps(0, 1)) if is_timed else (str(trainers), ["number"])
        return ReverbBatches(0, batch, client=self._client).of(table, names)

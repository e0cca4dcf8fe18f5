"""Reverb: a server with one table in this process, its client and its dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reverb
import tensorflow as tf

TABLE = "main"
WAIT_MS = 1000  # an empty table makes a reader wait; here no longer than this


class Reader:
    """A table and its `TrajectoryDataset`; another iterator after each change, as iterators read ahead.

    Args:
        shapes: Of the columns of an item.
        folder: The server's checkpoints, of which it begins with the newest.
    """

    def __init__(
        self,
        capacity: int,
        alpha: float | None,
        batch: int,
        shapes: list[list[int]],
        folder: Path | None = None,
    ) -> None:
        sampler = reverb.selectors.Uniform() if alpha is None else reverb.selectors.Prioritized(alpha)
        limiter = reverb.rate_limiters.MinSize(1)
        signature = tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
        table = reverb.Table(TABLE, sampler, reverb.selectors.Fifo(), capacity, limiter, signature=signature)
        keeper = None if folder is None else reverb.checkpointers.DefaultCheckpointer(str(folder))
        self.server, self.folder = reverb.Server([table], port=None, checkpointer=keeper), folder
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

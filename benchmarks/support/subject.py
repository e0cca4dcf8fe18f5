"""What is timed: the memcpy limit, the op, a whole sample() and torch's own gather, over the same
rows.
"""

from __future__ import annotations

import numpy as np
import torch

from support.limit import CopyLimit
from support.turns import Times, timed
from support.workloads import Workload
from deepspeed_gear.batching.gather import Gatherer, GatherOptions

# words of a resolution, ops/csrc/common/slot.h
FIRST_ROW = 3
ANCHOR = 5
_POOL_BYTES = 240e6  # batches that are rotated over: more than any cache holds, as in training
_MOST_BATCHES = 4096
RING = 2  # batches in a Replay's ring without accumulation and prefetch


class Subject:
    """A Replay over a workload, and the same batches for everything that is compared with it.
    Collective.

    All kinds read the same store. `sample` writes into the ring of the Replay, the others into one
    of equal size that they share.

    Args:
        workload: What is stored.
        window: Which window of it.
        batch_size: Samples of a batch, all ranks together.
        seed: Of the order in which batches are taken.
    """

    def __init__(self, workload: Workload, window: str, batch_size: int, seed: int = 0) -> None:
        self.replay = workload.replay(window, batch_size)
        offset, self.length = workload.window(window)
        size = batch_size * self.length * workload.schema.row_bytes
        self.batch_bytes = size
        count = int(min(_MOST_BATCHES, max(8, _POOL_BYTES / size)))
        self._pool = torch.stack([self._records(self.replay.sample()) for _ in range(count)])
        first = self._pool[:, :, FIRST_ROW] + (self._pool[:, :, ANCHOR] + offset).clamp(min=0)
        self._first_rows = first.numpy()
        table = self.replay.tables["main"]
        self._columns = [table.tensor(column.name) for column in workload.schema]
        micro = self.replay.batch_info.micro
        options = GatherOptions(self.replay.fields, {}, None, micro, torch.float32, 1)
        self._gatherer = Gatherer(options, table, RING)
        self.ring = self._gatherer.ring
        self._limit = CopyLimit(self._columns, [buffers.outs for buffers in self.ring], self.length)
        self.random = np.random.default_rng(seed)

    @staticmethod
    def _records(batch: object) -> torch.Tensor:
        return batch.host_resolutions.clone()  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        self.replay.close()

    def _choose(self, count: int) -> list[int]:
        return [int(i) for i in self.random.integers(0, len(self._pool), count)]

    def limit(self, count: int) -> Times:
        """Copy batches by memcpy."""
        return self._limit.run(np.ascontiguousarray(self._first_rows[self._choose(count)]))

    def op(self, count: int) -> Times:
        """Gather batches by the op alone: fields and masks."""
        records = self._pool[0].clone()
        chosen = self._choose(count)
        fill = self._gatherer.fill
        # A selection has just written its resolutions when they are gathered: they are in the
        # cache.
        return timed(
            lambda turn: fill(self.ring[turn % RING], records),
            count,
            lambda turn: records.copy_(self._pool[chosen[turn]]),
        )

    def sample(self, count: int) -> Times:
        """Sample batches: selection, the op, and everything around them."""
        return timed(lambda _: self.replay.sample(), count)

    def index_select(self, count: int) -> Times:
        """Gather the same rows by torch.index_select(out=), a call per column; without masks."""
        steps = torch.arange(self.length)
        rows = [
            (torch.from_numpy(self._first_rows[i])[:, None] + steps).reshape(-1)
            for i in self._choose(count)
        ]
        outs = [[out.view(-1, *out.shape[2:]) for out in buffers.outs] for buffers in self.ring]

        def run(turn: int) -> None:
            for column, out in zip(self._columns, outs[turn % len(outs)], strict=True):
                torch.index_select(column, 0, rows[turn], out=out)

        return timed(run, count)

"""The training batches of one rank: which part of which cuts, prepared ahead by a thread or not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deepspeed_gear.collection.batch import Batch
from deepspeed_gear.collection.prefetch import Prefetcher
from deepspeed_gear.errors import StoreError
from deepspeed_gear.replay import position
from deepspeed_gear.replay.maker import BatchMaker
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.sizes import BatchInfo
from deepspeed_gear.selection.cut import EPOCH
from deepspeed_gear.selection.mixture import Mixture
from deepspeed_gear.selection.stream import Stream

Made = tuple[Batch, list[list[int]]]  # a micro batch, and the heads of the cuts that it is from


class Feed:
    """One micro batch after the other. One thread calls it.

    Args:
        tables: Names of the sampled tables.
        streams: Their training streams.
        mixture: How many samples come from each; None for one table.
        maker: What collects.
        info: Sizes of a batch.
        data_rank: Index of this rank's replica.
        prefetch: Global batches that are prepared ahead.
        metrics: What is measured.
    """

    def __init__(
        self,
        tables: Sequence[str],
        streams: Sequence[Stream],
        mixture: Mixture | None,
        maker: BatchMaker,
        info: BatchInfo,
        data_rank: int,
        prefetch: int,
        metrics: Metrics,
    ) -> None:
        self._tables, self._streams, self._mixture, self._maker = tables, streams, mixture, maker
        self._info, self._data_rank, self._prefetch, self._metrics = info, data_rank, prefetch, metrics
        self._start = 0  # global batch at which the numbering of micro batches begins
        self._used = 0  # micro batches that the user has had since then
        self._heads: list[list[int]] | None = None  # of the last global batch used; None: see _position
        self._position = position.start(tables)
        self.prefetchers: list[Prefetcher[Made]] = []  # the thread that runs, if one does

    def next(self) -> Batch:
        """Return the next micro batch."""
        begin = time.perf_counter()
        for stream in self._streams:
            stream.masses.ask(self._start + self._used // self._info.accumulation)
        try:
            batch, heads = self._prepared() if self._prefetch else self._make(self._used)
        except StoreError:
            for stream in self._streams:  # so that new priorities can mend what was wrong with the old ones
                if not stream.stopped:
                    stream.masses.give_up()
            raise
        self._used += 1
        if self._used % self._info.accumulation == 0:
            self._heads = heads
        self._metrics.waited(time.perf_counter() - begin, heads[0][EPOCH])
        return batch

    @property
    def where(self) -> position.Position:
        """Behind the last global batch of which every micro batch was used."""
        return self._position if self._heads is None else position.after(self._tables, self._heads)

    def go_on_at(self, at: position.Position) -> None:
        """Continue at a position, at which the streams are already."""
        self._heads, self._position = None, at
        self._start, self._used = position.batches(at), 0

    def stop(self) -> None:
        """End the thread that prepares batches; the next call of `next` begins again."""
        for prefetcher in self.prefetchers:
            for stream in self._streams:
                stream.stopped = True  # it may wait for a rank that has stopped before it
            prefetcher.stop()
            for stream in self._streams:
                stream.stopped = False
        self.prefetchers.clear()

    def _prepared(self) -> Made:
        if not self.prefetchers:
            first, depth = self._used, self._prefetch * self._info.accumulation
            self.prefetchers.append(Prefetcher(lambda index: self._make(first + index), depth))
        try:
            return self.prefetchers[0].get()
        except Exception:
            self.stop()  # its thread has ended; the next call begins again with this batch
            raise

    def _make(self, index: int) -> Made:
        """Make this rank's micro batch number `index` since the start or the last resume."""
        begin, info = time.perf_counter(), self._info
        step, micro = divmod(index, info.accumulation)
        key, part = self._start + step, micro * info.data_world + self._data_rank
        cuts = [(stream, stream.take(key)) for stream in self._streams]
        heads = [cut.head for _, cut in cuts]
        last = micro == info.accumulation - 1
        if self._mixture is None:
            batch = self._maker.make(*cuts[0], part, info.num_micro, None, last)
        else:
            chosen = self._mixture.part(key, part, info.num_micro)
            batch = self._maker.mix(cuts, chosen, self._mixture.parts(key), last)
        self._metrics.produced(time.perf_counter() - begin)
        return batch, heads

"""The training batches of one rank: which part of which cuts, prepared ahead by a thread or not."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from deepspeed_gear.batching.batch import Batch, LentTensors
from deepspeed_gear.batching.batch_info import BatchInfo
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.checkpoint import position
from deepspeed_gear.config import GearConfig
from deepspeed_gear.distributed.batch_barrier import NO_DIGEST, BatchBarrier
from deepspeed_gear.errors import NotReadyError, StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.rate_gate import EmptyTableError
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.stream_records import Head

LOG = logging.getLogger("deepspeed_gear")


@dataclass
class PreparedBatch:
    """A micro batch of this rank.

    Args:
        batch: Itself.
        heads: Of the cuts that it is from.
        digest: Of the whole global batch, where it is to be verified and this is its last micro batch.
    """

    batch: Batch
    heads: list[list[int]]
    digest: int | None = None


class BatchLoader:
    """One micro batch after the other. One thread calls it.

    Args:
        config: The config.
        streams: The training stream of each sampled table.
        mixture: How many samples come from each; None for one table.
        maker: What collects.
        info: Sizes of a batch.
        data_rank: Index of this rank's replica.
        leads: Whether this rank writes to the log.
        metrics: What is measured.
        status: Turns of the ranks that train together; None: there are none, or an engine takes them.
        turns: How many there are in a global batch: one for each micro batch, or one behind the last.
        check: Raises if a rank of any node is lost.
        late: Raises what was wrong with reports of this rank.
    """

    def __init__(
        self,
        config: GearConfig,
        streams: Sequence[BatchStream],
        mixture: Mixture | None,
        maker: BatchAssembler,
        info: BatchInfo,
        data_rank: int,
        leads: bool,
        metrics: Metrics,
        status: BatchBarrier | None = None,
        turns: Literal["micro", "global"] = "micro",
        check: Callable[[], None] = lambda: None,
        late: Callable[[], None] = lambda: None,
    ) -> None:
        self._late = late
        self._tables, self._streams, self._mixture = config.sampled_tables, streams, mixture
        self._prefetch, self._verify_every = config.prefetch, config.verify_every
        self._maker, self._info, self._data_rank, self._metrics = maker, info, data_rank, metrics
        self._status, self._every_micro, self._check = status, turns == "micro", check
        self._seen = hashlib.blake2b(digest_size=8)  # ids and anchors of this rank's part of a global batch
        self._digest, self._leads = NO_DIGEST, leads
        self._held: PreparedBatch | None = (
            None  # made, and not returned yet: a rank has failed, or it is early
        )
        self._is_early = False
        self._start = 0  # global batch at which the numbering of micro batches begins
        self._used = 0  # micro batches that the user has had since then
        self._lent = LentTensors(max(2, info.accumulation))
        self._heads: list[list[int]] | None = None  # of the last global batch used; None: see _position
        self._position = position.start(self._tables)
        self.prefetchers: list[Prefetcher[PreparedBatch]] = []  # the thread that runs, if one does

    def next(self) -> Batch:
        """Return the next micro batch.

        Raises:
            PeerError: Another rank failed in its turn; the next call tries again.
            StoreError: A CUDA graph is captured, and the batch comes from host memory.
        """
        self._maker.refuse_capture()
        self._lent.make_room()
        begin = time.perf_counter()
        number, micro = divmod(self._used, self._info.accumulation)
        ends = micro == self._info.accumulation - 1
        if self._held is None:
            self._hold(self._made(self._start + number))
        elif self._is_early:
            self._ask(self._start + number)
        self._is_early = False
        if self._status is not None and (ends or self._every_micro):
            self._status.reach(self.take_digest())
            self._status.wait()
        made, self._held = self._held, None
        assert made is not None
        self._used += 1
        if ends:
            self._heads = made.heads
        if self._status is not None and self._status.is_early and self.prefetchers:
            self._hold_next(self._status)
        self._metrics.waited(time.perf_counter() - begin, made.heads[0][Head.EPOCH])
        batch = self._maker.hand_over(made.batch)
        self._lent.add(batch)
        return batch

    @property
    def prepares(self) -> bool:
        """Whether a thread prepares batches now."""
        return any(prefetcher.is_alive for prefetcher in self.prefetchers)

    @property
    def next_key(self) -> int:
        """The global batch that the next micro batch is of."""
        return self._start + self._used // self._info.accumulation

    def _hold(self, made: PreparedBatch) -> None:
        """Keep a micro batch until its turn is over."""
        self._held = made
        if self._verify_every:
            self._see(made, self._start + self._used // self._info.accumulation)

    def _hold_next(self, status: BatchBarrier) -> None:
        """Reach the next turn already if its batch is there: nodes then hear of it while the model trains."""
        made = self.prefetchers[0].ready()
        if made is None:
            return
        self._hold(made)
        self._is_early = True
        if self._every_micro or (self._used + 1) % self._info.accumulation == 0:
            status.reach(self.take_digest())
            status.begin()

    def _ask(self, key: int) -> None:
        for stream in self._streams:
            stream.masses.ask(key)

    def take_digest(self) -> int:
        """Return the digest of this rank's part of a global batch that is to be verified, once; else 0."""
        digest, self._digest = self._digest, NO_DIGEST
        return digest

    def _made(self, key: int) -> PreparedBatch:
        self._ask(key)
        try:
            self._late()
            return self._prepared() if self._prefetch else self._make(self._used)
        except Exception as error:
            is_early = isinstance(error, NotReadyError) and not isinstance(error, EmptyTableError)
            if isinstance(error, StoreError) and not is_early:
                for stream in self._streams:  # so that new priorities can mend what was wrong with the old
                    if not stream.stopped:
                        stream.masses.give_up()
            if self._status is not None:
                self._status.fail(error)
            raise

    def _see(self, made: PreparedBatch, number: int) -> None:
        """Take a micro batch into the digest of this rank's part of a global batch."""
        self._seen.update(_ids_and_anchors(made.batch.host_records))
        if (self._used + 1) % self._info.accumulation:
            return
        if made.digest is not None:
            self._digest = _as_int64(self._seen.digest()) | 1
            self._metrics.digest = number, made.digest
            if self._leads:
                LOG.info("gear: global batch %d: digest %016x", number, made.digest % (1 << 64))
        self._seen = hashlib.blake2b(digest_size=8)

    @property
    def where(self) -> position.Position:
        """Behind the last global batch of which every micro batch was used."""
        return self._position if self._heads is None else position.after(self._tables, self._heads)

    def go_on_at(self, at: position.Position) -> None:
        """Continue at a position, at which the streams are already."""
        self._heads, self._position, self._held, self._is_early = None, at, None, False
        self._seen, self._digest = hashlib.blake2b(digest_size=8), NO_DIGEST
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
        self._maker.drain()  # a cut that is released behind a seek would be taken for a later one

    def _prepared(self) -> PreparedBatch:
        if not self.prefetchers:
            first, depth = self._used, self._prefetch * self._info.accumulation
            self.prefetchers.append(Prefetcher(lambda index: self._make(first + index), depth))
        try:
            return self.prefetchers[0].get(self._check)
        except Exception:
            self.stop()  # its thread has ended; the next call begins again with this batch
            raise

    def _make(self, index: int) -> PreparedBatch:
        """Make this rank's micro batch number `index` since the start or the last resume."""
        begin, info = time.perf_counter(), self._info
        step, micro = divmod(index, info.accumulation)
        key, part = self._start + step, micro * info.data_world + self._data_rank
        cuts = [(stream, stream.take(key)) for stream in self._streams]
        heads = [cut.head for _, cut in cuts]
        last, digest = micro == info.accumulation - 1, None
        if last and self._verify_every and key % self._verify_every == 0:
            digest = digest_of([cut for _, cut in cuts])
        if self._mixture is None:
            batch = self._maker.make(*cuts[0], part, info.num_micro, None, last)
        else:
            chosen = self._mixture.part(key, part, info.num_micro)
            batch = self._maker.mix(cuts, chosen, self._mixture.parts(key), last)
        self._metrics.produced(time.perf_counter() - begin)
        return PreparedBatch(batch, heads, digest)


def digest_of(cuts: Sequence[Selection]) -> int:
    """Return a digest of ids and anchors of a global batch, table by table: equal wherever it is made."""
    seen = hashlib.blake2b(digest_size=8)
    for cut in cuts:
        seen.update(_ids_and_anchors(cut.resolutions[: cut.head[Head.COUNT]]))
    return _as_int64(seen.digest())


def _ids_and_anchors(records: torch.Tensor) -> bytes:
    return records[:, [Resolution.ID, Resolution.ANCHOR]].numpy().tobytes()


def _as_int64(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)

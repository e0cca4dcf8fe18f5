"""Loaders of batches of windows: training batches, prefetched or not, and evaluation passes."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from deepspeed_gear.batching.batch import Batch, BatchLifetime
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.checkpoint.position import LoaderPosition, after
from deepspeed_gear.config.table_checks import SPLITS
from deepspeed_gear.distributed.batch_barrier import NO_DIGEST
from deepspeed_gear.errors import (
    CheckpointError,
    ConfigError,
    EmptyTableError,
    NotReadyError,
    StoreError,
)
from deepspeed_gear.log import LOG
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.sampling.batch_sizes import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import PASS_SHIFT
from deepspeed_gear.store.records import Head


class PreparedBatch(NamedTuple):
    """A micro batch of this rank, before `sample` returns it.

    Attributes:
        batch: The batch.
        heads: Heads of its selections, by table.
        digest: With the last micro batch of a global batch that is verified, the digest of all its
            ids and anchors, table by table; else None.
    """

    batch: Batch
    heads: list[list[int]]
    digest: int | None = None


class LentTensors:
    """Latest `keep` batches of one stream, which their user may still use.

    Older ones end by their number and not when their memory is overwritten, since that time depends
    on the progress of prefetching and of the device.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lifetimes: deque[BatchLifetime | None] = deque()  # the oldest first

    def make_room(self) -> None:
        while len(self._lifetimes) >= self._keep:
            lifetime = self._lifetimes.popleft()
            if lifetime is not None:
                lifetime.end()

    def add(self, batch: Batch) -> None:
        self._lifetimes.append(batch.lifetime)


class BatchLoader:
    """Loads this rank's micro batches, one after the other. Called by one thread."""

    holds_batch = False  # the next batch needs a selection, unlike a rollout batch

    def __init__(self, parts: ReplayParts, metrics: Metrics, turns: Turns = "micro") -> None:
        self._parts = parts
        plan = parts.plan
        config = parts.plan.config
        self._streams = parts.train
        self._mixture = plan.mixture
        self._prefetch = config.prefetch
        self._verify_every = config.verify_every
        self._assembler = parts.assembler
        self._info = plan.info
        self._metrics = metrics
        self._data_rank = plan.topology.place.data_rank
        self._barrier = None if turns == "schedule" else parts.barrier
        self._after_each = turns != "global"
        self._check = parts.context.check
        self._transfer = parts.assembler.transfer
        self._prefetcher: Prefetcher[PreparedBatch] = parts.prefetcher
        self._lent = LentTensors(plan.info.lifetime)
        self.seek(LoaderPosition.start(config.sampled_tables))

    def seek(self, position: LoaderPosition) -> None:
        """Continue at a position to which the streams are already set."""
        if self._prefetch:
            self._prefetcher.begin(self._make)
        self._seen = hashlib.blake2b(digest_size=8)  # ids and anchors of this rank's part
        self._digest = NO_DIGEST
        # Gathered and not returned yet: after a failure, or taken early.
        self._held: PreparedBatch | None = None
        self._is_early = False
        self._start = position.num_batches  # global batch at which `_used` begins
        self._used = 0  # micro batches returned since then
        # Heads of the last global batch that was used; None: the position is `_position`.
        self._heads: list[list[int]] | None = None
        self._position = position.at

    def next(self) -> Batch:
        """Return the next micro batch; if another rank has failed, the next call tries again.

        With several nodes and prefetching, the call for batch n also takes batch n + 1, if it is
        prepared, and sends this node's messages of its barrier, which travel while batch n is
        trained. The call for batch n + 1 then requests its selection and waits for the barrier.
        """
        if self._transfer is not None:
            self._transfer.refuse_capture()
        self._lent.make_room()
        begin = time.monotonic()
        ends = (self._used + 1) % self._info.accumulation == 0
        if self._barrier is not None and (ends or self._after_each):
            self._barrier.note_request()
        # A batch is held where the call before has failed at the barrier, or has taken it early.
        if self._held is None:
            self._hold(self._load(self.next_number))
        elif self._is_early:
            self._request(self.next_number)
        self._is_early = False
        if self._barrier is not None and (ends or self._after_each):
            self._barrier.reach(self.take_digest())
            self._barrier.wait()
        made, self._held = self._held, None
        assert made is not None
        self._used += 1
        if ends:
            self._heads = made.heads
        if self._barrier is not None and self._barrier.is_early:
            following = self._prefetcher.ready()
            if following is not None:
                # Reach the next barrier early, so that its messages overlap with training.
                self._hold(following)
                self._is_early = True
                if self._after_each or (self._used + 1) % self._info.accumulation == 0:
                    self._barrier.reach(self.take_digest())
                    self._barrier.begin()
        now = time.monotonic()
        self._metrics.used(made.heads[0][Head.EPOCH], now - begin, now)
        batch = made.batch if self._transfer is None else self._transfer.hand_over(made.batch)
        self._lent.add(batch)
        return batch

    @property
    def next_number(self) -> int:
        """Number of the global batch that the next micro batch belongs to."""
        return self._start + self._used // self._info.accumulation

    def _request(self, number: int) -> None:
        """Request a global batch; its selection applies the updates that were reported before."""
        for stream in self._streams:
            stream.request(number)

    def take_digest(self) -> int:
        """Return the digest of this rank's part of a verified global batch once, else 0."""
        digest, self._digest = self._digest, NO_DIGEST
        return digest

    def _load(self, number: int) -> PreparedBatch:
        self._request(number)
        try:
            self._parts.late_updates.check()
            if not self._prefetch:
                return self._make(self._used)
            try:
                return self._prefetcher.get(self._check)
            except Exception:
                # its thread has ended; the next call retries this batch
                self._parts.stop_prefetching()
                raise
        except Exception as error:
            give_up(self._streams, error)
            if self._barrier is not None:
                self._barrier.fail(error)
            raise

    def _hold(self, made: PreparedBatch) -> None:
        """Keep a micro batch until it is returned, and add it to the digest of this rank's part."""
        self._held = made
        if not self._verify_every:
            return
        self._seen.update(_ids_and_anchors(made.batch.host_resolutions))
        if (self._used + 1) % self._info.accumulation:
            return
        if made.digest is not None:
            self._digest = _as_int64(self._seen.digest()) | 1
            self._metrics.digest = self.next_number, made.digest
            if self._parts.plan.topology.rank == 0:
                LOG.info(
                    "gear: global batch %d: digest %016x", self.next_number, made.digest % (1 << 64)
                )
        self._seen = hashlib.blake2b(digest_size=8)

    @property
    def position(self) -> LoaderPosition:
        """The position after the last global batch whose micro batches were all used."""
        if self._heads is None:
            return LoaderPosition(self._position)
        return LoaderPosition(after(self._parts.plan.config.sampled_tables, self._heads))

    def check(self, rollout: Mapping[str, Any] | None) -> None:
        """Raise a CheckpointError for a state within a rollout batch."""
        if rollout is not None:
            rule = "must not be in the middle of a rollout batch"
            raise CheckpointError(
                "the gear state", rule, None, "load it with the gear.pack of its run"
            )

    def _make(self, index: int) -> PreparedBatch:
        """Gather this rank's micro batch number `index` since `_start`. On the prefetch thread."""
        begin = time.perf_counter()
        info = self._info
        step, micro_index = divmod(index, info.accumulation)
        number = self._start + step
        # Samples are dealt to micro batches in turns. With 2 replicas and 2 accumulation steps,
        # sample j belongs to part j % 4: parts 0 and 2 are those of replica 0.
        part = micro_index * info.data_world + self._data_rank
        if self._mixture is None:
            stream = self._streams[0]
            shares = None
            gather = self._assembler.call_for(stream)
            own = stream.take(number, part, info.num_micro_batches, gather)
            taken = [(stream, own)]
            heads = [own.head]
        else:
            shares = self._mixture.shares(number)
            chosen = self._mixture.part(number, part, info.num_micro_batches)
            parts = zip(self._streams, map(torch.from_numpy, chosen), strict=True)
            taken = [(s, s.part_of(s.get(number), which, of_mixture=True)) for s, which in parts]
            heads = [own.head for _, own in taken]
        batch = self._assembler.assemble(taken, part, info.num_micro_batches, shares=shares)
        digest = None
        if micro_index == info.accumulation - 1:
            if self._verify_every and number % self._verify_every == 0:
                selections = [stream.get(number) for stream in self._streams]
                seen = [
                    _ids_and_anchors(one.resolutions[: one.head[Head.COUNT]]) for one in selections
                ]
                digest = _as_int64(hashlib.blake2b(b"".join(seen), digest_size=8).digest())
            for stream in self._streams:
                self._assembler.release(stream, number)
        self._metrics.made(time.perf_counter() - begin)
        return PreparedBatch(batch, heads, digest)


class Evaluation:
    """The evaluation passes of a Replay. Main thread only."""

    def __init__(self, parts: ReplayParts) -> None:
        self._parts = parts
        self.begun: dict[str, int] = {}  # by split; a checkpoint has them

    def batches(self, split: str) -> Iterator[Batch]:
        """Return an iterator over the next pass over a split."""
        streams = self._streams(split)
        number = self.begun.get(split, 0)
        self.begun[split] = number + 1
        return chain.from_iterable(self._pass(stream, number) for stream in streams)

    def num_batches(self, split: str) -> int:
        """Return the number of batches that each rank gets in one pass over a split."""
        return sum(-(-stream.num_items // stream.spec.batch) for stream in self._streams(split))

    def _streams(self, split: str) -> list[BatchStream]:
        if self._parts.plan.config.pack is not None:
            rule = "cannot be combined with iterating over a split (a split yields windows)"
            raise ConfigError("gear.pack", rule, None, SPLITS)
        by_table = self._parts.streams.values()
        of_split = [streams[split] for streams in by_table if split in streams]
        if not of_split or split == TRAIN:
            known = dict.fromkeys(name for streams in by_table for name in streams)
            raise ConfigError(
                "stream", f"must be one of {', '.join(known)}", split, "give gear.data.split"
            )
        return of_split

    def _pass(self, stream: BatchStream, pass_number: int) -> Iterator[Batch]:
        """Iterate over the batches of one pass over a stream, which all ranks make together."""
        plan = self._parts.plan
        assembler = self._parts.assembler
        place = plan.topology.place
        index = 0
        num_batches = 1
        lent = LentTensors(plan.info.lifetime)
        while index < num_batches:
            lent.make_room()
            # Batch 2 of pass 1 has the number 1 << PASS_SHIFT | 2.
            number = pass_number << PASS_SHIFT | index
            selection = stream.get(number)
            size = int(selection.head[Head.EPOCH_SIZE])
            num_batches = -(-size // stream.spec.batch)
            taken = [
                (stream, stream.part_of(selection, slice(place.data_rank, None, place.data_world)))
            ]
            batch = assembler.assemble(taken, place.data_rank, place.data_world, pass_size=size)
            assembler.release(stream, number)
            if assembler.transfer is not None:
                batch = assembler.transfer.hand_over(batch)
            lent.add(batch)
            yield batch
            index += 1


def give_up(streams: Sequence[BatchStream], error: Exception) -> None:
    """Give up the selection that an error of the store has ended.

    Priorities that are reported from now on count for the next attempt, and can correct old ones.
    """
    is_early = isinstance(error, NotReadyError) and not isinstance(error, EmptyTableError)
    if isinstance(error, StoreError):
        for stream in streams:
            if is_early:
                stream.withdraw()
            elif not stream.state.stop.is_set():
                stream.give_up()


def _ids_and_anchors(resolutions: torch.Tensor) -> bytes:
    return resolutions[:, [Resolution.ID, Resolution.ANCHOR]].numpy().tobytes()


def _as_int64(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)

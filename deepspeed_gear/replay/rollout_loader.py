"""Rollout loader: the rollout batches of one rank, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_gear.batching.pack_gather import PackGatherer
from deepspeed_gear.checkpoint import position
from deepspeed_gear.distributed.sequence_sum import sequence_sum
from deepspeed_gear.errors import CheckpointError, ConfigError, NotReadyError, StoreError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.rollout import Rollout, RolloutHooks
from deepspeed_gear.replay.rollout_data import PackSettings, RolloutData, TablePart
from deepspeed_gear.replay.train_step import TrainStep
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mass_rules import key_of
from deepspeed_gear.sampling.rate_limiting import EmptyTableError
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.stream_records import Head


class RolloutLoader:
    """Loads this rank's rollout batches. Called by one thread.

    Args:
        parts: Of the replay.
        metrics: Counts and times.
        engine_dtype: The dtype of `"as": "engine"`.
        device: Of the micro batches.
        divisor: Returns what the framework divides the sum of all ranks' gradients by.
    """

    def __init__(
        self,
        parts: ReplayParts,
        metrics: Metrics,
        engine_dtype: torch.dtype,
        device: torch.device,
        divisor: Callable[[], float],
    ) -> None:
        plan = parts.plan
        config = plan.config
        assert config.pack is not None
        assert config.rollout_size is not None
        self._parts, self._metrics, self._size, self._divisor = parts, metrics, config.rollout_size, divisor
        self._tables, self._streams = config.sampled_tables, parts.train
        self._ops = self._streams[0].table.ops
        self._keys = config.seed, key_of(self._tables[0], "minibatches")
        group = config.resolved_tables[self._tables[0]].group
        self._settings = PackSettings(
            pack=config.pack,
            loss=config.loss,
            place=plan.topology.place,
            device=device,
            schema=plan.schemas[self._tables[0]],
            fields=tuple(plan.needs.fields),
            opaque=tuple(plan.needs.opaque),
            member=None if group is None else group.member,
            reduce=sequence_sum(plan.topology, device, config.timeout_s, plan.group),
        )
        statistics = plan.statistics(plan.needs.fields)
        self._gatherers = [
            PackGatherer(self._settings.gathered(), stream.table, statistics, engine_dtype)
            for stream in self._streams
        ]
        self._heads: list[list[int]] | None = None  # of the last rollout batch that was consumed
        self._position = position.start(self._tables)
        self._key = 0
        self._first_step = 0
        self._first_tokens: int | None = None  # of the next rollout batch, in a run that is resumed in it
        self._first_columns: dict[str, torch.Tensor] = {}
        self._current: Rollout | None = None
        self._observers: list[Callable[[TrainStep], None]] = []

    def next(self) -> Rollout:
        """Select and return the next rollout batch; the one before it is consumed.

        Raises:
            PeerError, StoreError, NotReadyError, CheckpointError: As `Replay.rollout`.
        """
        if self._current is not None:
            self._current.close()
        key, begin = self._key, time.perf_counter()
        found: list[Selection] = []

        def select() -> None:
            for stream in self._streams:
                stream.masses.ask(key)
            found[:] = [stream.get(key) for stream in self._streams]

        try:
            self._agree(select)
        except StoreError as error:
            if not isinstance(error, NotReadyError) or isinstance(error, EmptyTableError):
                for stream in self._streams:  # so that new priorities can correct the old ones
                    stream.masses.give_up()
            raise
        parts = [
            TablePart(gatherer, stream.table, *self._read(stream, selection))
            for stream, gatherer, selection in zip(self._streams, self._gatherers, found, strict=True)
        ]
        data = RolloutData(parts, self._settings, self._ops, self._metrics.gathered, key)
        if self._first_tokens is not None:
            self._agree(lambda: self._check_tokens(data))
        heads = [selection.head for selection in found]
        hooks = RolloutHooks(
            divisor=self._divisor,
            agree=self._agree,
            sum_=self._parts.plan.exchange.sum,
            begun=self._begin_step,
            ended=self._end_step,
            finished=lambda: self._finish(key, heads),
        )
        made = Rollout(data, self._size, self._keys, key, self._ops, hooks, self._first_step)
        data.columns.update(self._first_columns)
        self._first_step, self._first_tokens, self._first_columns, self._current = 0, None, {}, made
        self._metrics.waited(time.perf_counter() - begin, heads[0][Head.EPOCH])
        return made

    def _check_tokens(self, data: RolloutData) -> None:
        """Raise unless a rollout batch that is resumed has the steps that it was saved with.

        Raises:
            CheckpointError: It has others.
        """
        if data.num_tokens != self._first_tokens:
            raise CheckpointError(
                f"rollout batch {self._key}",
                f"must have the {self._first_tokens} steps with which it was saved",
                data.num_tokens,
                "load it with the gear.pack of its run: with too_long = truncate, tokens decides the lengths",
            )

    @staticmethod
    def _read(stream: BatchStream, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the records of a selection, and their PER weights."""
        records = selection.resolutions[: selection.head[Head.COUNT]].clone()
        return records, stream.weights(selection.head, records)

    def step(self) -> TrainStep:
        """Return the one step of the next batch, whose size is `gear.batch`.

        Raises:
            ConfigError: The size is that of a rollout batch.
        """
        if self._parts.plan.config.batch is None:
            remedy = 'give "batch" instead of "rollout", or iterate over rollout()'
            raise ConfigError("gear.batch", "must be given for steps without a rollout batch", None, remedy)
        return self.next().step(0)

    def _agree(self, action: Callable[[], None]) -> None:
        barrier = self._parts.barrier
        if barrier is None:
            action()
        else:
            barrier.agree(action)

    def observe_steps(self, begun: Callable[[TrainStep], None]) -> None:
        """Call a function with each train step before its first micro batch; all ranks raise its errors."""
        self._observers.append(begun)

    def _begin_step(self, step: TrainStep) -> None:
        for begun in self._observers:
            begun(step)

    def _end_step(self, step: TrainStep) -> None:
        packs = step.packs
        self._metrics.trained.add(
            step.num_trajectories, step.num_tokens, len(packs), packs.fill_fraction, packs.imbalance
        )

    def _finish(self, key: int, heads: list[list[int]]) -> None:
        self._heads, self._key = heads, key + 1
        for stream in self._streams:
            stream.release(key)

    # ---- position --------------------------------------------------------------------------------

    @property
    def prepares(self) -> bool:
        """Whether a prefetch thread is running: there is none."""
        return False

    @property
    def next_key(self) -> int:
        """The number of the next rollout batch."""
        return self._key

    @property
    def where(self) -> position.Position:
        """The position after the last rollout batch that was consumed."""
        return self._position if self._heads is None else position.after(self._tables, self._heads)

    @property
    def in_progress(self) -> dict[str, Any] | None:
        """Steps done and sizes of the rollout batch that is being trained; None between two of them."""
        if self._current is None or self._current.number < self._key:
            return None
        current, size = self._current, self._size.model_dump()
        return {"steps_done": current.steps_done, "num_tokens": current.num_tokens, "size": size}

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns of the rollout batch that is being trained."""
        return {} if self.in_progress is None or self._current is None else self._current.columns

    def go_on_at(
        self, at: position.Position, rollout: Mapping[str, Any] | None, columns: Mapping[str, torch.Tensor]
    ) -> None:
        """Continue at a position to which the streams are already set.

        Args:
            at: The position.
            rollout: The rollout batch after it that was being trained, as `in_progress`; None: none.
            columns: Its own columns.
        """
        self.abandon()
        self._heads, self._position, self._current = None, at, None
        self._key = position.batches(at)
        self._first_step = 0 if rollout is None else int(rollout["steps_done"])
        self._first_tokens = None if rollout is None else int(rollout["num_tokens"])
        self._first_columns = dict(columns)

    def abandon(self) -> None:
        """End the rollout batch that is being trained without consuming it."""
        if self._current is not None:
            self._current.abandon()

    def check_rollout(self, rollout: Mapping[str, Any] | None) -> None:
        """Raise unless a rollout batch whose training is under way has the size of this config.

        Raises:
            CheckpointError: It has another.
        """
        if rollout is not None and rollout["size"] != self._size.model_dump():
            raise CheckpointError(
                "the rollout batch of the gear state",
                f"must have the size of this config ({self._size.model_dump()})",
                rollout["size"],
                "load with the size that it was saved with, or take a checkpoint between rollout batches",
            )

    def stop(self) -> None:
        """Stop the prefetch thread: there is none."""

    def take_digest(self) -> int:
        """Return the digest of a global batch that is verified: none."""
        return 0

"""Rollout loader: the rollout batches of one rank, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_gear.batching.pack_gather import PackGatherer
from deepspeed_gear.checkpoint import position
from deepspeed_gear.config.pack_options import room
from deepspeed_gear.distributed.sequence_sum import sequence_sum
from deepspeed_gear.errors import CheckpointError, ConfigError, EmptyTableError, NotReadyError, StoreError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.packing_check import check_packing
from deepspeed_gear.replay.rollout import Rollout, RolloutHooks
from deepspeed_gear.replay.rollout_data import PackSettings, RolloutData
from deepspeed_gear.replay.rollout_nodes import RolloutNodes
from deepspeed_gear.replay.selection_queue import Records, SelectedItems, SelectionQueue
from deepspeed_gear.replay.train_step import TrainStep
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mass_rules import key_of
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
            reduce=sequence_sum(plan.topology, device, config.timeout_s, plan.group, plan.exchange),
        )
        statistics = plan.statistics(plan.needs.fields)
        self._gatherers = [
            PackGatherer(self._settings.gathered(), stream.table, statistics, engine_dtype)
            for stream in self._streams
        ]
        self._nodes = RolloutNodes(parts)
        self._queue = self._new_queue()
        self._position = position.start(self._tables)  # after the last selection that was consumed
        self._key = 0  # of the next selection
        self._number = 0  # of the next rollout batch
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
        number, begin = self._number, time.perf_counter()
        parts = [
            self._nodes.part(stream.table, gatherer, of_table)
            for stream, gatherer, of_table in zip(
                self._streams, self._gatherers, self._queue.take(self._select), strict=True
            )
        ]
        data = RolloutData(parts, self._settings, self._ops, self._metrics.gathered, number)
        if self._first_tokens is not None:
            self._agree(lambda: self._check_tokens(data))
        rows = self._nodes.batch(data, self._agree)
        hooks = RolloutHooks(
            divisor=self._divisor,
            agree=self._agree,
            sum_=self._parts.plan.exchange.sum,
            begun=self._begin_step,
            ended=self._end_step,
            finished=self._finish,
            fetch=rows.fetch,
            compare=self._parts.plan.exchange.compare,
        )
        made = Rollout(data, self._size, self._keys, number, self._ops, hooks, self._first_step)
        data.columns.update(self._first_columns)
        self._first_step, self._first_tokens, self._first_columns, self._current = 0, None, {}, made
        self._metrics.waited(time.perf_counter() - begin, self._epoch)
        return made

    def check_packing(self, model: Any, attention: str | None, tolerance: float | None) -> float:
        """Return the largest difference that packing makes: `Replay.check_packing`."""
        return check_packing(model, attention, tolerance, self._settings)

    def _select(self) -> SelectedItems:
        """Make or read the next selection of every table.

        Raises:
            PeerError, StoreError, NotReadyError: As `Replay.rollout`.
        """
        key = self._key
        found: list[Selection] = []

        def select() -> None:
            for stream in self._streams:
                stream.request(key)
            found[:] = [stream.get(key) for stream in self._streams]

        try:
            self._agree(select)
        except StoreError as error:
            if not isinstance(error, NotReadyError) or isinstance(error, EmptyTableError):
                for stream in self._streams:  # so that new priorities can correct the old ones
                    stream.give_up()
            raise
        self._key += 1
        heads = [selection.head for selection in found]
        self._epoch = heads[0][Head.EPOCH]
        parts = [self._read(stream, one) for stream, one in zip(self._streams, found, strict=True)]
        return SelectedItems(key, heads, parts, room(self._settings.pack))

    def _new_queue(self, first_item: int = 0) -> SelectionQueue:
        return SelectionQueue(self._size.size, self._size.tokens, first_item)

    def _check_tokens(self, data: RolloutData) -> None:
        """Raise unless a rollout batch that is resumed has the steps that it was saved with.

        Raises:
            CheckpointError: It has others.
        """
        if data.num_tokens != self._first_tokens:
            raise CheckpointError(
                f"rollout batch {self._number}",
                f"must have the {self._first_tokens} steps with which it was saved",
                data.num_tokens,
                "load it with the gear.pack of its run: with too_long = truncate, tokens decides the lengths",
            )

    @staticmethod
    def _read(stream: BatchStream, selection: Selection) -> Records:
        """Return copies of the records of a selection, and their PER weights."""
        count, origins = selection.head[Head.COUNT], selection.origins
        records = selection.resolutions[:count].clone()
        weights = stream.weights(selection.head, records)
        return Records(records, weights, None if origins is None else origins[:count].clone())

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
        if barrier is not None:
            barrier.agree(action)
        elif self._nodes.spread:  # nodes exchange rows: ranks must not use them before or after
            self._parts.plan.exchange.agree("a rollout batch", action)
        else:
            action()

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

    def _finish(self) -> None:
        self._number += 1
        ended = self._queue.consume()
        if ended is not None:
            self._position = position.after(self._tables, ended.heads)
            for stream in self._streams:
                stream.release(ended.key)

    # ---- position --------------------------------------------------------------------------------

    @property
    def prepares(self) -> bool:
        """Whether a prefetch thread is running: there is none."""
        return False

    @property
    def next_key(self) -> int:
        """The number of the next selection."""
        return self._key

    @property
    def holds_batch(self) -> bool:
        """Whether the next rollout batch needs no further selection."""
        return not self._is_under_way and self._queue.holds_batch

    @property
    def _is_under_way(self) -> bool:
        return self._current is not None and self._current.number == self._number

    @property
    def where(self) -> position.Position:
        """The position after the last selection that was consumed: no item of it is left."""
        return self._position

    @property
    def in_progress(self) -> dict[str, Any] | None:
        """Which items of the next selection are consumed, and the steps done of the batch that is trained.

        None between two rollout batches that are a selection each.
        """
        if not self._is_under_way and self._size.tokens is None:
            return None
        current = self._current if self._is_under_way else None
        return {
            "number": self._number,
            "first_item": self._queue.first_item,
            "steps_done": 0 if current is None else current.steps_done,
            "num_tokens": None if current is None else current.num_tokens,
            "size": self._size.model_dump(),
        }

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns of the rollout batch that is being trained."""
        return self._current.columns if self._current is not None and self._is_under_way else {}

    def go_on_at(
        self, at: position.Position, rollout: Mapping[str, Any] | None, columns: Mapping[str, torch.Tensor]
    ) -> None:
        """Continue at a position to which the streams are already set.

        Args:
            at: The position.
            rollout: The rollout batch after it, as `in_progress`; None: it begins with a selection.
            columns: Its own columns.
        """
        self.abandon()
        known: dict[str, Any] = {"number": position.batches(at), "first_item": 0, "steps_done": 0}
        known.update(rollout or {})
        self._position, self._current = at, None
        self._key, self._number = position.batches(at), known["number"]
        self._queue = self._new_queue(known["first_item"])
        self._first_step, self._first_tokens = known["steps_done"], known.get("num_tokens")
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

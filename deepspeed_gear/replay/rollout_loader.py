"""Rollout loader: the rollout batches of one rank, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_gear.batching.pack_gather import PackGatherer
from deepspeed_gear.checkpoint.position import LoaderPosition, batches
from deepspeed_gear.distributed.sequence_sum import sequence_sum
from deepspeed_gear.errors import CheckpointError, ConfigError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.packing_check import check_packing
from deepspeed_gear.replay.record_stream import RecordStream
from deepspeed_gear.replay.rollout import Rollout
from deepspeed_gear.replay.rollout_data import PackSettings, RolloutData
from deepspeed_gear.replay.rollout_nodes import RolloutNodes
from deepspeed_gear.replay.rollout_session import RolloutSession
from deepspeed_gear.replay.train_step import TrainStep
from deepspeed_gear.sampling.mass_rules import key_of


class RolloutLoader:
    """Loads this rank's rollout batches. Called by one thread.

    Args:
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
        self._metrics, self._size, self._streams = metrics, config.rollout_size, parts.train
        first = config.sampled_tables[0]
        self._keys = config.seed, key_of(first, "minibatches")
        group = config.resolved_tables[first].group
        self._settings = PackSettings(
            pack=config.pack,
            loss=config.loss,
            place=plan.topology.place,
            device=device,
            schema=plan.schemas[first],
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
        self._nodes, self._is_rollout = RolloutNodes(parts), config.batch is None
        self.session = RolloutSession(parts, divisor)
        self.records = RecordStream(parts, self.session, self._size)
        self._resumed = LoaderPosition(self.records.where)  # what the next rollout batch goes on with
        self._current: Rollout | None = None

    def next(self) -> Rollout:
        """Select and return the next rollout batch; the one before it is consumed.

        Raises:
            PeerError, StoreError, NotReadyError, CheckpointError: As `Replay.rollout`.
        """
        if self._current is not None:
            self._current.close()
        begin, resumed = time.perf_counter(), self._resumed
        taken = zip(self._streams, self._gatherers, self.records.take(), strict=True)
        parts = [self._nodes.part(stream.table, gatherer, records) for stream, gatherer, records in taken]
        ops = self._streams[0].table.ops
        data = RolloutData(parts, self._settings, ops, self.records.number, self._metrics)
        known = resumed.rollout or {}
        if known.get("num_tokens") is not None:
            self.session.agree(lambda: _check_tokens(data, known["num_tokens"]))
        rows, done = self._nodes.batch(data, self.session), known.get("steps_done", 0)
        made = Rollout(data, self._size, self._keys, self.session, self.records, rows, done)
        data.columns.update(resumed.columns)
        self._resumed, self._current = LoaderPosition(resumed.at), made
        self._metrics.waited(time.perf_counter() - begin, self.records.epoch)
        return made

    def check_packing(self, model: Any, attention: str | None, tolerance: float | None) -> float:
        """Return the largest difference that packing makes: `Replay.check_packing`."""
        return check_packing(model, attention, tolerance, self._settings)

    def step(self) -> TrainStep:
        """Return the one step of the next batch, whose size is `gear.batch`.

        Raises:
            ConfigError: The size is that of a rollout batch.
        """
        if self._is_rollout:
            remedy = 'give "batch" instead of "rollout", or iterate over rollout()'
            raise ConfigError("gear.batch", "must be given for steps without a rollout batch", None, remedy)
        return self.next().step(0)

    # ---- position --------------------------------------------------------------------------------

    @property
    def next_key(self) -> int:
        """The number of the next selection."""
        return self.records.next_key

    @property
    def _under_way(self) -> Rollout | None:
        """The rollout batch that is being trained."""
        current = self._current
        return current if current is not None and current.number == self.records.number else None

    @property
    def holds_batch(self) -> bool:
        """Whether the next rollout batch needs no further selection."""
        return self._under_way is None and self.records.holds_batch

    @property
    def position(self) -> LoaderPosition:
        """The position, with the rollout batch after it; between two that are a selection each without."""
        current, at = self._under_way, self.records.where
        if current is None and self._size.tokens is None:
            return LoaderPosition(at)
        rollout = {
            "number": self.records.number,
            "first_item": self.records.first_item,
            "steps_done": 0 if current is None else current.steps_done,
            "num_tokens": None if current is None else current.num_tokens,
            "size": self._size.model_dump(),
        }
        return LoaderPosition(at, rollout, {} if current is None else current.columns)

    def check(self, rollout: Mapping[str, Any] | None) -> None:
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

    def seek(self, position: LoaderPosition) -> None:
        """Continue at a position to which the streams are already set."""
        self.abandon()
        known = position.rollout or {"number": batches(position.at), "first_item": 0}
        self.records.seek(position.at, known["number"], known["first_item"])
        self._resumed, self._current = position, None

    def abandon(self) -> None:
        """End the rollout batch that is being trained without consuming it."""
        if self._current is not None:
            self._current.abandon()


def _check_tokens(data: RolloutData, num_tokens: int) -> None:
    """Raise unless a rollout batch that is resumed has the steps that it was saved with.

    Raises:
        CheckpointError: It has others.
    """
    if data.num_tokens != num_tokens:
        raise CheckpointError(
            f"rollout batch {data.number}",
            f"must have the {num_tokens} steps with which it was saved",
            data.num_tokens,
            "load it with the gear.pack of its run: with too_long = truncate, tokens decides the lengths",
        )

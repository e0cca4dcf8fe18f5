"""Rollout loader: the rollout batches of one rank, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.pack_gather import PackGatherer
from deepspeed_gear.checkpoint.position import LoaderPosition, batches
from deepspeed_gear.distributed.row_exchange.trajectory_places import TrajectoryPlaces
from deepspeed_gear.distributed.sequence_sum import sequence_sum
from deepspeed_gear.errors import CheckpointError, ConfigError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.record_stream import Records, RecordStream
from deepspeed_gear.replay.rollout import Rollout, TrainStep
from deepspeed_gear.replay.rollout_data import (
    NodePart,
    PackSettings,
    RolloutData,
    RolloutSession,
    TablePart,
)
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
        self._parts, self._metrics, self._size = parts, metrics, config.rollout_size
        self._streams, self._is_rollout = parts.train, config.batch is None
        first = config.sampled_tables[0]
        self._keys = config.seed, key_of(first, "minibatches")
        group = config.resolved_tables[first].group
        self.settings = PackSettings(
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
            PackGatherer(self.settings.gathered(), stream.table, statistics, engine_dtype)
            for stream in self._streams
        ]
        self.session = RolloutSession(parts, divisor)
        self.records = RecordStream(parts, self.session, self._size)
        self._resumed = LoaderPosition(self.records.where)  # what the next rollout batch goes on with
        self._current: Rollout | None = None

    def next(self) -> Rollout:
        """Select and return the next rollout batch; the one before it is consumed."""
        if self._current is not None:
            self._current.close()
        begin, resumed = time.perf_counter(), self._resumed
        parts = list(map(self._part, range(len(self._streams)), self.records.take()))
        ops, number = self._streams[0].table.ops, self.records.number
        data = RolloutData(parts, self.settings, ops, self.session, number, self._metrics)
        known = resumed.rollout or {}
        num_tokens = known.get("num_tokens")

        def check_tokens() -> None:
            if data.num_tokens != num_tokens:
                rule = f"must have the {num_tokens} steps with which it was saved"
                raise CheckpointError(
                    f"rollout batch {number}",
                    rule,
                    data.num_tokens,
                    "load it with the gear.pack of its run: with too_long = truncate, tokens decides the "
                    "lengths",
                )

        if num_tokens is not None:
            self.session.agree(check_tokens)
        made = Rollout(data, self._size, self._keys, self.records, known.get("steps_done", 0))
        data.columns.update(resumed.columns)
        self._resumed, self._current = LoaderPosition(resumed.at), made
        self._metrics.waited(time.perf_counter() - begin, self.records.epoch)
        return made

    def _part(self, number: int, records: Records) -> TablePart:
        """Return the trajectories of a rollout batch that come from a table."""
        table, nodes, plan = self._streams[number].table, None, self._parts.plan
        spread = self._parts.exchange.trajectories.get(table.spec.name)
        if spread is not None:
            origins, shard = records.origins.numpy(), table.spec.shard
            assert shard is not None
            own = np.nonzero(origins >> SHARD_BITS == shard.index)[0]
            steps, routes = records.resolutions[:, Resolution.NUM_STEPS].numpy(), spread.plan
            sizes = routes.final_row, routes.num_nodes, routes.index
            places = TrajectoryPlaces(origins, steps, *sizes, copies_own=not table.gathers_own_rows)
            # One rank of a node contributes what the node holds.
            own = own if plan.topology.leads_node else own[:0]
            nodes = NodePart(origins, own, self._join, places, spread)
        return TablePart(self._gatherers[number], table, records.resolutions, records.weights, nodes)

    def _join(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the bytes of arrays over all ranks, of which one has each byte. Collective."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return self.session.sum(flat).numpy().view(values.dtype).reshape(values.shape)

    def step(self) -> TrainStep:
        """Return the one step of the next batch, whose size is `gear.batch`."""
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
        """Raise CheckpointError unless a rollout batch that is being trained has the size of this config."""
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

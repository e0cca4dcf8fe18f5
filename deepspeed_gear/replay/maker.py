"""From cuts to batches: which samples are this rank's, and what is collected for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from deepspeed_gear.collection.batch import Batch
from deepspeed_gear.collection.collector import Collector
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.ops.constants import R_NUMBER
from deepspeed_gear.replay import position
from deepspeed_gear.replay.sizes import TRAIN, BatchInfo
from deepspeed_gear.selection.cut import DIVISOR, EXPONENT, NUMERATOR, TOTAL, Cut
from deepspeed_gear.selection.stream import Stream
from deepspeed_gear.store.statistics import ColumnStatistics
from deepspeed_gear.store.table import Table

Transform = Callable[[Batch, torch.Tensor], Batch]


class BatchMaker:
    """Makes this rank's batches of all streams. One thread per stream.

    Args:
        config: The config.
        fields: What a batch holds.
        table: The sampled table.
        statistics: Of its columns over the training split.
        info: Sizes of a batch.
        engine_dtype: What `"as": "engine"` means.
        device: Where batches go.
    """

    def __init__(
        self,
        config: GearConfig,
        fields: list[ResolvedField],
        table: Table,
        statistics: Mapping[str, ColumnStatistics],
        info: BatchInfo,
        engine_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._fields, self._table, self._statistics = config, fields, table, statistics
        self._info, self._engine_dtype, self._device = info, engine_dtype, device
        self.transform: Transform | None = None
        self._valid = torch.ones(info.micro, dtype=torch.bool)
        self._no_epoch = torch.zeros(info.micro, dtype=torch.int64)
        self._collectors = {TRAIN: self._collector(TRAIN)}

    @property
    def counters(self) -> torch.Tensor:
        """Real rows, all rows and bytes that the training stream has collected. [3], int64."""
        return self._collectors[TRAIN].counters

    def make(
        self, stream: Stream, cut: Cut, part: int, num_parts: int, pass_size: int | None, last: bool = True
    ) -> Batch:
        """Collect every num_parts-th sample of a cut, so that no rank gets only one end of the batch.

        Args:
            stream: Where the cut is from.
            cut: The global batch.
            part: Which part of it.
            num_parts: Micro batches that share it.
            pass_size: Items of an evaluation pass; samples beyond it are fillers.
            last: Whether this rank needs nothing more of the cut.
        """
        name, micro = stream.spec.name, self._info.micro
        if name not in self._collectors:
            self._collectors[name] = self._collector(name)
        records = cut.resolutions[part::num_parts].clone(memory_format=torch.contiguous_format)
        epoch = self._no_epoch
        if stream.spec.kind != "random":
            epoch = cut.epochs.view(micro, num_parts)[:, part].clone()
        words: list[int] = cut.head.tolist()
        tensors, mask = self._collectors[name].collect(records)
        total = words[TOTAL]
        if last:
            stream.consume(cut.key)
        valid = self._valid if pass_size is None else records[:, R_NUMBER] < pass_size
        unit_masses = stream.spec.rule.unit == "step" and not stream.has_item_masses
        weight = None if stream.spec.priorities is None else self._weigh(stream, words, records)
        batch = Batch(tensors, mask, records, valid, unit_masses, total, epoch, weight)
        if self._device.type != "cpu":
            batch = batch.to(self._device)
        if self.transform is not None:
            batch = self.transform(
                batch, position.transform_keys(self._config.seed, stream.spec.key, records[:, R_NUMBER])
            )
        return batch

    @staticmethod
    def _weigh(stream: Stream, words: list[int], records: torch.Tensor) -> torch.Tensor:
        """Return the importance weights of samples of a cut. [B], float32."""
        weight = torch.empty(len(records))
        stream.ops.importance_(weight, records, words[NUMERATOR], words[DIVISOR], words[EXPONENT])
        return weight

    def _collector(self, stream: str) -> Collector:
        info, ahead = self._info, self._config.prefetch * self._info.accumulation
        depth = max(2, info.accumulation) + (ahead + 1 if ahead and stream == TRAIN else 0)
        return Collector(
            self._fields,
            self._table,
            self._statistics,
            self._config.n_step,
            info.micro,
            depth,
            self._engine_dtype,
            self._config.threads,
        )

"""From cuts to batches: which samples are this rank's, and what is collected for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.batch_info import TRAIN, BatchInfo
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.batching.relabelling import HindsightRelabelling
from deepspeed_gear.batching.transfer.device_gather import DeviceGatherer, FieldTransfer, Reach
from deepspeed_gear.checkpoint import position
from deepspeed_gear.config import GearConfig
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.distributed.read_needs import ReadNeeds
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.device_transfer import DeviceTransfer, is_wanted
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.stream_records import Head

Transform = Callable[[Batch, torch.Tensor], Batch]


class BatchAssembler:
    """Makes this rank's batches of all streams. One thread per stream.

    Args:
        config: The config.
        needs: What this rank needs of a batch.
        train: The training stream of each sampled table.
        statistics: Of their columns over the training split.
        info: Sizes of a batch.
        engine_dtype: What `"as": "engine"` means.
        device: Where batches go.
        relabelling: Goals by hindsight.
        burn_in: Steps that only warm up.
        held: Prepared batches that are kept beside those that wait.
    """

    def __init__(
        self,
        config: GearConfig,
        needs: ReadNeeds,
        train: Sequence[BatchStream],
        statistics: Mapping[str, ColumnStatistics],
        info: BatchInfo,
        engine_dtype: torch.dtype,
        device: torch.device,
        relabelling: HindsightRelabelling,
        burn_in: BurnIn | None,
        held: int = 0,
    ) -> None:
        self._config, self._needs, self._statistics = config, needs, statistics
        self._info, self._engine_dtype, self._device = info, engine_dtype, device
        self._held = held
        self.transform: Transform | None = None
        self._valid = torch.ones(info.micro, dtype=torch.bool)
        self._no_epoch = torch.zeros(info.micro, dtype=torch.int64)
        self._train, self._relabelling, self._burn_in = train, relabelling, burn_in
        self._placing: DeviceTransfer | None = None
        if is_wanted(config, device):
            keep = max(2, info.accumulation)
            self._placing = DeviceTransfer(config, needs, train, device, info.micro, keep, self._placed)
        self._collectors = {stream: self._collector(stream) for stream in train}
        specs = [stream.table.spec for stream in train]
        self._mapped = [s.dataset.files for s in specs if s.dataset is not None and not s.in_memory]

    @property
    def relabelling(self) -> HindsightRelabelling:
        """Goals by hindsight, which depend on samples alone."""
        return self._relabelling

    @property
    def counters(self) -> torch.Tensor:
        """Real rows, all rows and bytes that the training stream has collected. [3], int64."""
        return torch.stack([self._collectors[stream].totals() for stream in self._train]).sum(0)

    def _check_files(self) -> None:
        """Look once a second whether a mapped data set has changed."""
        for files in self._mapped:
            files.check_at_times()

    def mix(
        self,
        cuts: Sequence[tuple[BatchStream, Selection]],
        chosen: Sequence[np.ndarray],
        shares: Sequence[float],
        last: bool,
    ) -> Batch:
        """Collect samples of several tables' cuts into one batch, table by table.

        Args:
            cuts: Each table's training stream and its cut of the global batch.
            chosen: Which samples of each cut.
            shares: Part of each table in the global batch.
            last: Whether this rank needs nothing more of the cuts.
        Raises:
            DataError: A mapped file has changed.
        """
        self._check_files()
        self.settle()
        parts, weights, probabilities, keys, origins = [], [], [], [], []
        for (stream, cut), which, share in zip(cuts, chosen, shares, strict=True):
            records = cut.resolutions[torch.from_numpy(which)]
            origins.append(
                records[:, Resolution.SLOT] if cut.origins is None else cut.origins[torch.from_numpy(which)]
            )
            words = cut.head
            parts.append((self._collectors[stream], records, self._relabelling.draw(stream, records)))
            weights.append(self._weigh(stream, words, records))
            probabilities.append(self._probability(stream, words, records) * share)
            keys.append(
                position.transform_keys(
                    self._config.seed, stream.spec.key, records[:, Resolution.SAMPLE_NUMBER]
                )
            )
        epoch = torch.cat([cut.epochs[torch.from_numpy(w)] for (_, cut), w in zip(cuts, chosen, strict=True)])
        tensors, mask = parts[0][0].collect_from(parts)
        if last:
            for stream, cut in cuts:
                self._consume(stream, cut.key)
        source = torch.repeat_interleave(torch.tensor([len(records) for _, records, _ in parts]))
        records, weight = torch.cat([records for _, records, _ in parts]), torch.cat(weights)
        goals = self._relabelling.together([goal_step for _, _, goal_step in parts])
        probability = torch.cat(probabilities)
        rest = (weight, source, probability, goals, self._burn_in)
        origin = None if all(cut.origins is None for _, cut in cuts) else torch.cat(origins)
        batch = Batch(tensors, mask, records, self._valid, False, 0, epoch, *rest, origin)
        parts[0][0].lend(batch)
        return self._finish(batch, torch.cat(keys), parts[0][0])

    def make(
        self,
        stream: BatchStream,
        cut: Selection,
        part: int,
        num_parts: int,
        pass_size: int | None,
        last: bool = True,
    ) -> Batch:
        """Collect every num_parts-th sample of a cut, so that no rank gets only one end of the batch.

        Args:
            stream: Where the cut is from.
            cut: The global batch.
            part: Which part of it.
            num_parts: Micro batches that share it.
            pass_size: Items of an evaluation pass; samples beyond it are fillers.
            last: Whether this rank needs nothing more of the cut.
        Raises:
            DataError: A mapped file has changed.
        """
        self._check_files()
        self.settle()
        micro = self._info.micro
        if stream not in self._collectors:
            self._collectors[stream] = self._collector(stream)
        if num_parts == 1:
            records = cut.resolutions.clone()
        else:
            records = cut.resolutions[part::num_parts].clone(memory_format=torch.contiguous_format)
        origin = None if cut.origins is None else cut.origins[part::num_parts].clone()
        epoch = self._no_epoch
        if stream.spec.kind != "random":
            epoch = cut.epochs.view(micro, num_parts)[:, part].clone()
        words = cut.head
        goals = self._relabelling.draw(stream, records)
        collector = self._collectors[stream]
        tensors, mask = collector.collect(records, goals)
        total = words[Head.TOTAL]
        if last:
            self._consume(stream, cut.key)
        valid = self._valid if pass_size is None else records[:, Resolution.SAMPLE_NUMBER] < pass_size
        weight = None if stream.spec.priorities is None else self._weigh(stream, words, records)
        rest = (weight, None, None, goals, self._burn_in)
        unit = stream.has_unit_masses
        batch = Batch(tensors, mask, records, valid, unit, total, epoch, *rest, origin)
        collector.lend(batch)
        keys = None
        if self.transform is not None:
            keys = position.transform_keys(
                self._config.seed, stream.spec.key, records[:, Resolution.SAMPLE_NUMBER]
            )
        return self._finish(batch, keys, collector)

    # ---- to the device ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Tell the streams which cuts the device has read; waits for nothing."""
        if self._placing is not None:
            self._placing.guards.settle()

    def drain(self) -> bool:
        """Wait until the device has read every cut; return whether it had one to read."""
        return self._placing is not None and self._placing.guards.drain()

    def refuse_capture(self) -> None:
        """Refuse to make a batch for a CUDA graph.

        Raises:
            StoreError: One is captured.
        """
        if self._placing is not None:
            self._placing.refuse_capture()

    def hand_over(self, batch: Batch) -> Batch:
        """Return a batch to the thread that uses it, whose stream waits for what is under way."""
        return batch if self._placing is None else self._placing.hand_over(batch)

    def describe(self) -> dict[str, Any]:
        """Return how batches get to the device; nothing where the host collects them in place."""
        return {} if self._placing is None else {"collect": self._placing.describe()}

    def close(self) -> None:
        """Let the device end its reading of the tables, which are closed behind this."""
        if self._placing is not None:
            self._placing.close()

    def _consume(self, stream: BatchStream, key: int) -> None:
        collector = self._collectors[stream]
        if self._placing is not None and isinstance(collector, DeviceGatherer):
            self._placing.consume(stream, key, collector)
        else:
            stream.consume(key)

    def _finish(self, batch: Batch, keys: torch.Tensor | None, collector: Gatherer) -> Batch:
        """Move a batch to the device and call the user's transform."""
        if self._placing is not None and isinstance(collector, DeviceGatherer):
            lane = self._placing.lane
            with lane.running():
                if self.transform is not None and keys is not None:  # it computes where the batch is
                    keys = lane.bring([keys])[0]
                batch = self._change(self._placing.bring(batch), keys)
            return self._placing.finish(batch, collector)
        if self._device.type != "cpu":
            batch = batch.to(self._device)
            keys = None if keys is None else keys.to(self._device)
        return self._change(batch, keys)

    def _change(self, batch: Batch, keys: torch.Tensor | None) -> Batch:
        self._relabelling.reward(batch)
        if self.transform is None or keys is None:
            return batch
        changed = self.transform(batch, keys)
        if not isinstance(changed, Batch):
            raise ConfigError("transform", "must return a Batch", type(changed).__name__, "return the batch")
        if changed.lifetime is None and batch.lifetime is not None:
            batch.lifetime.follow(changed)  # it may be made of the same tensors
        return changed

    @staticmethod
    def _probability(stream: BatchStream, words: list[int], records: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of samples within their table. [B], float64."""
        if stream.has_unit_masses:
            return torch.full((len(records),), 1 / max(words[Head.TOTAL], 1), dtype=torch.float64)
        return records[:, Resolution.MASS].double() / max(words[Head.TOTAL], 1)

    @staticmethod
    def _weigh(stream: BatchStream, words: list[int], records: torch.Tensor) -> torch.Tensor:
        """Return the importance weights of samples of a cut. [B], float32."""
        if stream.spec.priorities is None:
            return torch.ones(len(records))
        weight = torch.empty(records.size(0))
        stream.ops.importance_(
            weight, records, words[Head.NUMERATOR], words[Head.DIVISOR], words[Head.EXPONENT]
        )
        return weight

    def _collector(self, stream: BatchStream) -> Gatherer:
        info, ahead = self._info, self._config.prefetch * self._info.accumulation
        prepared = ahead + 1 + self._held if ahead and stream.spec.name == TRAIN else 0
        depth = max(2, info.accumulation) + prepared
        if self._placing is None:
            return Gatherer(**self._wanted_of(stream, depth))
        placing = self._placing
        return self._placed(stream, placing.carriage(placing.way), placing.reach(stream.table), depth + 1)

    def _placed(
        self, stream: BatchStream, carriage: FieldTransfer, reach: Reach, depth: int
    ) -> DeviceGatherer:
        return DeviceGatherer(carriage, reach, **self._wanted_of(stream, depth))

    def _wanted_of(self, stream: BatchStream, depth: int) -> dict[str, Any]:
        """Return the arguments that every collector takes."""
        return {
            "fields": self._needs.fields,
            "table": stream.table,
            "statistics": self._statistics,
            "n_step": self._config.n_step if self._needs.n_step else None,
            "num_samples": self._info.micro,
            "depth": depth,
            "engine_dtype": self._engine_dtype,
            "threads": self._config.threads,
        }

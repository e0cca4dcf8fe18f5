"""Batch assembler: this rank's samples of a selection, gathered into a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.batch import Batch, BatchSamples
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.pack_gather import read_opaque
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.batching.transfer.device_gather import DeviceGatherer, FieldTransfer, Reach
from deepspeed_gear.checkpoint import position
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.device_transfer import DeviceTransfer, is_wanted
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection, SelectionPart
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.table import Table

Transform = Callable[[Batch, torch.Tensor], Batch]


class BatchAssembler:
    """Gathers this rank's batches of all streams from their selections. One thread per stream.

    Args:
        plan: The plan that all ranks have agreed on.
        train: The training stream of each sampled table.
        engine_dtype: The dtype of `"as": "engine"`.
        device: The device of the batches.
        releases: Deferred releases of selections that the device still reads.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        train: Sequence[BatchStream],
        relabelling: HindsightRelabelling,
        engine_dtype: torch.dtype,
        device: torch.device,
        releases: DeferredRelease,
    ) -> None:
        config, needs, info = plan.config, plan.needs, plan.info
        self._config, self._needs, self._info = config, needs, info
        self._statistics = plan.statistics(needs.fields)
        self._engine_dtype, self._device, self._releases = engine_dtype, device, releases
        self._held = int(plan.topology.num_nodes > 1)  # batches that are kept besides those that wait
        self.transform: Transform | None = None
        self._valid = torch.ones(info.micro, dtype=torch.bool)
        self._no_epoch = torch.zeros(info.micro, dtype=torch.int64)
        self._train, self._relabelling = train, relabelling
        self._burn_in = BurnIn.of(config, plan.fields, needs.fields)
        self._placing: DeviceTransfer | None = None
        if is_wanted(config, device):
            keep = max(2, info.accumulation)
            tables = [stream.table for stream in train]
            self._placing = DeviceTransfer(config, needs, tables, device, info.micro, keep, self._placed)
        self._stays_on_host = device.type == "cpu" and self._placing is None and not relabelling.has_reward
        self._collectors = {stream: self._gatherer(stream) for stream in train}
        specs = [stream.table.spec for stream in train]
        self._mapped = [s.dataset.files for s in specs if s.dataset is not None and not s.in_memory]

    @property
    def counters(self) -> torch.Tensor:
        """Totals of real rows, all rows and bytes gathered for the training stream. [3], int64."""
        return torch.stack([self._collectors[stream].totals() for stream in self._train]).sum(0)

    def _check_files(self) -> None:
        """Check once a second that mapped data sets have not changed."""
        for files in self._mapped:
            files.check_at_times()

    def assemble_mixture(
        self,
        selections: Sequence[tuple[BatchStream, Selection]],
        chosen: Sequence[np.ndarray],
        shares: Sequence[float],
        part: int,
    ) -> Batch:
        """Gather samples of several tables' selections into one batch, table by table.

        Args:
            selections: Each table's training stream and its selection of the global batch.
            chosen: Which samples of each selection.
            shares: Share of each table in the global batch.
            part: Index of the micro batch in the global batch.
        Raises:
            DataError: A mapped file has changed.
        """
        self._check_files()
        self._releases.settle()
        parts, weights, probabilities, keys, origins, epochs = [], [], [], [], [], []
        for (stream, selection), which, share in zip(selections, chosen, shares, strict=True):
            index = torch.from_numpy(which)
            records, all_origins = selection.resolutions[index], selection.origins
            origins.append(records[:, Resolution.SLOT] if all_origins is None else all_origins[index])
            goals = self._relabelling.draw(stream.spec.key, records)
            parts.append((self._collectors[stream], records, goals))
            weights.append(stream.weights(selection.head, records))
            probabilities.append(self._probability(stream, selection.head, records) * share)
            numbers = records[:, Resolution.SAMPLE_NUMBER]
            keys.append(position.transform_keys(self._config.seed, stream.spec.key, numbers))
            epochs.append(selection.epochs[index])
        tensors, mask = parts[0][0].gather_from(parts)
        is_spread = any(selection.origins is not None for _, selection in selections)
        samples = BatchSamples(
            records=torch.cat([records for _, records, _ in parts]),
            valid=self._valid,
            step_items=False,
            total=0,
            epoch=torch.cat(epochs),
            is_weight=torch.cat(weights),
            source=torch.repeat_interleave(torch.tensor([len(records) for _, records, _ in parts])),
            probability=torch.cat(probabilities),
            goal_step=self._relabelling.together([goal_step for _, _, goal_step in parts]),
            burn_in=self._burn_in,
            origin=torch.cat(origins) if is_spread else None,
            first_index=part,
            index_step=self._info.num_micro,
            opaque=self._opaque([(s.table, r) for (s, _), (_, r, _) in zip(selections, parts, strict=True)]),
        )
        batch = Batch(tensors, mask, samples)
        parts[0][0].lend(batch)
        return self._finish(batch, torch.cat(keys), parts[0][0])

    def assemble(
        self,
        stream: BatchStream,
        taken: SelectionPart,
        part: int,
        num_parts: int,
        pass_size: int | None = None,
    ) -> Batch:
        """Gather the samples of a part of a selection.

        Args:
            stream: The stream of the selection.
            taken: The part of the global batch.
            part: Index of the micro batch.
            num_parts: Number of micro batches.
            pass_size: Items of an evaluation pass, after which samples are fillers; None: no pass.
        Raises:
            DataError: A mapped file has changed.
        """
        if self._mapped:
            self._check_files()
        if self._placing is not None:
            self._releases.settle()
        if stream not in self._collectors:
            self._collectors[stream] = self._gatherer(stream)
        records = taken.records
        goals = self._relabelling.draw(stream.spec.key, records)
        gatherer = self._collectors[stream]
        tensors, mask = gatherer.gather(records, goals)
        valid = self._valid
        if pass_size is not None:
            valid = records[:, Resolution.SAMPLE_NUMBER] < pass_size
        unit, total = stream.state.has_unit_masses, taken.head[Head.TOTAL]
        epochs = self._no_epoch if taken.epochs is None else taken.epochs
        opaque = self._opaque([(stream.table, records)]) if self._needs.opaque else None
        rest = (goals, self._burn_in, taken.origins, part, num_parts, opaque)
        samples = BatchSamples(records, valid, unit, total, epochs, taken.weights, None, None, *rest)
        batch = Batch(tensors, mask, samples)
        gatherer.lend(batch)
        keys = None
        if self.transform is not None:
            numbers = records[:, Resolution.SAMPLE_NUMBER]
            keys = position.transform_keys(self._config.seed, stream.spec.key, numbers)
        return self._finish(batch, keys, gatherer)

    def release(self, stream: BatchStream, key: int) -> None:
        """Release a selection that this rank has gathered, once the device has read its rows."""
        if self._placing is not None:
            gatherer = self._collectors[stream]
            if isinstance(gatherer, DeviceGatherer) and gatherer.reads_in_place:
                self._releases.hold(self._placing.lane.record(), stream.release, key)
                return
        stream.release(key)

    # ---- to the device ---------------------------------------------------------------------------

    def drain(self) -> bool:
        """Wait until the device has read all selections; return whether there were any."""
        return self._releases.drain()

    @property
    def uses_device(self) -> bool:
        """Whether batches are transferred to a device by its kernels."""
        return self._placing is not None

    def refuse_capture(self) -> None:
        """Raise if a CUDA graph is captured, which cannot contain `sample`.

        Raises:
            StoreError: A graph is captured.
        """
        if self._placing is not None:
            self._placing.refuse_capture()

    def hand_over(self, batch: Batch) -> Batch:
        """Return a batch to the thread that uses it; its CUDA stream waits for the batch."""
        return batch if self._placing is None else self._placing.hand_over(batch)

    def describe(self) -> dict[str, Any]:
        """Return the transfer of batches to the device; empty where the host gathers them in place."""
        return {} if self._placing is None else {"transfer": self._placing.describe()}

    def close(self) -> None:
        """Wait until the device no longer reads the tables; they are closed after this."""
        if self._placing is not None:
            with contextlib.suppress(RuntimeError):  # a failed device reads nothing
                self._releases.drain()
            self._placing.close()

    def _finish(self, batch: Batch, keys: torch.Tensor | None, gatherer: Gatherer) -> Batch:
        """Move a batch to the device and call the user's transform."""
        if self._stays_on_host and self.transform is None:
            return batch
        if self._placing is not None and isinstance(gatherer, DeviceGatherer):
            lane = self._placing.lane
            with lane.running():
                if self.transform is not None and keys is not None:  # it runs on the batch's device
                    keys = lane.bring([keys])[0]
                batch = self._change(self._placing.bring(batch), keys)
            return self._placing.finish(batch, gatherer)
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
            batch.lifetime.follow(changed)  # it may have the same tensors
        return changed

    def _opaque(self, parts: Sequence[tuple[Table, torch.Tensor]]) -> dict[str, list[Any]] | None:
        """Return the values of opaque fields of records, part after part; None without such fields."""
        if not self._needs.opaque:
            return None
        found: dict[str, list[Any]] = {field.name: [] for field in self._needs.opaque}
        for field in self._needs.opaque:
            assert field.column is not None
            for table, records in parts:
                found[field.name] += read_opaque(table, field.column, records)
        return found

    @staticmethod
    def _probability(stream: BatchStream, words: list[int], records: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of samples within their table. [B], float64."""
        if stream.state.has_unit_masses:
            return torch.full((len(records),), 1 / max(words[Head.TOTAL], 1), dtype=torch.float64)
        return records[:, Resolution.MASS].double() / max(words[Head.TOTAL], 1)

    def _gatherer(self, stream: BatchStream) -> Gatherer:
        info, ahead = self._info, self._config.prefetch * self._info.accumulation
        prepared = ahead + 1 + self._held if ahead and stream.spec.name == TRAIN else 0
        depth = max(2, info.accumulation) + prepared
        if self._placing is None:
            return Gatherer(**self._gathering(stream.table, depth))
        placing = self._placing
        table = stream.table
        return self._placed(table, placing.transfer(placing.way), placing.reach(table), depth + 1)

    def _placed(self, table: Table, transfer: FieldTransfer, reach: Reach, depth: int) -> DeviceGatherer:
        return DeviceGatherer(transfer, reach, **self._gathering(table, depth))

    def _gathering(self, table: Table, depth: int) -> dict[str, Any]:
        """Return the arguments that every gatherer takes."""
        return {
            "fields": self._needs.fields,
            "table": table,
            "statistics": self._statistics,
            "n_step": self._config.n_step if self._needs.n_step else None,
            "num_samples": self._info.micro,
            "depth": depth,
            "engine_dtype": self._engine_dtype,
            "threads": self._config.threads,
        }

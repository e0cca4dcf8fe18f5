"""Batch assembler: this rank's samples of a selection, gathered into a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from deepspeed_gear.batching.batch import Batch, BatchSamples
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.field_rows import read_opaque
from deepspeed_gear.batching.gather import Gatherer, GatherOptions
from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.batching.transfer.device_gather import DeviceGatherer
from deepspeed_gear.batching.transform import Transform, transform_words
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay.device_transfer import DeviceTransfer, is_wanted
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.records import Head


class BatchAssembler:
    """Gathers this rank's batches of all streams from their selections. One thread per stream."""

    def __init__(
        self,
        plan: Resolved,
        train: Sequence[BatchStream],
        relabelling: HindsightRelabelling,
        engine_dtype: torch.dtype,
        device: torch.device,
        releases: DeferredRelease,
    ) -> None:
        config = plan.config
        needs = plan.needs
        info = plan.info
        self._config = config
        self._needs = needs
        self._info = info
        self._device = device
        self._releases = releases
        self._options = GatherOptions(
            fields=needs.fields,
            statistics=plan.statistics(needs.fields),
            n_step=config.n_step if needs.n_step else None,
            num_samples=info.micro,
            engine_dtype=engine_dtype,
            threads=config.threads,
        )
        self._held = int(
            plan.topology.num_nodes > 1
        )  # batches that are kept besides those that wait
        self._transform: Transform | None = None
        self._valid = torch.ones(info.micro, dtype=torch.bool)
        self._no_epoch = torch.zeros(info.micro, dtype=torch.int64)
        self._train = train
        self._relabelling = relabelling
        self._burn_in = BurnIn.of(config.burn_in, plan.fields, needs.fields)
        #: To a device, by its kernels; None where the host gathers batches in place.
        self.transfer: DeviceTransfer | None = None
        if is_wanted(config.transfer, device):
            keep = max(2, info.accumulation)
            tables = [stream.table for stream in train]
            own = config.transfer, config.backend
            self.transfer = DeviceTransfer(
                *own, needs, tables, device, info.micro, keep, self._options
            )
        self._stays_on_host = (
            device.type == "cpu" and self.transfer is None and not relabelling.has_reward
        )
        self._gatherers = {stream: self._gatherer(stream) for stream in train}
        specs = [stream.table.spec for stream in train]
        self._mapped = [
            s.dataset.files
            for s in specs
            if s.dataset is not None and (s.compressed or not s.in_memory)
        ]

    @property
    def counters(self) -> torch.Tensor:
        """Totals of real rows, all rows and bytes gathered for the training stream. [3], int64."""
        return torch.stack([self._gatherers[stream].totals() for stream in self._train]).sum(0)

    def assemble(
        self,
        taken: Sequence[tuple[BatchStream, Selection]],
        part: int,
        num_parts: int,
        pass_size: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> Batch:
        """Gather the samples of selections into one batch, table by table.

        Raises:
            DataError: A mapped file of a data set has changed.
        """
        for files in self._mapped:
            files.check_at_times()
        if self.transfer is not None:
            self._releases.settle()
        parts: list[tuple[Gatherer, torch.Tensor, torch.Tensor | None]] = []
        for stream, own in taken:
            gatherer = self._gatherers.get(stream)
            numbers = stream.state.numbers
            if gatherer is None:  # of a pass
                gatherer = self._gatherers[stream] = self._gatherer(stream)
            if numbers is not None:
                columns = stream.table.spec.normalized_columns
                gatherer.normalize_with(numbers[own.head[Head.NUMBER] % stream.spec.depth], columns)
            parts.append(
                (
                    gatherer,
                    own.resolutions,
                    self._relabelling.draw(stream.spec.random_key, own.resolutions),
                )
            )
        gatherer, resolutions, goals = parts[0]
        source = probability = None
        if shares is None:
            tensors, mask = gatherer.gather(resolutions, goals)
        else:
            tensors, mask = gatherer.gather_from(parts)
            own = _joined([own for _, own in taken])
            goals = (
                None
                if goals is None
                else torch.cat([each for _, _, each in parts if each is not None])
            )
            source = torch.repeat_interleave(
                torch.tensor([len(own.resolutions) for _, own in taken])
            )
            of_tables = zip(taken, shares, strict=True)
            probability = torch.cat([_probability(*one) * share for one, share in of_tables])
        samples = BatchSamples(
            resolutions=own.resolutions,
            valid=self._valid
            if pass_size is None
            else own.resolutions[:, Resolution.SAMPLE_NUMBER] < pass_size,
            step_items=shares is None and stream.state.has_unit_masses,
            total=own.head[Head.TOTAL] if shares is None else 0,
            epoch=self._no_epoch if own.epochs is None else own.epochs,
            is_weight=own.weights,
            source=source,
            probability=probability,
            goal_step=goals,
            burn_in=self._burn_in,
            origin=own.origins,
            first_index=part,
            index_step=num_parts,
            opaque=self._opaque(taken) if self._needs.opaque else None,
        )
        batch = Batch(tensors, mask, samples)
        gatherer.lend(batch)
        if self._stays_on_host and self._transform is None:
            return batch
        if self.transfer is None:
            return self._change(
                batch if self._device.type == "cpu" else batch.to(self._device), taken
            )
        with self.transfer.lane.running():
            batch = self._change(self.transfer.bring(batch), taken)
        assert isinstance(gatherer, DeviceGatherer)
        return self.transfer.finish(batch, gatherer)

    def use(self, transform: Transform | None) -> None:
        self._transform = transform

    def release(self, stream: BatchStream, number: int) -> None:
        """Release a selection that this rank has gathered, once the device has read its rows."""
        if self.transfer is not None and self._gatherers[stream].reads_in_place:
            self._releases.hold(self.transfer.lane.record(), stream.release, number)
        else:
            stream.release(number)

    def close(self) -> None:
        """Wait until the device no longer reads the tables; they are closed after this."""
        if self.transfer is not None:
            with contextlib.suppress(RuntimeError):  # a failed device reads nothing
                self._releases.drain()
            self.transfer.close()

    def _change(self, batch: Batch, taken: Sequence[tuple[BatchStream, Selection]]) -> Batch:
        """Compute the program's rewards, and call its transform."""
        self._relabelling.reward(batch)
        if self._transform is None:
            return batch
        seed = self._config.seed
        number = Resolution.SAMPLE_NUMBER
        made = [
            transform_words(seed, s.spec.random_key, own.resolutions[:, number]) for s, own in taken
        ]
        words = torch.cat(made)
        words = (
            words.to(self._device)
            if self.transfer is None
            else self.transfer.lane.bring([words])[0]
        )
        changed = self._transform(batch, words)
        if not isinstance(changed, Batch):
            raise ConfigError(
                "transform", "must return a Batch", type(changed).__name__, "return the batch"
            )
        if changed.lifetime is None and batch.lifetime is not None:
            batch.lifetime.follow(changed)  # it may have the same tensors
        return changed

    def _opaque(self, taken: Sequence[tuple[BatchStream, Selection]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for field in self._needs.opaque:
            assert field.column is not None
            values = [
                read_opaque(stream.table, field.column, own.resolutions) for stream, own in taken
            ]
            found[field.name] = list(chain.from_iterable(values))
        return found

    def _gatherer(self, stream: BatchStream) -> Gatherer:
        info = self._info
        ahead = self._config.prefetch * self._info.accumulation
        prepared = ahead + 1 + self._held if ahead and stream.spec.name == TRAIN else 0
        depth = max(2, info.accumulation) + prepared
        if self.transfer is None:
            return Gatherer(self._options, stream.table, depth)
        return self.transfer.gatherer(stream.table, depth + 1)


def _joined(every: Sequence[Selection]) -> Selection:
    """Return the samples of tables one after the other; each has epochs and weights."""
    _, *of_each, _ = zip(*every, strict=True)
    slots = [
        own.resolutions[:, Resolution.SLOT] if own.origins is None else own.origins for own in every
    ]
    origins = torch.cat(slots) if any(own.origins is not None for own in every) else None
    resolutions, weights, epochs = map(torch.cat, of_each)
    return Selection(every[0].head, resolutions, weights, epochs, origins)


def _probability(stream: BatchStream, own: Selection) -> torch.Tensor:
    """Return the probabilities of samples within their table. [B], float64."""
    total = max(own.head[Head.TOTAL], 1)
    if stream.state.has_unit_masses:
        return torch.full((len(own.resolutions),), 1 / total, dtype=torch.float64)
    return own.resolutions[:, Resolution.MASS].double() / total

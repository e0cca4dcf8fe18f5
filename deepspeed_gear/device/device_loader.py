"""Batches of a table on a device: filling, accumulation, priority reports, evaluation passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.batch_samples import BatchSamples
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Buffers, note_overwritten
from deepspeed_gear.batching.transfer.cuda_streams import refuse_capture
from deepspeed_gear.device.device_table import DeviceTable, TableMixture, dataset_masses
from deepspeed_gear.distributed.control_plane import purpose_group
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.mass_rules import UNIT_CODES
from deepspeed_gear.sampling.stream_spec import StreamSpec


def replica_broadcast(plan: Resolved, device: torch.device) -> Callable[[Tensor], None] | None:
    """Return an in-place broadcast from this replica's reporting rank to its others. Collective.

    It is None for a replica of one rank. Between GPUs it is NCCL's, queued on the current CUDA
    stream: the host does not wait, and it can be captured. Ranks that share a GPU, which NCCL
    refuses, use gloo and host memory.
    """
    topology = plan.topology
    group = plan.group
    mine = [
        rank
        for rank, place in enumerate(topology.places)
        if place.data_rank == topology.place.data_rank
    ]
    if len(mine) == 1:
        return None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    known = plan.control_plane.all_gather((topology.node, gpu))
    by_host = gpu is not None and len(set(known)) < len(known)
    ranks = mine if group is None else [dist.get_global_rank(group, rank) for rank in mine]
    source = next(at for rank, at in zip(mine, ranks, strict=True) if topology.places[rank].reports)
    backend = "gloo" if gpu is None or by_host else "nccl"
    made = purpose_group(
        tuple(sorted(ranks)), f"replica {topology.place.data_rank}", plan.config.timeout_s, backend
    )

    def broadcast(values: Tensor) -> None:
        there = values.cpu() if by_host else values
        dist.broadcast(there, source, group=made)
        if there is not values:
            values.copy_(there)

    # Left out of traces: as a decorator that would import torch's compiler with the package.
    untraced: Callable[[Tensor], None] = torch.compiler.disable(broadcast)  # type: ignore[no-untyped-call]
    return untraced


class DeviceLoader:
    """Fills batches of fixed tensors and takes priority updates, without waiting.

    Its constructor is collective.
    """

    def __init__(
        self, plan: Resolved, mixture: TableMixture, burn_in: BurnIn | None, owner: object
    ) -> None:
        self._mixture = mixture
        self._data_rank = plan.topology.place.data_rank
        # To this replica's ranks; None: it has one rank, or no priorities are reported.
        self._broadcast = (
            replica_broadcast(plan, mixture.device) if mixture.is_prioritized else None
        )
        self._burn_in = burn_in
        self._owner = owner
        info = self._info = plan.info
        count = info.micro * info.accumulation
        # Resolutions, PER weights and epochs of this rank's samples of a global batch. Micro batch
        # k has the samples k, k + accumulation, ...
        self._all = torch.zeros(
            count, Resolution.NUM_WORDS, dtype=torch.int64, device=mixture.device
        )
        self._all_weights = torch.ones(
            count if mixture.is_prioritized else 0, device=mixture.device
        )
        self._all_epochs = torch.zeros(
            count if mixture.by_epoch else 0, dtype=torch.int64, device=mixture.device
        )
        self._later = [mixture.buffers(info.micro) for _ in range(info.accumulation - 1)]
        self._ring: Iterator[DeviceBatch] | None = None
        self.next_index = 0
        # Priority updates of some micro batches of a global batch: resolutions and values.
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        later = [tensor for buffers in self._later for tensor in buffers.all]
        counters = [each.gatherer.counters for each in mixture.tables]
        for tensor in (self._all, self._all_weights, self._all_epochs, *counters, *later):
            torch._dynamo.mark_static_address(tensor)  # as in RingTable

    def new_batch(self) -> DeviceBatch:
        """Allocate a batch for `fill_`."""
        size = self._info.micro
        mixture = self._mixture
        resolutions = torch.zeros_like(self._all[:size])
        weight = None
        if mixture.is_prioritized:
            weight = torch.ones(size, device=mixture.device)
        facts = (mixture.has_step_items, mixture.totals()[0], self._burn_in)
        of = mixture if len(mixture.tables) > 1 else None
        batch = DeviceBatch(mixture.buffers(size), resolutions, weight, *facts, self._owner, of)
        for tensor in batch.written:
            torch._dynamo.mark_static_address(tensor)
        return batch

    def fill_(self, out: DeviceBatch) -> None:
        """Fill a batch with this rank's next micro batch; see `DeviceReplay.sample_`."""
        if not torch.compiler.is_compiling():
            note_overwritten(out.written)
        mixture = self._mixture
        info = self._info
        index = self.next_index
        if index == 0:
            self.apply_updates()
        first = self._data_rank + index * info.data_world
        source = mixture.sources[index]
        if info.accumulation == 1:
            mixture.select_(
                out.resolutions,
                self._all_weights if out.importance is None else out.importance,
                out.epoch if mixture.by_epoch else self._all_epochs,
            )
            mixture.fill(out.buffers, out.resolutions, 0)
            out.place(0, first, info.num_micro_batches, source)
            return
        if index == 0:
            # All micro batches are gathered now, before an add evicts their rows.
            mixture.select_(self._all, self._all_weights, self._all_epochs)
            for later, buffers in enumerate(self._later, 1):
                mixture.fill(buffers, self._all[later :: info.accumulation].contiguous(), later)
        out.place(index, first, info.num_micro_batches, source)
        out.resolutions.copy_(self._all[index :: info.accumulation])
        if out.importance is not None:
            out.importance.copy_(self._all_weights[index :: info.accumulation])
        if mixture.by_epoch:
            out.epoch.copy_(self._all_epochs[index :: info.accumulation])
        if index == 0:
            mixture.fill(out.buffers, out.resolutions, 0)
        else:
            torch._foreach_copy_(out.buffers.all, self._later[index - 1].all)
        self.next_index = (index + 1) % info.accumulation

    def next(self) -> DeviceBatch:
        """Fill the next batch of a ring of `BatchInfo.lifetime` batches."""
        if self._ring is None:
            self._ring = cycle([self.new_batch() for _ in range(self._info.lifetime)])
        batch = next(self._ring)
        self.fill_(batch)
        return batch

    def begin_anew(self) -> None:
        """Continue from another state of the table: drop pending micro batches and updates."""
        self.next_index = 0
        self._waiting.clear()

    def update_(self, batch: DeviceBatch, values: Tensor) -> None:
        """Set the priorities of a micro batch's samples. [B], float32.

        With gradient accumulation they take effect after the last micro batch of the global batch.
        """
        if self._broadcast is not None:
            # Priorities of the replica's other ranks may differ in the last bits, or be those of
            # other steps: all take those of the reporting rank.
            values = values.clone()
            self._broadcast(values)
        if self._info.accumulation == 1:
            self._mixture.update_(batch.resolutions, values, [0])
            return
        self._waiting[batch.micro_index] = (batch.resolutions.clone(), values.clone())
        if batch.micro_index == self._info.accumulation - 1:
            self._apply()

    def apply_updates(self) -> None:
        """Apply pending updates of a global batch of which not all micro batches reported."""
        if self._waiting:
            rule = "must be complete before sampling is captured"
            refuse_capture(
                "reports of some micro batches", rule, "report the others, or sample once before"
            )
            self._apply()

    def _apply(self) -> None:
        parts = sorted(self._waiting)
        waiting = [self._waiting[index] for index in parts]
        self._waiting.clear()
        # Interleaved into the order of sample numbers: of the micro batches [0, 2] and [1, 3] the
        # resolutions are [0, 1, 2, 3].
        resolutions = torch.stack([resolutions for resolutions, _ in waiting], 1)
        values = torch.stack([values for _, values in waiting], 1)
        self._mixture.update_(
            resolutions.reshape(-1, Resolution.NUM_WORDS), values.reshape(-1), parts
        )


class DeviceBatch(Batch):
    """A batch of fixed tensors on a device, which `DeviceReplay.sample_` fills."""

    _internal = frozenset(
        "again buffers importance micro_index of_pass owner place resolutions written".split()
    )

    def __init__(
        self,
        buffers: Buffers,
        resolutions: Tensor,
        weight: Tensor | None,
        step_items: bool,
        total: Tensor,
        burn_in: BurnIn | None,
        owner: object = None,
        mixture: TableMixture | None = None,
    ) -> None:
        self.buffers = buffers
        self.micro_index = 0
        self.owner = owner
        self._mixture = mixture
        #: Resolutions of the samples, [B, 8], int64, and their PER weights; None: all are 1.
        self.resolutions = resolutions
        self.importance = weight
        epoch = torch.zeros(len(resolutions), dtype=torch.int64, device=resolutions.device)
        self.written = [*buffers.all, resolutions, epoch, *([] if weight is None else [weight])]
        valid = resolutions[:, Resolution.ID] >= 0
        samples = BatchSamples(
            resolutions, valid, step_items, total, epoch, weight, burn_in=burn_in
        )
        super().__init__(dict(buffers.tensors), dict(buffers.mask), samples)
        self._valid: Tensor | None = None

    def place(
        self, micro_index: int, first_index: int, index_step: int, source: Tensor | None = None
    ) -> None:
        """Set the micro batch that the batch holds, and its samples' indices and tables."""
        self.micro_index = micro_index
        self._samples.place(first_index, index_step, source)

    def of_pass(self, number: int, size: int) -> None:
        """Set the number of its pass. Samples after the first `size` of the pass are fillers."""
        self._valid = self.sample_number < size
        self._samples = replace(self._samples, epoch=torch.full_like(self.epoch, number))

    def again(self) -> DeviceBatch:
        """Return a batch of the same tensors in which a transform may replace fields."""
        batch = copy.copy(self)
        vars(batch).update(_tensors=dict(self.buffers.tensors), mask=dict(self.buffers.mask))
        return batch

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with a function applied to every tensor, as `Batch.map`.

        The result keeps its probabilities when the table is drawn from again.
        """
        made = super().map(function)
        made._samples.probability = function(self.probability)
        return made

    @property
    def valid(self) -> Tensor:
        """Which samples are real. [B], bool.

        False where the table had no mass to draw from, or the sample only fills up a pass. In the
        training stream it is computed from the resolutions at each access, so that `sample_` need
        not write it.
        """
        return self.trajectory_id >= 0 if self._valid is None else self._valid

    @property
    def probability(self) -> Tensor:
        """Probability of each sample; 0 where the table had no mass to draw. [B], float64."""
        probability = super().probability
        if self._mixture is not None:
            masses = self.resolutions[:, Resolution.MASS].double()
            probability = self._mixture.probability(masses, self.source)
        return torch.where(self.trajectory_id >= 0, probability, 0.0)


_RING = 2  # batches of a pass whose tensors are used in turn


class DeviceEvaluation:
    """Evaluation passes of a DeviceReplay, in stored order and the same on all ranks.

    Resolutions are computed once, on the host, and kept on the device: 64 bytes per item of each
    split that is used.
    """

    def __init__(
        self,
        plan: Resolved,
        table: DeviceTable,
        splits: Mapping[str, StreamSpec],
        burn_in: BurnIn | None,
    ) -> None:
        self._plan = plan
        self._table = table
        self._splits = splits
        self._burn_in = burn_in
        self._items: dict[str, tuple[Tensor, int]] = {}
        self._begun: dict[str, int] = {}

    def num_batches(self, split: str) -> int:
        """Return the number of batches of a pass over a split."""
        return len(self._resolved(split)[0]) // self._splits[split].batch

    def batches(self, split: str) -> Iterator[DeviceBatch]:
        """Begin a pass and return its batches.

        The last batch may hold samples that only fill it; they are not `valid`.
        """
        resolutions, size = self._resolved(split)
        number = self._begun.get(split, 0)
        self._begun[split] = number + 1
        return self._pass(self._splits[split], resolutions, size, number)

    def _pass(
        self, spec: StreamSpec, resolutions: Tensor, size: int, number: int
    ) -> Iterator[DeviceBatch]:
        per_rank = self._plan.info.micro
        place = self._plan.topology.place
        gatherer = self._table.gatherer
        total = torch.tensor(size, device=resolutions.device)
        facts = (spec.rule.unit == "step", total, self._burn_in)
        ring = [
            DeviceBatch(
                gatherer.buffers(per_rank), torch.zeros_like(resolutions[:per_rank]), None, *facts
            )
            for _ in range(_RING)
        ]
        for index in range(len(resolutions) // spec.batch):
            batch = ring[index % _RING]
            first = index * spec.batch
            own = resolutions[first + place.data_rank : first + spec.batch : place.data_world]
            batch.resolutions.copy_(own)
            batch.of_pass(number, size)
            batch.place(0, place.data_rank, place.data_world)
            gatherer.fill(batch.buffers, batch.resolutions)
            yield batch

    def _resolved(self, split: str) -> tuple[Tensor, int]:
        """Return the resolutions of a split's items with fillers at the end, and the item count."""
        if split not in self._splits:
            known = ", ".join((TRAIN, *self._splits))
            raise ConfigError(
                "stream", f"must be one of {known}", split, "give the data set a split"
            )
        if split not in self._items:
            spec = self._splits[split]
            table = self._table.table
            ops = self._plan.ops
            masses = torch.from_numpy(dataset_masses(self._plan, self._table.name, spec))
            sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
            sums[: len(masses)] = masses
            ops.tree_build_(sums, len(masses))
            size = int(masses.sum())
            count = -(-size // spec.batch) * spec.batch
            resolutions = torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64)
            if count:
                rule = spec.rule.anchors.as_list()
                unit = UNIT_CODES[spec.rule.unit]
                known_items = (table.slots.cpu(), torch.arange(count) % size)
                ops.resolve_(
                    resolutions, sums, *known_items, rule, unit, spec.seed, spec.random_key, 0
                )
            self._items[split] = resolutions.to(table.device), size
        return self._items[split]

"""Passes over evaluation splits of a data set in the memory of a device: every item once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.device.device_builder import masses_of
from deepspeed_gear.device.device_loader import DeviceBatch
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.mass_rules import UNIT_CODES
from deepspeed_gear.sampling.stream_spec import StreamSpec

_RING = 2  # batches of a pass whose tensors are used in turn


class DeviceEvaluation:
    """The passes of a DeviceReplay, in stored order and the same on all ranks.

    Resolutions of the items do not change: they are computed once, on the host, and kept on the device.

    Args:
        table: Holds the data set.
        splits: The stream of each split.
        burn_in: Which steps only warm up.
    Cost: 64 bytes an item of each split that is used.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        table: RingTable,
        splits: Mapping[str, StreamSpec],
        gatherer: Gatherer,
        burn_in: BurnIn | None,
    ) -> None:
        self._plan, self._table, self._splits = plan, table, splits
        self._gatherer, self._burn_in = gatherer, burn_in
        self._found: dict[str, tuple[Tensor, int]] = {}
        self._begun: dict[str, int] = {}

    def num_batches(self, split: str) -> int:
        """Return the batches of a rank in a pass.

        Raises:
            ConfigError: There is no such split.
        """
        return len(self._items(split)[0]) // self._spec(split).batch

    def batches(self, split: str) -> Iterator[DeviceBatch]:
        """Begin a pass; return its batches. The last one may hold samples that only fill it: not `valid`.

        Raises:
            ConfigError: There is no such split.
        """
        records, size = self._items(split)
        number = self._begun.get(split, 0)
        self._begun[split] = number + 1
        return self._pass(self._spec(split), records, size, number)

    def _pass(self, spec: StreamSpec, records: Tensor, size: int, number: int) -> Iterator[DeviceBatch]:
        micro, place = self._plan.info.micro, self._plan.topology.place
        total = torch.tensor(size, device=records.device)
        facts = spec.rule.unit == "step", total, self._burn_in
        ring = [
            DeviceBatch(self._gatherer.buffers(micro), torch.zeros_like(records[:micro]), None, *facts)
            for _ in range(_RING)
        ]
        for index in range(len(records) // spec.batch):
            batch, first = ring[index % _RING], index * spec.batch
            batch.records.copy_(records[first : first + spec.batch][place.data_rank :: place.data_world])
            batch.of_pass(number, size)
            batch.place(0, place.data_rank, place.data_world)
            self._gatherer.fill(batch.buffers, batch.records)
            yield batch

    def _spec(self, split: str) -> StreamSpec:
        if split not in self._splits:
            known = ", ".join((TRAIN, *self._splits))
            raise ConfigError("stream", f"must be one of {known}", split, "give the data set a split")
        return self._splits[split]

    def _items(self, split: str) -> tuple[Tensor, int]:
        """Return the resolutions of a split's items, with fillers of its last batch; and the item count."""
        spec = self._spec(split)
        if split not in self._found:
            masses = torch.from_numpy(masses_of(self._plan, self._plan.config.sampled_tables[0], spec))
            sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
            sums[: len(masses)] = masses
            ops = self._plan.ops
            ops.tree_build_(sums, len(masses))
            size = int(masses.sum())
            count = -(-size // spec.batch) * spec.batch
            records = torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64)
            if count:
                rule, unit = spec.rule.anchors.as_list(), UNIT_CODES[spec.rule.unit]
                known = (self._table.slots.cpu(), torch.arange(count) % size)
                ops.resolve_(records, sums, *known, rule, unit, spec.seed, spec.key, 0)
            self._found[split] = records.to(self._table.device), size
        return self._found[split]

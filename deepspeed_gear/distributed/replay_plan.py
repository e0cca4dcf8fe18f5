"""The plan of a replay: config, data, topology and placement, read on every rank and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.cross_checks import check_lengths
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.distributed import config_resolution
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.row_exchange.exchange_plan import ReadNeeds, needs_of
from deepspeed_gear.distributed.sequence_sum import check_process_group
from deepspeed_gear.distributed.shard_placement import ShardPlacement, place_tables
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.sampling.batch_info import BatchInfo
from deepspeed_gear.schema import Schema


@dataclass(frozen=True)
class ReplayPlan:
    """The plan of a replay, on which all ranks have agreed before there is a store.

    Args:
        exchange: The control plane between all ranks.
        topology: Places and nodes of all ranks.
        info: Sizes of a batch.
        datasets: This node's data sets, by table.
        fields: Of a whole batch.
        needs: Fields that this rank reads of a batch.
        placement: Which node holds which shards.
        group: The process group whose ranks the topology counts; None for all.
    """

    exchange: ControlPlane
    config: GearConfig
    ops: Ops
    topology: Topology
    info: BatchInfo
    datasets: dict[str, Dataset]
    schemas: dict[str, Schema]
    fields: list[ResolvedField]
    needs: ReadNeeds
    placement: ShardPlacement
    group: Any = None

    @property
    def splits(self) -> dict[str, dict[str, float]]:
        """Split of each sampled table."""
        return {
            t: config_resolution.split_of(self.config, t, self.datasets) for t in self.config.sampled_tables
        }

    @property
    def holds_shard(self) -> bool:
        """Whether this rank's node holds a part of the spread tables."""
        return self.topology.node in self.placement.order

    @property
    def leads_shard(self) -> bool:
        """Whether this rank is the one of its node that changes the node's shards."""
        return self.topology.leads_node and self.holds_shard

    @property
    def leads_first_shard(self) -> bool:
        """Whether this rank is the one that acts once for the shards of all nodes."""
        return self.leads_shard and self.topology.node == self.placement.order[0]

    def statistics(self, fields: Sequence[ResolvedField]) -> Mapping[str, ColumnStatistics]:
        """Return the statistics of the training split that fields are normalised with, where they are."""
        return self._statistics if any(field.normalize for field in fields) else {}

    @cached_property
    def _statistics(self) -> Mapping[str, ColumnStatistics]:
        return config_resolution.statistics_of(self.config, self.datasets)


def make_plan(
    config: Mapping[str, Any] | GearConfig | str | Path,
    process_group: Any,
    schemas: Mapping[str, Schema] | None,
    info: BatchInfo | None,
    place: RankCoordinates | None,
) -> ReplayPlan:
    """Read config and data on every rank and compare. Collective; the arguments are those of `Replay`.

    Raises:
        ConfigError, DataError, BuildError: On every rank.
    """
    if schemas is not None:
        for name, schema in arguments.mapping("schemas", schemas, "table -> Schema").items():
            arguments.one_of(f"schemas: {name}", schema, Schema, "a Schema")
    arguments.one_of("info", info, (BatchInfo, type(None)), "a BatchInfo")
    arguments.one_of("place", place, (RankCoordinates, type(None)), "a RankCoordinates")
    exchange = ControlPlane(process_group)
    agree = exchange.agree
    checked, ds_sizes = config_resolution.read_config(exchange, config)
    exchange.allow(checked.rollout_timeout_s)
    ops = agree("loading the ops", lambda: load_backend(checked.backend))
    here = place or RankCoordinates(exchange.rank, exchange.world_size)
    topology = Topology.discover(exchange, here)
    if checked.pack is not None:
        agree("the process group", lambda: check_process_group(topology, process_group))
    sizes = agree("the batch sizes", lambda: config_resolution.batch_info(checked, topology, info, ds_sizes))
    config_resolution.compare_placement(exchange, topology, checked)
    datasets = config_resolution.open_data(exchange, checked)
    longest = {name: dataset.longest for name, dataset in datasets.items()}
    agree("the data sets", lambda: check_lengths(checked, longest))
    known = agree("the schemas", lambda: config_resolution.schemas_of(checked, datasets, schemas))
    fields = agree("the fields", lambda: config_resolution.fields_of(checked, known, datasets))
    needs = agree("the fields", lambda: needs_of(here, checked, fields))
    placement = place_tables(exchange, topology, checked, datasets)
    return ReplayPlan(
        exchange, checked, ops, topology, sizes, datasets, known, fields, needs, placement, process_group
    )


def refuse_device(plan: ReplayPlan) -> None:
    """Raise if the config is one of a DeviceReplay.

    Raises:
        ConfigError: Its table lies on devices.
    """
    if plan.config.on_device:
        plan.exchange.close()
        at = f"gear.tables.{plan.config.sampled_tables[0]}.placement"
        raise ConfigError(at, 'must be "host" for a Replay', "device", "use DeviceReplay, or an engine")

"""Sharing of a table in the memory of the replicas' devices: draws and priority updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepspeed_gear.device.device_batch import DeviceBatch
from deepspeed_gear.device.device_builder import arrivals_of, needs_of_rows
from deepspeed_gear.device.device_priority_log import DevicePriorityLog
from deepspeed_gear.device.device_row_exchange import DeviceRowExchange
from deepspeed_gear.device.device_table import TableMixture
from deepspeed_gear.device.joint_priorities import JointPriorities
from deepspeed_gear.device.joint_selection import JointSelection
from deepspeed_gear.device.replica_agreement import ReplicaAgreement, inside_replica
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.sampling.stream_spec import StreamSpec


@dataclass(frozen=True)
class TableSharing:
    """How the replicas of a run share a table.

    Args:
        is_spread: Each replica holds a part of the table, and all draw from all of it.
        is_joint: Priority updates of one replica apply on others too.
        has_own_batches: A rank resolves only samples of its own replica.
        data_rank: This rank's replica.
    """

    is_spread: bool
    is_joint: bool
    has_own_batches: bool
    data_rank: int

    @classmethod
    def of(cls, plan: ReplayPlan, name: str) -> TableSharing:
        """Return how the replicas of a run share a table."""
        options, config = plan.config.resolved_tables[name], plan.config
        is_together = plan.info.data_world > 1 and options.scope == "table"
        is_spread = is_together and options.data is None
        has_priorities = config.item_sampler.has_priorities
        is_joint = is_spread or (is_together and has_priorities)
        return cls(is_spread, is_joint, is_spread or options.scope == "shard", plan.topology.data_rank)


class Draws(Protocol):
    """Selects the next global batch."""

    def select_(self, records: Tensor, weights: Tensor) -> None:
        """Fill resolutions ([B, 8], int64) and importance weights ([B], float32, or empty)."""


class Reports(Protocol):
    """Collects priority updates, and applies them."""

    def take(self, batch: DeviceBatch, values: Tensor) -> None:
        """Add the priorities of a micro batch. [B], float32."""

    def apply(self) -> None:
        """Apply the pending updates."""

    def forget(self) -> None:
        """Drop the pending updates."""


def join(
    plan: ReplayPlan, sharing: TableSharing, mixture: TableMixture, spec: StreamSpec, is_shared: bool
) -> tuple[Draws, Reports]:
    """Return draws and priority updates of tables, with the collectives that sharing needs. Collective.

    Args:
        plan: Of the replay.
        sharing: How the tables are shared; of several tables, each replica has its own.
        mixture: The tables of this rank.
        spec: The training stream of the first one.
        is_shared: Whether any two ranks have the same GPU.
    """
    device, name, selection = mixture.device, plan.config.sampled_tables[0], mixture.tables[0].selection
    config, topology = plan.config, plan.topology
    if not sharing.is_joint:
        inner = None
        if mixture.is_prioritized:
            inner = inside_replica(topology, device, is_shared, config.timeout_s, plan.group)
        return mixture, DevicePriorityLog(mixture, plan.info.accumulation, inner)
    peers = ReplicaAgreement(topology, device, is_shared, config.timeout_s, plan.group)
    peers.open()
    reports = JointPriorities(selection, peers)
    if not sharing.is_spread:
        return mixture, reports
    needs, n_step = needs_of_rows(plan, name), config.n_step
    rows = DeviceRowExchange(selection.table, needs, arrivals_of(plan, name), n_step, peers)
    return JointSelection(selection, spec, rows, peers, plan.ops), reports

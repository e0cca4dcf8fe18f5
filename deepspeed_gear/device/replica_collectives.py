"""Collectives of the ranks of one replica, which hold the same table in the memory of their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_gear.distributed.control_plane import ControlPlane, lane
from deepspeed_gear.distributed.topology import Topology


def shares_gpus(exchange: ControlPlane, topology: Topology, device: torch.device) -> bool:
    """Return whether any two ranks have the same GPU. Collective."""
    own = None
    if device.type == "cuda":
        own = topology.node, str(torch.cuda.get_device_properties(device).uuid)
    known = exchange.gather(own)
    return own is not None and len(set(known)) < len(known)


class ReplicaCollectives:
    """Broadcasts from the reporting rank of a replica to its other ranks. Constructed on all of them.

    Between GPUs a broadcast is one of NCCL, queued on the current CUDA stream, in the same order on every
    rank; the host does not wait for it. Ranks that share a GPU, which NCCL refuses, use gloo and host memory.

    Args:
        ranks: Global ranks of the replica.
        source: The one that reports.
        is_shared: Whether any two ranks of the run have the same GPU.
        timeout_s: Longest wait for another rank, in seconds.
        purpose: Groups of different purposes never wait for each other.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        source: int,
        device: torch.device,
        is_shared: bool,
        timeout_s: float,
        purpose: str,
    ) -> None:
        self._source, self._is_staged = source, device.type == "cuda" and is_shared
        backend = "nccl" if device.type == "cuda" and not is_shared else "gloo"
        self._group = lane(tuple(sorted(ranks)), purpose, timeout_s, backend)
        #: Broadcasts values in place; can be captured in a CUDA graph over NCCL. Left out of traces: as a
        #: decorator that would import torch's compiler with the package.
        self.broadcast: Callable[[Tensor], None] = torch.compiler.disable(self._broadcast)  # type: ignore[no-untyped-call]

    def _broadcast(self, values: Tensor) -> None:
        there = values.cpu() if self._is_staged else values
        dist.broadcast(there, self._source, group=self._group)
        if there is not values:
            values.copy_(there)


def inside_replica(
    topology: Topology, device: torch.device, is_shared: bool, timeout_s: float, group: Any
) -> ReplicaCollectives | None:
    """Return the collectives of this replica's ranks; None where it is one rank. Collective over its ranks.

    Args:
        topology: Places and nodes of all ranks.
        group: Whose ranks the topology counts; None for all.
    """
    mine = [rank for rank, place in enumerate(topology.places) if place.data_rank == topology.data_rank]
    if len(mine) == 1:
        return None
    ranks = mine if group is None else [dist.get_global_rank(group, rank) for rank in mine]
    source = next(at for rank, at in zip(mine, ranks, strict=True) if topology.places[rank].reports)
    purpose = f"replica {topology.data_rank}"
    return ReplicaCollectives(ranks, source, device, is_shared, timeout_s, purpose)

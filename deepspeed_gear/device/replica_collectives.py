"""Collectives of the ranks of one replica, which hold the same table in the memory of their devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.device_collectives import DeviceCollectives
from deepspeed_gear.distributed.topology import Topology


def shares_gpus(exchange: ControlPlane, topology: Topology, device: torch.device) -> bool:
    """Return whether any two ranks have the same GPU. Collective."""
    own = None
    if device.type == "cuda":
        own = topology.node, str(torch.cuda.get_device_properties(device).uuid)
    known = exchange.gather(own)
    return own is not None and len(set(known)) < len(known)


def inside_replica(
    topology: Topology, device: torch.device, is_shared: bool, timeout_s: float, group: Any
) -> tuple[DeviceCollectives, int] | None:
    """Return the collectives of this replica's ranks, and its reporting rank. Collective over its ranks.

    Args:
        topology: Places and nodes of all ranks.
        is_shared: Whether any two ranks have the same GPU.
        timeout_s: Longest wait for another rank, in seconds.
        group: Whose ranks the topology counts; None for all.
    Returns:
        The collectives, and the index of the reporting rank in them; None where the replica is one rank.
    """
    mine = [rank for rank, place in enumerate(topology.places) if place.data_rank == topology.data_rank]
    if len(mine) == 1:
        return None
    ranks = mine if group is None else [dist.get_global_rank(group, rank) for rank in mine]
    transport = DeviceCollectives(ranks, device, is_shared, timeout_s, f"replica {topology.data_rank}")
    transport.open()
    return transport, next(i for i, rank in enumerate(mine) if topology.places[rank].reports)

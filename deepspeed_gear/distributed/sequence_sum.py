"""The sum of a tensor over the ranks that share a sequence, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import ControlPlane, lane
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError


def check_process_group(topology: Topology, group: Any) -> None:
    """Raise ConfigError on every rank for sequence ranks over several nodes in a part of the world.

    torch names a process group that its members alone make by how many groups a member is in. Leaders are in
    more than others: members of one sequence would wait for groups of different names.
    """
    if topology.place.sequence_world == 1 or topology.num_nodes == 1:
        return
    ranks, world = topology.world_size, dist.get_world_size()
    if group is not None and ranks < world:
        rule = "must hold all ranks of the world where sequence ranks train on several nodes"
        remedy = "launch the ranks of the replay as a world of their own"
        raise ConfigError("process_group", rule, f"{ranks} of {world} ranks", remedy)


def sequence_sum(
    topology: Topology, device: torch.device, timeout_s: float, group: Any, exchange: ControlPlane
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the sum over the ranks that share this rank's sequences; None: there are no others. Collective.
    `group` are the ranks that the topology counts; `exchange` names a lost one where the sum fails.
    """
    place = topology.place
    if place.sequence_world == 1:
        return None
    known = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, other in enumerate(topology.places):
        key = other.data_rank, other.tensor_rank, other.pipe_rank
        parts.setdefault(key, []).append(known[rank])
    backend, own = "nccl" if device.type == "cuda" else "gloo", known[topology.rank]
    groups = [tuple(part) for part in parts.values()]
    made = lane(next(part for part in groups if own in part), "sequence", timeout_s, backend, groups)

    def total(values: torch.Tensor) -> torch.Tensor:
        found = values.clone()
        if backend == "nccl":  # its work is waited for on the device
            dist.all_reduce(found, group=made)
        else:
            exchange.run(lambda: dist.all_reduce(found, group=made, async_op=True))
        return found

    class Sum(torch.autograd.Function):
        """The losses of all ranks depend on the sum: the gradient of a part is the sum of their gradients."""

        @staticmethod
        def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
            return total(values)

        @staticmethod
        def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return total(gradients[0])

    return Sum.apply

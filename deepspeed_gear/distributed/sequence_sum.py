"""Sequence sum: the sum of a tensor over the ranks that share a sequence, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import ControlPlane, purpose_group
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError


def check_process_group(topology: Topology, group: Any) -> None:
    """Raise ConfigError on every rank for sequence ranks over several nodes in a part of the world.

    torch names a process group that its members alone make by how many groups a member is in.
    Leaders are in more than others: members of one sequence would wait for groups of different
    names.
    """
    if topology.place.sequence_world == 1 or topology.num_nodes == 1:
        return
    ranks = topology.world_size
    world = dist.get_world_size()
    if group is not None and ranks < world:
        rule = "must hold all ranks of the world where sequence ranks train on several nodes"
        remedy = "launch the ranks of the replay as a world of their own"
        raise ConfigError("process_group", rule, f"{ranks} of {world} ranks", remedy)


@dataclass(frozen=True)
class SequenceSum:
    """The sum of tensors over the ranks that share this rank's sequences, with gradients."""

    group: Any  # of torch, with these ranks
    control_plane: ControlPlane  # names a lost rank where the sum fails
    waits_on_device: bool  # the work of NCCL is waited for on the device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks. Collective; and so is its backward pass."""
        total: torch.Tensor = _Sum.apply(values, self)  # type: ignore[no-untyped-call]
        return total

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum without gradients. Collective."""
        total = values.clone()
        if self.waits_on_device:
            dist.all_reduce(total, group=self.group)
        else:
            self.control_plane.run(lambda: dist.all_reduce(total, group=self.group, async_op=True))
        return total


class _Sum(torch.autograd.Function):
    """The losses of all ranks depend on the sum: the gradient of a part is the sum of their
    gradients.
    """

    @staticmethod
    def forward(context: Any, values: torch.Tensor, ranks: SequenceSum) -> torch.Tensor:
        context.ranks = ranks
        return ranks.total(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return context.ranks.total(gradients[0]), None


def sequence_sum(
    topology: Topology,
    device: torch.device,
    timeout_s: float,
    group: Any,
    control_plane: ControlPlane,
) -> SequenceSum | None:
    """Return the sum over the ranks that share this rank's sequences; None: there are no others.
    Collective. `group` are the ranks that the topology counts.
    """
    place = topology.place
    if place.sequence_world == 1:
        return None
    known = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, other in enumerate(topology.places):
        key = other.data_rank, other.tensor_rank, other.pipe_rank
        parts.setdefault(key, []).append(known[rank])
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = known[topology.rank]
    groups = [tuple(part) for part in parts.values()]
    own_group = next(part for part in groups if own in part)
    return SequenceSum(
        purpose_group(own_group, "sequence", timeout_s, backend, groups),
        control_plane,
        backend == "nccl",
    )

"""Topology: a rank's coordinates in the grid of parallelism, and the ranks of each node."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import ConfigError

AXES = ("pipe", "data", "sequence", "tensor")


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's coordinates in the grid of parallelism: ranks of one `data_rank` are a replica,
    `tensor_rank` is the index among slices of the same layers, `pipe_rank` the stage,
    `sequence_rank` the part of the time axis.
    """

    data_rank: int = 0
    data_world: int = 1
    tensor_rank: int = 0
    tensor_world: int = 1
    pipe_rank: int = 0
    pipe_world: int = 1
    sequence_rank: int = 0
    sequence_world: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pipe_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipe_rank == self.pipe_world - 1

    @cached_property
    def reads(self) -> bool:
        """Whether it reads batches: inner stages of a pipeline get data from the stage before."""
        return self.is_first_stage or self.is_last_stage

    @cached_property
    def reports(self) -> bool:
        """Whether it is the one rank of its replica that reports priorities: of the stage with the
        loss.
        """
        return self.tensor_rank == 0 and self.sequence_rank == 0 and self.is_last_stage

    @property
    def worlds(self) -> tuple[int, ...]:
        """Sizes of the grid's axes, in the order of AXES."""
        return tuple(getattr(self, f"{axis}_world") for axis in AXES)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Indices on the grid's axes, in the order of AXES."""
        return tuple(getattr(self, f"{axis}_rank") for axis in AXES)

    def __str__(self) -> str:
        axes = zip(AXES, self.coordinates, self.worlds, strict=True)
        return ", ".join(
            f"{axis} {rank} of {n}" for axis, rank, n in axes if n > 1 or axis == "data"
        )


@dataclass(frozen=True)
class Topology:
    rank: int
    places: tuple[RankCoordinates, ...]
    nodes: tuple[int, ...]  # number of the node of each rank, counted from 0 in the order of ranks
    names: tuple[str, ...] = field(default=(), compare=False)  # host of each node; empty: not known

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def place(self) -> RankCoordinates:
        return self.places[self.rank]

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node: its leader first, the first one that reads; the others
        ascending.
        """
        ranks = [rank for rank, its_node in enumerate(self.nodes) if its_node == node]
        leader = next((rank for rank in ranks if self.places[rank].reads), ranks[0])
        return [leader, *(rank for rank in ranks if rank != leader)]

    def describe(self, node: int) -> str:
        """Return the name of a node in errors: its host and its ranks."""
        host = f" ({self.names[node]})" if node < len(self.names) else ""
        return f"node {node}{host}, ranks {', '.join(map(str, sorted(self.ranks_of(node))))}"

    @property
    def holders(self) -> list[int]:
        """Nodes that hold a shard: those on which a rank reads."""
        return sorted(
            {node for node, place in zip(self.nodes, self.places, strict=True) if place.reads}
        )

    @property
    def peers(self) -> list[int]:
        """Ranks of this rank's node, its leader first."""
        return self.ranks_of(self.node)

    @property
    def peer(self) -> int:
        return self.peers.index(self.rank)

    @property
    def num_peers(self) -> int:
        return len(self.peers)

    @property
    def leads_node(self) -> bool:
        """Whether this rank makes the node's stores and, where several nodes make them, its
        selections.
        """
        return self.peer == 0

    @classmethod
    def discover(cls, control_plane: ControlPlane, place: RankCoordinates) -> Topology:
        """Return the topology of all ranks, after `check_grid` of their places. Collective."""
        answers = control_plane.all_gather((node_identity(), place, socket.gethostname()))
        places = tuple(place for _, place, _ in answers)
        check_grid(places)
        hosts = {node: host for node, _, host in answers}  # in the order of ranks
        numbers = {node: number for number, node in enumerate(hosts)}
        nodes = tuple(numbers[node] for node, _, _ in answers)
        return cls(control_plane.rank, places, nodes, tuple(hosts.values()))


def rank_grid(worlds: Mapping[str, int]) -> list[RankCoordinates]:
    """Return a grid in the order of ranks: pipeline axis slowest, tensor axis fastest; missing axes
    are 1.
    """
    sizes = {axis: worlds.get(axis, 1) for axis in AXES}
    named = {f"{axis}_world": size for axis, size in sizes.items()}
    ranks = itertools.product(*(range(size) for size in sizes.values()))
    names = [f"{axis}_rank" for axis in sizes]
    return [RankCoordinates(**named, **dict(zip(names, where, strict=True))) for where in ranks]


def check_grid(places: tuple[RankCoordinates, ...]) -> None:
    """Raise ConfigError, with all ranks' table, unless each place of a grid is taken once."""
    worlds = places[0].worlds
    is_whole = math.prod(worlds) == len(places) and all(place.worlds == worlds for place in places)
    if is_whole and set(itertools.product(*map(range, worlds))) == {
        place.coordinates for place in places
    }:
        return
    table = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
    rule = f"must give the {len(places)} ranks one place each in a grid"
    remedy = "check the topology, the mpu or the mesh that the engine was given"
    raise ConfigError("parallelism", rule, table, remedy)


def node_identity() -> tuple[str, int, int]:
    """Return an id that is equal for processes with the same /dev/shm: boot id, device and root
    inode.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat("/dev/shm")
    return boot, status.st_dev, status.st_ino

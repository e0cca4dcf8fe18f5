"""Where a rank sits: in the data-parallel world, and on which node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.parallel.exchange import Exchange


@dataclass(frozen=True)
class Topology:
    """A rank's place.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        data_rank: Index of its replica.
        data_world: Number of replicas.
        peer: Index among the ranks of its node.
        num_peers: Ranks of its node.
        num_nodes: Nodes.
    """

    rank: int
    world_size: int
    data_rank: int
    data_world: int
    peer: int
    num_peers: int
    num_nodes: int

    @property
    def leads_node(self) -> bool:
        return self.peer == 0

    @classmethod
    def discover(cls, exchange: Exchange, data_rank: int, data_world: int) -> Topology:
        """Find out which ranks share a node, and check that replicas are numbered without gaps. Collective.

        Raises:
            ConfigError: The ranks do not form a data-parallel world, or lie on several nodes.
        """
        places = exchange.gather((node_identity(), data_rank, data_world))
        nodes = [place[0] for place in places]
        if (
            sorted(place[1] for place in places) != list(range(data_world))
            or len({p[2] for p in places}) != 1
        ):
            table = ", ".join(f"rank {r}: {p[1]} of {p[2]}" for r, p in enumerate(places))
            raise ConfigError(
                "data parallelism",
                f"must give the {exchange.world_size} ranks one replica each",
                table,
                "tensor, pipeline and sequence parallelism are not supported by this version",
            )
        if len(set(nodes)) > 1:
            raise ConfigError("ranks", "must be on one node", f"{len(set(nodes))} nodes", "use one node")
        mine = [rank for rank, node in enumerate(nodes) if node == nodes[exchange.rank]]
        return cls(
            exchange.rank,
            exchange.world_size,
            data_rank,
            data_world,
            mine.index(exchange.rank),
            len(mine),
            len(set(nodes)),
        )


def node_identity() -> tuple[str, int, int]:
    """Return what equals exactly on processes that see the same /dev/shm: boot id, device and root inode."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat("/dev/shm")
    return boot, status.st_dev, status.st_ino

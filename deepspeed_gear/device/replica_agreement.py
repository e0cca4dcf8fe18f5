"""Messages and collectives between ranks that share a table in the memory of their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.distributed.device_collectives import DeviceCollectives
from deepspeed_gear.distributed.node_channel import GRACE_S, NodeChannel, message_of
from deepspeed_gear.distributed.topology import RankCoordinates, Topology


class _ByRank(Topology):
    """A topology in which each rank counts as a node."""

    def describe(self, node: int) -> str:
        host = f" ({self.names[node]})" if node < len(self.names) else ""
        return f"rank {node}{host}"


class ReplicaAgreement:
    """Collectives of the ranks that share a table in the memory of their devices.

    Messages that decide whether all ranks continue use gloo, whose errors name the lost rank; all others use
    the transport of the devices.

    Args:
        topology: Places and nodes of all ranks.
        device: Of this rank.
        is_shared: Whether any two ranks have the same GPU.
        timeout_s: Longest wait for another rank, in seconds.
        group: Whose ranks the topology counts; None for all.
    """

    def __init__(
        self, topology: Topology, device: torch.device, is_shared: bool, timeout_s: float, group: Any
    ) -> None:
        size = topology.world_size
        self.place, self.places = topology.place, topology.places
        names = tuple(topology.names[node] for node in topology.nodes) if topology.names else ()
        by_rank = _ByRank(topology.rank, topology.places, tuple(range(size)), names)
        self._channel = NodeChannel(by_rank, range(size), "devices", timeout_s, group)
        #: Order of the ranks here: twins (equal places in their replicas) are adjacent, by replica.
        self._order = sorted(range(size), key=lambda rank: _inside_first(self.places[rank]))
        ranks = [self._channel.ranks[rank] for rank in self._order]
        guard = self._channel.naming_lost_ranks
        self._transport = DeviceCollectives(ranks, device, is_shared, timeout_s + GRACE_S, "tables", guard)

    def open(self) -> None:
        """Make the groups. Collective."""
        self._channel.open()
        self._transport.open()

    def share_words(self, words: Sequence[int]) -> list[int]:
        """Send each replica a word. Collective.

        Args:
            words: For each replica.
        Returns:
            The word for this replica from the reporting rank of each replica.
        Raises:
            LostNodeError: A rank does not answer in time.
        """
        sent = [np.array([words[place.data_rank]], np.int64) for place in self.places]
        received = self._channel.begin([message_of(word) for word in sent])()
        found = {
            place.data_rank: int(word[0])
            for place, word in zip(self.places, received, strict=True)
            if place.reports
        }
        return [found[replica] for replica in range(self.place.data_world)]

    def swap(self, rows: Tensor, outgoing: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Send the twin in each replica its rows.

        Args:
            rows: By replica. [n, ...].
            outgoing: Rows for each replica.
            coming: Rows from each replica.
        Returns:
            By replica. [m, ...].
        Raises:
            LostNodeError: A rank does not answer in time. (NCCL ends the process instead, as its own
                watchdog does.)
        """
        return self._transport.swap(rows, self._for_twins(outgoing), self._for_twins(coming))

    def share_rows(self, rows: Tensor, outgoing: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Send each replica's rows to all of its ranks, from the reporting rank of this replica.

        Args:
            rows: By replica. [n, ...].
            outgoing: Rows for each replica; 0 on ranks that do not report.
            coming: Rows from the reporting rank of each replica.
        Returns:
            By replica. [m, ...].
        Raises:
            LostNodeError: As `swap`.
        """
        copies = len(self.places) // len(outgoing)
        reporters = [coming[place.data_rank] if place.reports else 0 for place in self._places_in_order]
        return self._transport.swap(rows.repeat(copies, 1), list(outgoing) * copies, reporters)

    def gather(self, words: Tensor) -> Tensor:
        """Return the words of the twin in each replica. [n] -> [R, n].

        Raises:
            LostNodeError: As `swap`.
        """
        every = self._transport.gather(words)
        ours = [i for i, place in enumerate(self._places_in_order) if _is_twin(place, self.place)]
        return every[ours[0] : ours[-1] + 1]

    def abandon(self, error: Exception) -> None:
        """Break the channel: an error keeps this rank from a collective in which the others wait."""
        self._channel.abandon(error)

    @property
    def _places_in_order(self) -> list[RankCoordinates]:
        return [self.places[rank] for rank in self._order]

    def _for_twins(self, counts: Sequence[int]) -> list[int]:
        """Return row counts by rank from those by replica: for this rank's twins, 0 for the others."""
        places = self._places_in_order
        return [counts[place.data_rank] if _is_twin(place, self.place) else 0 for place in places]


def by_replica(replicas: np.ndarray) -> np.ndarray:
    """Return indices in the order of their replicas, ascending in each. [n], int64.

    Cost: a radix sort, 3 ns an index; NumPy has one for 16 bits only.
    """
    order: np.ndarray = np.argsort(replicas.astype(np.uint16), kind="stable")
    return order


def _inside_first(place: RankCoordinates) -> tuple[int, ...]:
    return *replace(place, data_rank=0).coordinates, place.data_rank


def _is_twin(place: RankCoordinates, other: RankCoordinates) -> bool:
    return replace(place, data_rank=other.data_rank) == other

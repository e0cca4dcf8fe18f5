"""Rollout batches over the nodes that hold their tables: values of all trajectories, and rows of packs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_gear.batching.pack_gather import PackGatherer
from deepspeed_gear.distributed.row_exchange.trajectory_places import Moves, TrajectoryPlaces
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.node_exchange import SpreadTrajectories
from deepspeed_gear.replay.record_stream import Records
from deepspeed_gear.replay.rollout_data import NodePart, PackSequence, RolloutData, TablePart
from deepspeed_gear.replay.rollout_session import RolloutSession
from deepspeed_gear.store.table import Table


class RolloutNodes:
    """Exchanges of this rank's rollout batches between nodes; none where each node holds the tables."""

    def __init__(self, parts: ReplayParts) -> None:
        self._plan = parts.plan
        self._tables = [parts.exchange.trajectories.get(name) for name in parts.plan.config.sampled_tables]

    def part(self, table: Table, gatherer: PackGatherer, records: Records) -> TablePart:
        """Return the trajectories of a rollout batch that come from one table."""
        nodes = None
        if records.origins is not None:
            origins, shard = records.origins.numpy(), table.spec.shard
            assert shard is not None
            own = np.nonzero(origins >> SHARD_BITS == shard.index)[0]
            # One rank of a node contributes what the node holds.
            nodes = NodePart(origins, own if self._plan.topology.leads_node else own[:0], self._join)
        return TablePart(gatherer, table, records.resolutions, records.weights, nodes)

    def _join(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the bytes of arrays over all ranks, of which one has each byte. Collective."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return self._plan.exchange.sum(flat).numpy().view(values.dtype).reshape(values.shape)

    def batch(self, data: RolloutData, session: RolloutSession) -> BatchRows:
        """Return the rows of a rollout batch, whose packs are gathered after `fetch`."""
        return BatchRows(data, self._tables, session)


class BatchRows:
    """The rows of one rollout batch that this node has. Every rank keeps the same account.

    Args:
        tables: Of each sampled table how nodes exchange its trajectories; None: each holds them all.
    """

    def __init__(
        self, data: RolloutData, tables: Sequence[SpreadTrajectories | None], session: RolloutSession
    ) -> None:
        self._data, self._tables, self._session = data, tables, session
        self._places = {
            number: _places(part, spread)
            for number, (part, spread) in enumerate(zip(data.parts, tables, strict=True))
            if spread is not None
        }

    def fetch(self, packs: PackSequence) -> None:
        """Bring the rows of packs to the nodes whose ranks gather them. Collective over all ranks.

        Every rank has passed a batch barrier since it gathered from the rollout batch before.

        Raises:
            PeerError: A node does not answer, or an exchange failed.
        """
        found: dict[int, Moves] = {}
        for number, places in self._places.items():
            moves = places.move(self._needed(number, packs))
            if moves is not None:  # on all ranks alike
                found[number] = moves
        if not found:
            return

        def exchange() -> None:
            for number, moves in found.items():
                sender = self._spread(number).exchange
                if sender is not None:
                    sender.send(moves)

        self._session.agree(exchange)
        for number, moves in found.items():  # after an exchange that failed, the next one moves them all
            self._places[number].moved(moves)
            room, (row, slot) = self._spread(number).room, self._data.parts[number].table.first_arrival
            first_row, slots = row + room.first_row + moves.first_row, slot + room.first_slot + moves.slot
            self._data.place(number, moves.samples, first_row, slots)

    def _spread(self, number: int) -> SpreadTrajectories:
        spread = self._tables[number]
        assert spread is not None
        return spread

    def _needed(self, number: int, packs: PackSequence) -> np.ndarray:
        """Return the trajectories of a table that each node gathers for packs. [S, n], bool."""
        nodes, data = self._spread(number).plan.replica_nodes, self._data
        needed = np.zeros((len(nodes), len(data.parts[number].records)), bool)
        is_its = data.source[packs.index] == number
        which = data.of_table(number, packs.index)
        needed[:, which] = nodes[:, packs.replica[is_its]]
        return needed


def _places(part: TablePart, spread: SpreadTrajectories) -> TrajectoryPlaces:
    assert part.nodes is not None
    steps, plan = part.records[:, Resolution.NUM_STEPS].numpy(), spread.plan
    copies_own = not part.table.gathers_own_rows
    return TrajectoryPlaces(part.nodes.origins, steps, plan.final_row, plan.num_nodes, plan.index, copies_own)

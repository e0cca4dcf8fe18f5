"""Selection over tables in the memory of the replicas' devices: all replicas draw from one distribution.

Every replica computes all coordinates and resolves those that fall into its own part of the total mass. Then
each gets the resolutions of the samples that it trains on, and their rows (`device_row_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.batching.transfer.cuda_streams import copied_together
from deepspeed_gear.device.device_row_exchange import STEPS, DeviceRowExchange, ReceivedRows, SentRows
from deepspeed_gear.device.replica_agreement import ReplicaAgreement, by_replica
from deepspeed_gear.device.ring_selection import RingSelection
from deepspeed_gear.distributed.node_messages import MOST
from deepspeed_gear.errors import GearError, PeerError, StoreError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import FAN_OUT, SHARD_BITS
from deepspeed_gear.ops.records import Resolution, RingState, UpdateCount
from deepspeed_gear.sampling.samplers.uniform import stratify_
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.top_priorities import merge_top

_MOST_TOTAL_BITS = 62


class ReplicaRecord:
    """Record that a replica sends to the others before a selection; after BATCH its samples so far."""

    TOTAL: Final = 0
    ITEMS: Final = 1
    LEAST: Final = 2
    HIGHEST: Final = 3
    BATCH: Final = 4


class JointSelection:
    """Selects global batches from all replicas' tables. Collective: all ranks call it in the same order.

    Args:
        own: Masses and draws of this replica's table.
        spec: The stream.
        rows: Moves the rows.
        peers: The ranks.
        ops: Of the host.
    """

    def __init__(
        self,
        own: RingSelection,
        spec: StreamSpec,
        rows: DeviceRowExchange,
        peers: ReplicaAgreement,
        ops: Ops,
    ) -> None:
        self._own, self._table, self._rows, self._peers, self._ops = own, own.table, rows, peers, ops
        self._spec = spec
        # Left out of what torch.compile traces. As a decorator it would import the compiler with the package.
        self._untraced: Callable[[Tensor, Tensor], None] = torch.compiler.disable(self._select_or_abandon)  # type: ignore[no-untyped-call]
        self._replica, self._replicas = peers.place.data_rank, peers.place.data_world
        self._coordinates, self._mine, self._points = torch.empty(3, spec.batch, dtype=torch.int64).unbind()
        self._owner = torch.empty(spec.batch, dtype=torch.int64)
        #: Replica that holds each of this rank's samples of the latest batch. [micro * accumulation], int64.
        self.holders = np.empty(0, np.int64)
        #: Replica << 32 | slot of each. [micro * accumulation], int64.
        self.origins = torch.zeros(spec.batch // self._replicas, dtype=torch.int64, device=self._table.device)

    def select_(self, records: Tensor, weights: Tensor) -> None:
        """Draw the next global batch; write this replica's samples, and their rows to the arrivals.

        Args:
            records: Gets their resolutions, with the places of their rows here. [B / R, 8], int64.
            weights: Gets the importance weights; empty: there are none. [B / R], float32.
        Raises:
            StoreError: No replica has an item with a mass; on every rank.
            PeerError, LostNodeError: The replicas are at different batches, or one does not answer in time.
        """
        self._untraced(records, weights)

    def _select_or_abandon(self, records: Tensor, weights: Tensor) -> None:
        try:
            self._select(records, weights)
        except GearError:  # raised on every rank, or a rank is lost
            raise
        except Exception as error:
            self._peers.abandon(error)
            raise

    def _select(self, records: Tensor, weights: Tensor) -> None:
        parts = self._exchange_records()
        key, first = parts[0][ReplicaRecord.BATCH :]
        totals = torch.tensor([part[ReplicaRecord.TOTAL] for part in parts])
        total = int(totals.sum())
        self._check(total)
        if self._own.takes_highest:
            own, points = self._highest([part[ReplicaRecord.ITEMS] for part in parts])
        else:
            own = self._draw(totals, total, first)
            points = self._points[: len(own)]
        found = self._resolve(own, points, first)
        least = self._exchange_samples(own, found, records)
        if len(weights):
            self._weigh(records, weights, parts, least, key)
        state = self._table.state
        state[RingState.TOTAL] = total
        state[RingState.SAMPLES] += self._spec.batch
        state[RingState.BATCH] += 1
        highest = max(part[ReplicaRecord.HIGHEST] for part in parts)
        state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY] = state[RingState.INITIAL] = highest

    def _exchange_records(self) -> list[list[int]]:
        """Return the record of each replica: its masses and its position.

        Raises:
            PeerError: The replicas are at different batches.
        """
        table = self._table
        least = torch.full((), MOST, dtype=torch.int64, device=table.device)
        priorities = self._spec.priorities
        if priorities is not None and priorities.normalize == "table":  # elsewhere it is not used
            top = table.minima[-FAN_OUT:] if len(table.minima) else table.sums[: table.num_items]
            least = torch.where(top > 0, top, least).min()
        drawable, highest = (
            table.state[RingState.COUNTS + word]
            for word in (UpdateCount.DRAWABLE, UpdateCount.HIGHEST_PRIORITY)
        )
        masses = table.sums[-FAN_OUT:].sum(), drawable, least, highest
        record = torch.stack([*masses, table.state[RingState.BATCH], table.state[RingState.SAMPLES]])
        parts: list[list[int]] = self._peers.gather(record).tolist()  # waits for the device
        if any(part[ReplicaRecord.BATCH :] != parts[0][ReplicaRecord.BATCH :] for part in parts):
            at = {f"replica {replica}": part[ReplicaRecord.BATCH] for replica, part in enumerate(parts)}
            remedy = "load the same checkpoint on all ranks"
            raise PeerError("the replicas", "must be at the same global batch", at, remedy)
        return parts

    def _check(self, total: int) -> None:
        if total == 0:
            remedy = "add trajectories first, and report priorities above 0"
            rule = "must hold an item that can be drawn, over all replicas"
            raise StoreError("the tables on the devices", rule, "none", remedy)
        if not total < 1 << _MOST_TOTAL_BITS:
            rule = f"must be below 2^{_MOST_TOTAL_BITS}"
            raise StoreError("the total mass over all replicas", rule, total, "give smaller priorities")

    def _draw(self, totals: Tensor, total: int, first: int) -> np.ndarray:
        """Compute all coordinates and the holders of their items; return those of this replica. [n]."""
        spec, found = self._spec, torch.zeros(1, dtype=torch.int64)
        self._ops.draw_(self._coordinates, spec.seed, spec.key, first, total)
        if spec.is_stratified:
            stratify_(self._coordinates, total)
        outs = self._owner, self._mine, self._points, found
        self._ops.assign_draws_(*outs, self._coordinates, totals, self._replica)
        return self._mine[: int(found)].numpy()

    def _highest(self, items: list[int]) -> tuple[np.ndarray, Tensor]:
        """Select the items of highest priority of all replicas, equal ones in the order of the replicas.

        Args:
            items: Number of items of each replica.
        Returns:
            The samples of this replica, and the coordinates of their items. [n], and [n] on the device.
        Raises:
            StoreError: There are fewer items than samples; on every rank.
        """
        count, device = self._spec.batch, self._table.device
        if sum(items) < count:
            rule = f"must hold as many items as a global batch ({count}), each with a mass, over all replicas"
            raise StoreError("the tables on the devices", rule, sum(items), "add trajectories first")
        counts = [min(count, of) for of in items]
        values = torch.zeros(count, dtype=torch.float32, device=device)
        number = counts[self._replica]
        points = torch.zeros(0, dtype=torch.int64, device=device)
        if number:
            values[:number], points = self._own.highest(number)
        # The bits of a priority, which is at least 0, are in the order of its values.
        bits = self._peers.gather(values.view(torch.int32).long()).cpu().numpy()  # waits for the device
        each = [bits[replica, :of] for replica, of in enumerate(counts)]
        shards, _ = merge_top(each, [np.arange(of) for of in counts], count)
        self._owner.copy_(torch.from_numpy(shards))
        own = np.flatnonzero(shards == self._replica)
        return own, points[: len(own)]

    def _resolve(self, own: np.ndarray, coordinates: Tensor, first: int) -> Tensor:
        """Return the records of own samples, by receiver. [n, 9], int64.

        All samples of the batch are resolved, those of other replicas at coordinate 0, so that each has its
        own random words; the others are dropped.
        """
        device, count = self._table.device, self._spec.batch
        if len(own) == 0:
            return torch.zeros(0, STEPS + 1, dtype=torch.int64, device=device)
        every = torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64, device=device)
        words = [torch.from_numpy(own), torch.from_numpy(_by_receiver(own, self._replicas))]
        if coordinates.device != device:
            words.append(coordinates)
        samples, receivers, *copied = copied_together(words, device)
        points = torch.zeros(count, dtype=torch.int64, device=device)
        points[samples] = copied[0] if copied else coordinates
        self._own.resolve_(every, points, first)
        mine = every[receivers]
        return torch.cat([mine, self._rows.steps_of(mine)[:, None]], 1)

    def _exchange_samples(self, own: np.ndarray, found: Tensor, records: Tensor) -> int:
        """Exchange resolutions and rows; return the least mass that was drawn."""
        owner, replicas = self._owner.numpy(), self._replicas
        wanted = np.arange(self._replica, len(owner), replicas)
        self.holders = owner[wanted]
        places = by_replica(self.holders)  # among the wanted ones, by sender
        receivers = _by_receiver(own, replicas) % replicas
        out, coming = (np.bincount(of, minlength=replicas).tolist() for of in (receivers, self.holders))
        away, come = (np.nonzero(of != self._replica)[0] for of in (receivers, self.holders[places]))
        words = places, self.holders[places], away, receivers[away], come
        there, senders, going, takers, arriving = copied_together(
            [torch.from_numpy(np.ascontiguousarray(of)) for of in words], found.device
        )
        least = found[:, Resolution.MASS].min() if len(found) else found.new_full((), MOST)
        travelling = found.clone()
        travelling[:, Resolution.ID] = travelling[:, Resolution.ID] * replicas + self._replica
        got = self._peers.swap(travelling, out, coming)
        records[there] = got[:, : Resolution.NUM_WORDS]
        self.origins[there] = senders << SHARD_BITS | got[:, Resolution.SLOT]
        taken = ReceivedRows(got[arriving], senders[arriving], there[arriving])
        return self._rows.exchange(SentRows(found[going], takers), records, taken, least)

    def _weigh(self, records: Tensor, weights: Tensor, parts: list[list[int]], least: int, key: int) -> None:
        assert self._spec.priorities is not None
        if self._own.takes_highest:
            weights.fill_(1)
            return
        normalize = self._spec.priorities.normalize
        numerator, count = (
            sum(part[ReplicaRecord.TOTAL] for part in parts),
            sum(part[ReplicaRecord.ITEMS] for part in parts),
        )
        if normalize is not None:
            of_table = min(part[ReplicaRecord.LEAST] for part in parts)
            numerator, count = (least if normalize == "batch" else of_table), 1
        self._table.ops.importance_(weights, records, numerator, count, self._own.betas.at(key))


def _by_receiver(own: np.ndarray, replicas: int) -> np.ndarray:
    """Return samples by the replica that trains on them, ascending in each. [n], int64."""
    ordered: np.ndarray = own[by_replica(own % replicas)]
    return ordered

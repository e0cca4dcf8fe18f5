"""Forward passes over a table: micro batches of the trajectories that lack late columns, to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.replay import rollout_data as rollouts
from deepspeed_gear.replay.rollout_loader import RolloutLoader
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.late_columns import absent, fill_each


class StoredTrajectories(rollouts.RolloutData):
    """Trajectories that no selection pins: their rows are looked up under the lock for each pack."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        numbers = self.records[:, Resolution.SAMPLE_NUMBER].numpy()  # of a group they may not be neighbours
        found, self.item = np.unique(numbers, return_inverse=True)
        self.num_items = len(found)

    def pack(self, packs: rollouts.PackSequence, number: int, fill: Any = None) -> MicroBatch:
        part = self.parts[0]
        with part.table.lock:
            placed(part.table, part.rows.numpy()[packs.at[number]])  # a range, so they are not copied
            return super().pack(packs, number, fill)


def placed(table: Table, records: np.ndarray) -> None:
    """Set the rows of trajectories now in records, [n, 8], row 0 of evicted ones. Requires the lock."""
    slots = table.slots.take(records[:, Resolution.SLOT], axis=0)
    has_rows = slots[:, Slot.STATE] >= SlotState.COMMITTED
    has_rows &= slots[:, Slot.ID] == records[:, Resolution.ID]
    records[:, Resolution.FIRST_ROW] = np.where(has_rows, slots[:, Slot.FIRST_ROW], 0)


def fill_place(table: Table, of: RolloutLoader) -> RankCoordinates:
    """Return this rank's place among the replicas that fill what its store holds: those of its node.

    Raises:
        ConfigError: The table lies on several nodes, and so do the ranks of a replica.
    """
    topology, shard, nodes = of.topology, table.spec.shard, dict[int, int]()  # of each replica
    if shard is None or shard.count == 1:
        return of.settings.place
    for place, node in zip(topology.places, topology.nodes, strict=True):
        first = nodes.setdefault(place.data_rank, node)
        if first != node:
            rule = "must have the ranks of each replica on one node for forward()"
            remedy = "place tensor and sequence ranks on one node, or fill() it by trajectory"
            given = f"replica {place.data_rank} on the nodes {first} and {node}"
            raise ConfigError(f"table {table.spec.name}", rule, given, remedy)
    replicas = sorted(replica for replica, node in nodes.items() if node == topology.node)
    index = replicas.index(topology.place.data_rank)
    return replace(topology.place, data_rank=index, data_world=len(replicas))


def forward(
    table: Table, names: Sequence[str], tokens: int | None, of: RolloutLoader
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of trajectories that lack one of the columns; as `Replay.forward`."""
    to, topology = of.settings, of.topology
    scalars = [c for c in table.schema.late_columns if not (c.shape or c.is_opaque or c.rows == "T+1")]
    late, lineage = {column.name: column.rows for column in scalars}, table.lineage

    def listed() -> np.ndarray | None:
        for name in [name for name in names if name not in late]:
            rule, has = "must be late, with one number per step or trajectory", ", ".join(late) or "none"
            raise ConfigError(f"table {table.spec.name}: column {name!r}", rule, None, f"there are: {has}")
        fill_place(table, of)
        if not topology.leads_node:
            return None
        with table.lock:
            return absent(table, *names)

    # Its collectives are those of all ranks, whether they train together or not.
    session = replace(of.session, barrier=None, is_spread=True)
    lists = session.exchange.collect("a rollout batch", listed)  # of the leader of each node
    session.agree_on("forward: table, columns and tokens", (table.spec.name, names, tokens))
    every = np.concatenate([one for one in lists if one is not None])[:, Resolution.NUM_STEPS]
    records = torch.from_numpy(lists[topology.peers[0]])
    place = fill_place(table, of)
    # For a plan of 8 ranks and 4 replicas, 3 of them here, the plan is of 6.
    width = (to.pack.plan_width or to.place.data_world) // to.place.data_world * place.data_world
    pack = to.pack.model_copy(update={"plan_width": width, "tokens": tokens or to.pack.tokens})
    offsets = {field.column.name: int(field.offset) for field in to.fields if field.column is not None}
    early = [[f for f in all_of if not (f.column and f.column.late)] for all_of in (to.fields, to.opaque)]
    settings = replace(to, fields=tuple(early[0]), opaque=tuple(early[1]), place=place)

    @cache
    def planned() -> rollouts.PlannedPacks:
        rollouts.check_tokens(to.pack, every, tokens)
        lengths = records[:, Resolution.NUM_STEPS].numpy()
        return rollouts.PlannedPacks(lengths, pack, place.data_world, table.ops)

    longest = session.exchange.collect("a rollout batch", lambda: planned().rows.max(axis=1).tolist())

    def made() -> rollouts.PackSequence:
        planned().extend(longest, to.pack)
        own, size = records[planned().sort()], len(records)
        with table.lock:
            placed(table, own.numpy())
            weights, is_cut = torch.ones(size), torch.zeros(size, dtype=torch.bool)
            known = rollouts.Records(own, weights, own[:, Resolution.SLOT].clone(), is_cut)
            part = rollouts.TablePart(of.gatherer(settings.gathered(), table), table, known, session)
            found = StoredTrajectories([part], settings, table.ops, session)
            assert len(found.mask) == found.num_tokens  # it is read with the lock held
        return rollouts.PackSequence(found, np.arange(size), tokens, planned())

    packs = session.agree(made)

    def write(name: str, micro: MicroBatch, values: torch.Tensor) -> None:
        shape, by_step, offset = micro.pack_shape, late[name] == "T", offsets.get(name, int(to.predicts))
        given = micro.flat(name, values, None if by_step else micro.num_trajectories).detach()
        if by_step and to.reduce is not None:  # other ranks have other places
            whole = given.new_zeros(shape.rows)
            whole[shape.first : shape.end] = given
            given = to.reduce(whole)
        if to.place.reports:  # place i has the value of step i + offset
            given, offset = (given[: shape.num_tokens], offset) if by_step else (given, 0)
            own = given.cpu() if given.dtype == torch.bfloat16 else given.cpu().numpy()
            fill_each(table, table.schema[name], micro.reported.numpy(), own, lineage, offset)

    yield from packs.data.forward(packs, names, write)

"""Forward passes over a table: micro batches of the trajectories that lack late columns, to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import MicroBatch
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


def forward(
    table: Table, names: Sequence[str], tokens: int | None, of: RolloutLoader
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of trajectories that lack one of the columns; as `Replay.forward`."""
    to = of.settings
    scalars = [c for c in table.schema.late_columns if not (c.shape or c.is_opaque or c.rows == "T+1")]
    late, lineage = {column.name: column.rows for column in scalars}, table.lineage

    def listed() -> np.ndarray:
        at, shard = f"table {table.spec.name}", table.spec.shard
        if shard is not None and shard.count > 1:
            raise ConfigError(at, "must lie on one node for forward()", None, "fill() it by trajectory")
        for name in [name for name in names if name not in late]:
            rule, has = "must be late, with one number per step or trajectory", ", ".join(late) or "none"
            raise ConfigError(f"{at}: column {name!r}", rule, None, f"there are: {has}")
        with table.lock:
            return absent(table, *names)

    # Its collectives are those of all ranks, whether they train together or not.
    session = replace(of.session, barrier=None, is_spread=True)
    own = session.agree(listed)
    session.agree_on("forward: table, columns and tokens", (table.spec.name, names, tokens))
    records = torch.from_numpy(session.exchange.broadcast(own))
    offsets = {field.column.name: int(field.offset) for field in to.fields if field.column is not None}
    early = [[f for f in all_of if not (f.column and f.column.late)] for all_of in (to.fields, to.opaque)]
    settings = replace(to, fields=tuple(early[0]), opaque=tuple(early[1]))

    def made() -> rollouts.PackSequence:
        lengths, size = records[:, Resolution.NUM_STEPS].numpy(), len(records)
        rollouts.check_tokens(to.pack, lengths, tokens)
        pack = to.pack.model_copy(update={"tokens": tokens or to.pack.tokens})
        planned = rollouts.PlannedPacks(lengths, pack, to.place.data_world, table.ops)
        own = records[planned.sort()]
        with table.lock:
            placed(table, own.numpy())
            weights, is_cut = torch.ones(size), torch.zeros(size, dtype=torch.bool)
            known = rollouts.Records(own, weights, own[:, Resolution.SLOT].clone(), is_cut)
            part = rollouts.TablePart(of.gatherer(settings.gathered(), table), table, known, session)
            found = StoredTrajectories([part], settings, table.ops, session)
            assert len(found.mask) == found.num_tokens  # it is read with the lock held
        return rollouts.PackSequence(found, np.arange(size), tokens, planned)

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

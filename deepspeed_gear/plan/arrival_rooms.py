"""Rooms for arrivals: rows and slots of a store that receive the rows of other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_gear.config import GearConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.row_exchange.row_messages import most_rows
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.table_spec import TableSpec

EDGE = 2  # rows on both sides of the arrivals, which belong to no trajectory


@dataclass(frozen=True)
class ArrivalRoom:
    """Rows and slots of a store that receive other nodes' rows, for one selection of a stream."""

    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int


def with_arrivals(
    config: GearConfig, store: TableSpec, exchange_plan: ExchangePlan, streams: Sequence[StreamSpec]
) -> tuple[TableSpec, dict[str, ArrivalRoom]]:
    """Return a store with rows and slots for arrivals, and the room of each stream.

    Raises:
        ConfigError: Trajectories may have any length, and goals are drawn from all of their steps.
    """
    dataset = store.dataset
    table = config.resolved_tables[store.name]
    longest = table.max_length if dataset is None else dataset.longest
    if config.pack is not None:
        # All streams share the room: it is for one rollout batch, of whole trajectories.
        most_steps = config.pack.room
        slots = max(spec.most_resolutions for spec in streams)
        most = min(longest or most_steps, most_steps) + exchange_plan.final_row
        if dataset is not None:  # a mapped one copies its own rows, too
            slots = min(slots, dataset.num_trajectories_of_whole)
            rows = slots * most
        else:
            others = exchange_plan.num_nodes - 1
            slots = min(slots, others * store.num_slots)
            rows = min(slots * most, others * store.num_rows)
        rooms = {spec.name: ArrivalRoom(EDGE, rows, 0, slots) for spec in streams}
        return replace(store, arrival_rows=rows + 2 * EDGE, arrival_slots=slots), rooms
    if longest is None:
        if exchange_plan.draws_goals:
            rule = "must be given where goals are relabelled on several nodes"
            raise ConfigError(
                f"gear.tables.{store.name}.max_length",
                rule,
                None,
                "set it to the length of the longest trajectory",
            )
        longest = table.capacity_steps or 0
    most = most_rows(exchange_plan.needs, longest, 0 if config.n_step is None else config.n_step.n)
    # For depth 2 and 3 samples of at most 5 rows, a stream has 30 rows and 6 slots.
    rooms = {}
    row = most + EDGE
    slot = 0
    for spec in streams:
        wanted = exchange_plan.most_wanted(spec.batch)
        rooms[spec.name] = ArrivalRoom(row, wanted * most, slot, wanted)
        row += spec.depth * wanted * most
        slot += spec.depth * wanted
    return replace(store, arrival_rows=row + most + EDGE, arrival_slots=slot), rooms

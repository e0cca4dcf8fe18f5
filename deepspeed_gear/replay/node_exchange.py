"""This rank's exchanges with other nodes: channels, and the selectors of tables that several nodes hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.config.pack_options import room as pack_room
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.distributed.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.distributed.row_exchange.exchange_plan import ExchangePlan, routes_of
from deepspeed_gear.distributed.row_exchange.resolution_exchange import (
    Goals,
    RecordExchange,
    ResolutionExchange,
)
from deepspeed_gear.distributed.row_exchange.row_messages import RowExchange, RowMessages, most_rows
from deepspeed_gear.distributed.row_exchange.trajectory_places import TrajectoryExchange
from deepspeed_gear.distributed.sharded_selection import (
    ReplicatedSelector,
    SelectionAgreement,
    ShardedSelector,
)
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.stream_state import StreamState

EDGE = 2  # rows on both sides of the arrivals, which belong to no trajectory
States = Mapping[str, Mapping[str, StreamState]]  # by table and stream


@dataclass(frozen=True)
class ArrivalRoom:
    """Rows and slots of a store for the rows that a stream receives from other nodes, for one selection."""

    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True)
class SpreadTrajectories:
    """How packs get the trajectories of a table that several nodes hold.

    Args:
        plan: Which node has ranks of which replica.
        room: For trajectories of a rollout batch that other nodes hold.
        exchange: Sends their rows; None: another rank of this node does.
    """

    plan: ExchangePlan
    room: ArrivalRoom
    exchange: TrajectoryExchange | None


class SpreadTables:
    """Exchange plans of spread tables, and the rows and slots for arrivals on this node."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        order, fields = plan.placement.order, plan.fields
        found = {
            name: routes_of(plan.topology, order, plan.config, fields, plan.schemas[name])
            for name in plan.config.sampled_tables
            if name in plan.placement.spread
        }
        #: Exchange plan of each table of which this node holds a shard.
        self.exchange_plans: dict[str, ExchangePlan] = {n: one for n, one in found.items() if one.index >= 0}
        #: Of each stream of these tables, by table and name; filled in by `arrivals`.
        self.rooms: dict[str, dict[str, ArrivalRoom]] = {}

    def arrivals(
        self, specs: Mapping[str, list[StreamSpec]], held: Mapping[str, tuple[int, int]]
    ) -> dict[str, tuple[int, int]]:
        """Return the number of rows and slots for arrivals, by table.

        Args:
            specs: Of the streams, by table.
            held: Rows and slots of this node's stores without them, by table.
        Raises:
            ConfigError: Trajectories may have any length, and goals are drawn from all of their steps.
        """
        found = {}
        for name, exchange_plan in self.exchange_plans.items():
            rooms = self.rooms[name] = {}
            if self._plan.config.pack is not None:
                rows, slots = self._most_arrivals(name, max(spec.most_records for spec in specs[name]), held)
                rooms.update((spec.name, ArrivalRoom(EDGE, rows, 0, slots)) for spec in specs[name])
                found[name] = rows + 2 * EDGE, slots
                continue
            most = self._max_rows(name)
            # For depth 2 and 3 samples of at most 5 rows, a stream has 30 rows and 6 slots.
            row, slot = most + EDGE, 0
            for spec in specs[name]:
                wanted = exchange_plan.most_wanted(spec.batch)
                rooms[spec.name] = ArrivalRoom(row, wanted * most, slot, wanted)
                row, slot = row + spec.depth * wanted * most, slot + spec.depth * wanted
            found[name] = row + most + EDGE, slot
        return found

    def _most_arrivals(
        self, name: str, most_records: int, held: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the most rows and slots that arrive for a rollout batch of so many trajectories."""
        exchange_plan, pack = self.exchange_plans[name], self._plan.config.pack
        assert pack is not None
        most_steps = pack_room(pack)
        longest, slots = min(self._longest(name) or most_steps, most_steps), most_records
        if name in self._plan.datasets:  # a mapped one copies its own rows, too
            slots = min(slots, self._plan.datasets[name].num_trajectories_of_whole)
            return slots * (longest + exchange_plan.final_row), slots
        num_rows, num_slots = ((exchange_plan.num_nodes - 1) * count for count in held[name])
        slots = min(slots, num_slots)
        return min(slots * (longest + exchange_plan.final_row), num_rows), slots

    def _longest(self, name: str) -> int | None:
        """Return the steps of a table's longest trajectory; None: not known."""
        dataset = self._plan.datasets.get(name)
        return self._plan.config.resolved_tables[name].max_length if dataset is None else dataset.longest

    def _max_rows(self, name: str) -> int:
        """Return the most rows that a sample of a table may need."""
        config = self._plan.config
        exchange_plan, table = self.exchange_plans[name], config.resolved_tables[name]
        longest = self._longest(name)
        if longest is None:
            if any(need.goals for need in exchange_plan.needs):
                rule = "must be given where goals are relabelled on several nodes"
                raise ConfigError(f"gear.tables.{name}.max_length", rule, None)
            longest = table.capacity_steps or 0
        return most_rows(exchange_plan.needs, longest, 0 if config.n_step is None else config.n_step.n)


class NodeExchange:
    """The exchanges of this rank with other nodes; empty with one node, and on ranks that exchange nothing.

    Args:
        device: Of this rank; its transport exchanges rows if the config selects it.
    """

    def __init__(self, plan: ReplayPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._channels: dict[bool, NodeChannel] = {}  # key: whether for training streams
        self._transports: dict[bool, DeviceTransport] = {}
        self._training: list[SelectionAgreement] = []  # selectors of the training streams
        self._taken: tuple[np.ndarray, int, int, int] | None = None
        #: Of the tables of packed batches that several nodes hold, by name.
        self.trajectories: dict[str, SpreadTrajectories] = {}

    def selectors(
        self, states: States, tables: SpreadTables, goals: Goals, detector: FailureDetector | None
    ) -> dict[StreamState, SelectionAgreement]:
        """Open the channels and return the selectors of streams that nodes select together. Collective.

        Args:
            goals: Draws the achieved goals of samples.
            detector: The failure detector over all ranks.
        Returns:
            On the leaders of nodes that hold such tables; empty elsewhere.
        """
        every = [state for of_table in states.values() for state in of_table.values()]
        if self._plan.leads_shard and any(state.spec.together for state in every):
            self._open(True, "train", detector)
            self._open(False, "passes", detector)
        self._plan.exchange.barrier()
        if self._plan.config.pack is not None:
            for name, exchange_plan in tables.exchange_plans.items():
                for state in states[name].values():
                    room = tables.rooms[name][state.spec.name]
                    rows = self._rows(state, exchange_plan, room, True) if self._channels else None
                    exchange = None if rows is None else TrajectoryExchange(rows)
                    self.trajectories[name] = SpreadTrajectories(exchange_plan, room, exchange)
        if not self._channels:
            return {}
        found: dict[StreamState, SelectionAgreement] = {}
        for state in every:  # of replicated tables
            if state.spec.together and state.spec.num_shards == 1:
                found[state] = ReplicatedSelector(state, self._channels[True])
                self._training.append(found[state])
        for name, exchange_plan in tables.exchange_plans.items():
            for state in states[name].values():
                room = tables.rooms[name][state.spec.name]
                found[state] = self._sharded(state, exchange_plan, room, goals)
        return found

    def _rows(
        self, state: StreamState, exchange_plan: ExchangePlan, room: ArrivalRoom, trains: bool
    ) -> RowExchange:
        rows, slots = (room.first_row, room.num_rows), (room.first_slot, room.num_slots)
        needs, n_step = exchange_plan.needs, self._plan.config.n_step
        messages = RowMessages(state.table, exchange_plan.num_nodes, needs, n_step, rows, slots)
        return RowExchange(self._channels[trains], messages, self._transports.get(trains))

    def _sharded(
        self, state: StreamState, exchange_plan: ExchangePlan, room: ArrivalRoom, goals: Goals
    ) -> ShardedSelector:
        config, trains = self._plan.config, state.spec.name == TRAIN
        channel = self._channels[trains]
        exchange: RecordExchange | ResolutionExchange
        if config.pack is not None:
            exchange = RecordExchange(state, channel)
        else:
            rows = self._rows(state, exchange_plan, room, trains)
            exchange = ResolutionExchange(state, exchange_plan, rows, goals)
        selector = ShardedSelector(state, channel, exchange_plan, exchange, config.verify_every)
        if trains:
            self._training.append(selector)
        return selector

    def _open(self, trains: bool, purpose: str, detector: FailureDetector | None) -> None:
        plan, config = self._plan, self._plan.config
        order, timeout_s = plan.placement.order, config.timeout_s
        channel = NodeChannel(plan.topology, order, purpose, timeout_s, plan.group, detector)
        channel.open()
        self._channels[trains] = channel
        if config.exchange != "host":
            transport = self._transports[trains] = DeviceTransport(channel, self._device)
            transport.open()

    def take_metrics(self) -> dict[str, float]:
        """Return the mean of the training selections' exchanges since the last call; empty elsewhere.

        Returns:
            `sent_bytes`, `received_bytes`, and for each node `late_ms.<node>`: how long the first node to be
            ready waited for it.
        """
        if not self._training:
            return {}
        channel = self._channels[True]
        late = np.sum([selector.late_s for selector in self._training], axis=0)
        selections = sum(selector.num_selections for selector in self._training)
        now = late, selections, channel.bytes_sent, channel.bytes_received
        before = self._taken or (np.zeros_like(late), 0, 0, 0)
        self._taken = late.copy(), selections, channel.bytes_sent, channel.bytes_received
        waits, made, sent, received = (a - b for a, b in zip(now, before, strict=True))
        made = max(made, 1)
        found = {"sent_bytes": sent / made, "received_bytes": received / made}
        for node, wait in zip(channel.nodes, waits.tolist(), strict=True):
            found[f"late_ms.{node}"] = 1e3 * wait / made
        return found

    def part(self) -> None:
        """Stop reporting lost nodes: this rank's thread may wait for one that samples no further batch."""
        for channel in self._channels.values():
            channel.part()

    def leave(self) -> None:
        """Announce that this node selects no further batch; its thread has stopped."""
        if self._training and self._plan.config.prefetch > 0:
            self._training[0].leave()

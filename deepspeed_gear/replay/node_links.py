"""Links of a node to the others: channels, transports, and selectors of tables on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.plan.arrival_rooms import ArrivalRoom
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.row_exchange.resolution_exchange import (
    Goals,
    ResolutionExchange,
    ResolutionSender,
)
from deepspeed_gear.row_exchange.row_messages import RowExchange
from deepspeed_gear.row_exchange.trajectory_exchange import TrajectoryExchange
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.selection_rounds import SelectionRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_state import StreamState

PASSES = "passes"  # purpose of the channel for passes over splits


@dataclass(frozen=True)
class SpreadTrajectories:
    """How packs get the trajectories of a table that several nodes hold."""

    exchange_plan: ExchangePlan
    room: ArrivalRoom  # for trajectories of a rollout batch that other nodes hold
    exchange: TrajectoryExchange | None  # sends their rows; None: another rank of this node does


class Link(NamedTuple):
    """A channel to other nodes for one purpose, and the transport of rows between devices."""

    channel: NodeChannel
    transport: DeviceTransport | None  # None: rows are sent from host memory


class NodeLinks:
    """This rank's channels to other nodes, and the selectors of tables that several nodes hold.

    Empty with one node, and on ranks that do not communicate for their node.
    """

    def __init__(self, plan: Resolved, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        # For training and for passes: a pass over a split must not wait for a training selection.
        self._links: dict[str, Link] = {}
        self._training: list[Selector] = []  # selectors of the training streams
        self._taken: np.ndarray | float = 0.0  # sums at the last `take_metrics`
        self._means = dict[str, float]()  # that it has returned
        #: Of the tables of packed batches that several nodes hold, by name.
        self.trajectories: dict[str, SpreadTrajectories] = {}

    def selectors(
        self, states: Sequence[StreamState], goals: Goals, detector: FailureDetector | None
    ) -> dict[StreamState, Selector]:
        """Open the channels and return the selectors of streams that nodes select together.

        Collective. The selectors are on the leaders of nodes that hold such tables.

        Args:
            goals: Draws the achieved goals of samples.
        """
        plan = self._plan
        together = [state for state in states if state.spec.together]
        if plan.leads_shard and together:
            self._open_channels(detector)
        plan.control_plane.barrier()
        selectors: dict[StreamState, Selector] = {}
        # Streams of replicated tables come first, on every node.
        for state in sorted(states, key=lambda state: self._exchange_plan(state) is not None):
            exchange_plan = self._exchange_plan(state)
            if plan.config.pack is not None and exchange_plan is not None:
                self._keep_spread(state, exchange_plan)
            if not self._links or not state.spec.together:
                continue
            # Nodes select together from a replicated table for its priorities only: for training.
            trains = state.spec.name == TRAIN or exchange_plan is None
            link = self._links[TRAIN if trains else PASSES]
            draws: ResolutionSender | ResolutionExchange | None = None
            if exchange_plan is not None and plan.config.pack is not None:
                draws = ResolutionSender(state, link.channel)
            elif exchange_plan is not None:
                rows = self._rows(state, exchange_plan, link)
                draws = ResolutionExchange(
                    state, exchange_plan, rows, goals, plan.config.verify_every
                )
            selectors[state] = Selector(state, SelectionRounds(state, link.channel), draws)
            if trains:
                self._training.append(selectors[state])
        return selectors

    def _open_channels(self, detector: FailureDetector | None) -> None:
        plan = self._plan
        order = plan.placement.order
        over_host = plan.config.exchange == "host"
        for purpose in (TRAIN, PASSES):
            channel = NodeChannel(
                plan.topology, order, purpose, plan.config.timeout_s, plan.group, detector
            )
            transport = None if over_host else DeviceTransport(channel, self._device)
            self._links[purpose] = Link(channel, transport)

    def _exchange_plan(self, state: StreamState) -> ExchangePlan | None:
        return self._plan.tables[state.table.spec.name].exchange_plan

    def _keep_spread(self, state: StreamState, exchange_plan: ExchangePlan) -> None:
        """Keep how packs get the trajectories of a stream's table from other nodes."""
        exchange = None
        if self._links:
            exchange = TrajectoryExchange(self._rows(state, exchange_plan, self._links[TRAIN]))
        spread = SpreadTrajectories(exchange_plan, self._room(state), exchange)
        self.trajectories[state.table.spec.name] = spread

    def _room(self, state: StreamState) -> ArrivalRoom:
        return self._plan.tables[state.table.spec.name].rooms[state.spec.name]

    def _rows(self, state: StreamState, exchange_plan: ExchangePlan, link: Link) -> RowExchange:
        room = self._room(state)
        n_step = self._plan.config.n_step
        rows = (room.first_row, room.num_rows)
        slots = (room.first_slot, room.num_slots)
        return RowExchange(
            link.channel, state.table, exchange_plan.needs, n_step, rows, slots, link.transport
        )

    def take_metrics(self) -> dict[str, float]:
        """Return means of the training selections since the last call, or of the period before.

        `late_ms.<node>` is the time that the first node to be ready waited for it. Empty on other
        ranks than those that communicate for their node.
        """
        if not self._training:
            return {}
        channel = self._links[TRAIN].channel
        late = np.sum([selector.rounds.late_s for selector in self._training], axis=0)
        selections = sum(selector.rounds.num_selections for selector in self._training)
        now = np.array([*late, selections, channel.bytes_sent, channel.bytes_received], np.float64)
        *waits, made, sent, received = (now - self._taken).tolist()
        if made or not self._means:
            self._taken = now
            count = max(made, 1)
            self._means = {"sent_bytes": sent / count, "received_bytes": received / count}
            for node, wait in zip(channel.nodes, waits, strict=True):
                self._means[f"late_ms.{node}"] = 1e3 * wait / count
        return self._means

    def part(self) -> None:
        """Stop reporting lost nodes: this rank may wait for one that samples no further batch."""
        for link in self._links.values():
            link.channel.part()

    def leave(self) -> None:
        """Announce that this node selects no further batch until one is requested.

        Its prefetch thread has stopped.
        """
        if self._training and self._plan.config.prefetch > 0:
            self._training[0].rounds.leave()

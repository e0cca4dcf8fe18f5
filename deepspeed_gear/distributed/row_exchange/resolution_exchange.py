"""Exchange of a selection's resolutions and rows: each node gets those that its ranks read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NO_WORDS, NodeChannel
from deepspeed_gear.distributed.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.distributed.row_exchange.row_messages import RowExchange
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.sampling.stream_state import StreamState

MOST_MASS = (1 << 62) - 1  # no mass is greater
NO_ROW = -1  # first row of a trajectory that another node holds: gathering it is an error
Goals = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass
class NodeSelection:
    number: int
    entry: int  # of the ring
    count: int  # samples
    offset: int  # of its first sample among those of all tables
    needs_all: bool  # whether every node gets the resolutions of all samples, as for a digest
    asked: (
        np.ndarray
    )  # samples whose resolutions this node gets: that its ranks need, or all; ascending
    owner: np.ndarray  # node that holds each of these
    is_saved: bool = False  # whether it is one of a checkpoint
    first: int = 0  # sample number of the first one
    own: list[np.ndarray] = field(
        default_factory=list
    )  # samples that this node holds, by draw; ascending
    resolutions: list[torch.Tensor] = field(
        default_factory=list
    )  # their resolutions. [n, 8] each, int64

    def draw(
        self, first: int, own: np.ndarray, resolutions: torch.Tensor, owner: np.ndarray, done: int
    ) -> None:
        """Add draws after the `done` in the selection, from sample number `first`: this node's
        `own`, with their resolutions; `owner` is the node of each of all draws. [count], int64.
        """
        self.first = first - done
        self.own.append(own + done if done else own)
        self.resolutions.append(resolutions)
        begin, end = np.searchsorted(self.asked, [done, done + len(owner)])
        self.owner[begin:end] = owner[self.asked[begin:end] - done]

    def drawn(self) -> tuple[np.ndarray, torch.Tensor]:
        if len(self.own) == 1:
            return self.own[0], self.resolutions[0]
        own = np.concatenate([np.empty(0, np.int64), *self.own])
        return own, torch.cat(
            [torch.empty(0, Resolution.NUM_WORDS, dtype=torch.int64), *self.resolutions]
        )


class ResolutionExchange:
    """Sends resolutions and rows to other nodes; fills this node's ring and arrivals. In one
    thread.
    """

    def __init__(
        self, state: StreamState, plan: ExchangePlan, rows: RowExchange, goals: Goals
    ) -> None:
        self._state = state
        self._rows = rows
        self._goals = goals
        self._index = plan.index
        self._num_nodes = plan.num_nodes
        self._ops = state.ops
        self._draws_goals = plan.draws_goals
        self._needs = torch.from_numpy(plan.readers), torch.from_numpy(plan.need_of)
        everyone = torch.arange(self._num_nodes)  # as if one replica were read by all
        self._everyone = everyone[None], torch.zeros(self._num_nodes, 1, dtype=torch.int16)
        self._words = 5 if rows.has_steps else 4  # of a packed resolution
        # Written word by word: after a batch that has emptied the caches, a NumPy call takes 10 us
        # and more.
        ends = np.zeros(self._num_nodes, np.int64)
        found = np.zeros(1, np.int64)
        self._ends = torch.from_numpy(ends)
        self._end_words = ends.data
        self._found = torch.from_numpy(found)
        self._found_words = found.data
        self._samples = torch.empty(0, RowSample.NUM_WORDS, dtype=torch.int64)
        self._which = torch.empty(0, dtype=torch.int64)
        self.least_drawn = 0  # of the latest selection: the smallest mass that any node has drawn

    def fill(self, selection: NodeSelection) -> tuple[int, np.ndarray]:
        """Exchange a selection: resolutions to the ring, rows to the arrivals. Returns the number
        of resolutions, and this node's, [n, 8], int64.
        """
        own, resolutions = selection.drawn()
        ring = self._state.ring[selection.entry][: selection.count]
        assert self._state.origins is not None
        with self._rows.channel.abandoned_on_error():
            sample = torch.from_numpy(own)
            steps = self._rows.steps_of(resolutions)
            goals = (
                self._goals(self._state.spec.random_key, resolutions) if self._draws_goals else None
            )
            samples, parts = self._encode(
                (resolutions, sample, steps, goals), self._needs, selection.offset
            )
            if selection.needs_all:
                parts = self._encode((resolutions, sample, steps, None), self._everyone, 0)[1]
            parts[self._index] = NO_WORDS
            masses = resolutions.numpy()[:, Resolution.MASS]
            least = int(np.minimum.reduce(masses)) if len(masses) else MOST_MASS
            received = self._rows.send(np.array([least]), parts, samples)

            self.least_drawn = min(int(words[0]) for words in received)
            most = len(resolutions) + len(selection.asked)
            if most > len(self._which):
                self._samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
                self._which = torch.empty(most, dtype=torch.int64)
            outs = (
                ring,
                self._state.origins[selection.entry],
                self._samples,
                self._which,
                self._found,
            )
            words = [torch.from_numpy(part[1:]) for part in received]
            asked = (
                torch.from_numpy(selection.owner),
                torch.from_numpy(selection.asked),
                self._needs[1],
            )
            route = selection.first, selection.offset, self._index, int(self._rows.takes_own)
            self._ops.decode_draws_(*outs, words, resolutions, sample, steps, *asked, *route)
            found = self._found_words[0]
            samples = self._samples[:found]
            which = self._which[:found]
            goals = (
                self._goals(self._state.spec.random_key, ring[which]) if self._draws_goals else None
            )
            if goals is not None:
                samples[:, RowSample.GOAL] = goals
            counts: list[int] = np.bincount(selection.owner, minlength=self._num_nodes).tolist()
            counts[self._index] = 0
            sizes = [1 + count * self._words for count in counts]
            self._rows.fill(selection.entry, ring, which, samples, received, sizes)
        return selection.count, resolutions.numpy()

    def _encode(
        self,
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        needs: tuple[torch.Tensor, torch.Tensor],
        offset: int,
    ) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Return the samples that other nodes need, and the words of their resolutions for each
        node. `drawn`: this node's resolutions, ascending, the selection index, n-step length and
        goal of each (or None).
        """
        most = len(drawn[0]) * needs[0].shape[1]
        samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
        packed = np.empty((most, self._words), np.int64)
        route = *needs, offset, self._index, int(self._rows.takes_own)
        self._ops.encode_draws_(samples, torch.from_numpy(packed), self._ends, *drawn, *route)
        bounds = [0, *[end * self._words for end in self._end_words]]
        words = packed.reshape(-1)
        parts = [words[begin:end] for begin, end in itertools.pairwise(bounds)]
        return samples[: self._end_words[-1]], parts


class ResolutionSender:
    """Sends resolutions of this node's trajectories to all nodes, without rows; fills its ring."""

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        self._state = state
        self._channel = channel
        self.least_drawn = MOST_MASS  # of the latest selection: the smallest mass

    def fill(self, selection: NodeSelection) -> tuple[int, np.ndarray]:
        """Exchange all resolutions to the ring; the selection has leaders, or of a checkpoint all
        members. Returns their number, and those of this node, [m, 8], int64.
        """
        state = self._state
        entry = selection.entry
        own, drawn = selection.drawn()
        words = drawn.numpy()
        expands = state.spec.by_group and not selection.is_saved
        with self._channel.abandoned_on_error():
            if expands:
                with state.table.lock:
                    words, item = state.members(words)
                own = own[item]  # places in the selection; the members of a group share one
            every, shard = self._channel.all_gather_ragged(
                np.concatenate([own[:, None], words], axis=1)
            )
        order = np.argsort(every[:, 0], kind="stable")
        places, resolutions, shard = every[order, 0], every[order, 1:], shard[order]
        masses = resolutions[:, Resolution.MASS]
        self.least_drawn = int(masses.min(initial=MOST_MASS))
        assert state.origins is not None
        state.origins.numpy()[entry, : len(resolutions)] = (
            shard << SHARD_BITS | resolutions[:, Resolution.SLOT]
        )
        elsewhere = shard != self._channel.index
        resolutions[elsewhere, Resolution.SLOT] = len(state.table.slots)
        resolutions[elsewhere, Resolution.FIRST_ROW] = NO_ROW
        state.ring_words[entry, : len(resolutions)] = resolutions
        if expands:
            epochs = state.drawn[entry][1]
            state.entries[entry][1][: len(places)] = epochs[torch.from_numpy(places)]
        return len(resolutions), words

"""Resolution exchange: sends a selection's resolutions and rows to the nodes that read them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NO_WORDS, NodeChannel
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.row_exchange.row_messages import RowExchange
from deepspeed_gear.sampling.selection import NodeDraws
from deepspeed_gear.sampling.stream_state import StreamState

MOST_MASS = (1 << 62) - 1  # no mass is greater
NO_ROW = -1  # first row of a trajectory that another node holds: gathering it is an error
Goals = Callable[[int, torch.Tensor], torch.Tensor | None]


class ResolutionExchange:
    """Sends resolutions and rows to other nodes; fills this node's ring and arrivals. In one
    thread.
    """

    def __init__(
        self,
        state: StreamState,
        plan: ExchangePlan,
        rows: RowExchange,
        goals: Goals,
        verify_every: int,
    ) -> None:
        self._state = state
        self._plan = plan
        self._wanted: dict[tuple[int, int], np.ndarray] = {}  # of the latest selection
        self._rows = rows
        # A pass is not verified.
        self._verify_every = 0 if state.spec.sampler.is_pass else verify_every
        self._goals = goals
        self._needs = torch.from_numpy(plan.readers), torch.from_numpy(plan.need_of)
        everyone = torch.arange(self._plan.num_nodes)  # as if one replica were read by all
        self._everyone = everyone[None], torch.zeros(self._plan.num_nodes, 1, dtype=torch.int16)
        self._words = 5 if rows.has_steps else 4  # of a packed resolution
        # Written word by word: after a batch that has emptied the caches, a NumPy call takes 10 us
        # and more.
        ends = np.zeros(self._plan.num_nodes, np.int64)
        num_needed = np.zeros(1, np.int64)
        self._ends = torch.from_numpy(ends)
        self._end_words = ends.data
        self._num_needed = torch.from_numpy(num_needed)
        self._num_needed_words = num_needed.data
        self._samples = torch.empty(0, RowSample.NUM_WORDS, dtype=torch.int64)
        self._which = torch.empty(0, dtype=torch.int64)
        self.least_drawn = 0  # of the latest selection: the smallest mass that any node has drawn

    def fill(self, draws: NodeDraws) -> tuple[int, np.ndarray]:
        """Exchange a selection: resolutions to the ring, rows to the arrivals. Returns the number
        of resolutions, and this node's, [n, 8], int64.
        """
        spec = self._state.spec
        owner, own, resolutions = draws.joined()
        # Index of the first sample among those of all tables.
        offset = 0 if spec.offset is None else spec.offset(draws.number)
        verifies = self._verify_every > 0 and draws.number % self._verify_every == 0
        # Samples whose resolutions this node gets, ascending: those that its ranks need, or for a
        # digest all.
        asked = np.arange(draws.count) if verifies else self._wanted_of(draws.count, offset)
        owner = owner[asked]
        ring = self._state.ring[draws.entry][: draws.count]
        assert self._state.origins is not None
        with self._rows.channel.abandoned_on_error():
            sample = torch.from_numpy(own)
            steps = self._rows.steps_of(resolutions)
            goals = self._goals(spec.random_key, resolutions) if self._plan.draws_goals else None
            samples, parts = self._encode((resolutions, sample, steps, goals), self._needs, offset)
            if verifies:
                parts = self._encode((resolutions, sample, steps, None), self._everyone, 0)[1]
            parts[self._plan.index] = NO_WORDS
            masses = resolutions.numpy()[:, Resolution.MASS]
            least = int(np.minimum.reduce(masses)) if len(masses) else MOST_MASS
            received = self._rows.send(np.array([least]), parts, samples)

            self.least_drawn = min(int(words[0]) for words in received)
            most = len(resolutions) + len(asked)
            if most > len(self._which):
                self._samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
                self._which = torch.empty(most, dtype=torch.int64)
            outs = (
                ring,
                self._state.origins[draws.entry],
                self._samples,
                self._which,
                self._num_needed,
            )
            words = [torch.from_numpy(part[1:]) for part in received]
            needed = torch.from_numpy(owner), torch.from_numpy(asked), self._needs[1]
            route = draws.first, offset, self._plan.index, int(self._rows.takes_own)
            self._state.ops.decode_draws_(*outs, words, resolutions, sample, steps, *needed, *route)
            num_needed = self._num_needed_words[0]
            samples = self._samples[:num_needed]
            which = self._which[:num_needed]
            goals = self._goals(spec.random_key, ring[which]) if self._plan.draws_goals else None
            if goals is not None:
                samples[:, RowSample.GOAL] = goals
            counts: list[int] = np.bincount(owner, minlength=self._plan.num_nodes).tolist()
            counts[self._plan.index] = 0
            sizes = [1 + count * self._words for count in counts]
            self._rows.fill(draws.entry, ring, which, samples, received, sizes)
        return draws.count, resolutions.numpy()

    def _wanted_of(self, count: int, offset: int) -> np.ndarray:
        """Return the samples of a selection that this node's ranks need; mostly those of the one
        before.
        """
        case = count, offset % self._plan.data_world
        if case not in self._wanted:
            self._wanted = {case: self._plan.wanted(*case)}
        return self._wanted[case]

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
        route = *needs, offset, self._plan.index, int(self._rows.takes_own)
        self._state.ops.encode_draws_(samples, torch.from_numpy(packed), self._ends, *drawn, *route)
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

    def fill(self, draws: NodeDraws) -> tuple[int, np.ndarray]:
        """Exchange all resolutions to the ring; the draws are leaders, or of a checkpoint all
        members. Returns their number, and those of this node, [m, 8], int64.
        """
        state = self._state
        entry = draws.entry
        _, own, drawn = draws.joined()
        words = drawn.numpy()
        expands = state.spec.by_group and not draws.is_saved
        with self._channel.abandoned_on_error():
            if expands:
                with state.table.lock:
                    words, item = state.members(words)
                own = own[item]  # places in the selection; the members of a group share one
            every, shard = self._channel.all_gather_ragged(
                np.concatenate([own[:, None], words], axis=1)
            )
        order = np.argsort(every[:, 0], kind="stable")
        places = every[order, 0]
        resolutions = every[order, 1:]
        shard = shard[order]
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

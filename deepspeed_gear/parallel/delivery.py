"""What a node sends of a cut and what it gets: resolutions, and the rows that its ranks read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.ops.constants import (
    R_ANCHOR,
    R_FIRST_ROW,
    R_ID,
    R_MASS,
    R_NUM_STEPS,
    R_NUMBER,
    R_SLOT,
    S_ANCHOR,
    S_GOAL,
    S_N_STEPS,
    S_NEED,
    S_PEER,
    S_SLOT,
    SAMPLE_WORDS,
)
from deepspeed_gear.parallel import wire
from deepspeed_gear.parallel.carrier import WORD_BYTES, Carrier
from deepspeed_gear.parallel.link import Link
from deepspeed_gear.parallel.routes import Routes
from deepspeed_gear.selection.stream import Stream

HEAD_WORDS = 2  # of a message: its size, the smallest mass that its node has drawn
Goals = Callable[[Stream, torch.Tensor], torch.Tensor | None]


@dataclass
class NodeCut:
    """The cut that is being made.

    Args:
        key, entry, count: Its number, its place in the ring, its samples.
        offset: Of its first sample among those of all tables.
        wanted: Samples that this node's ranks need, ascending.
        needs_all: Whether every node gets the resolutions of all samples, as for a digest.
        asked: Samples whose resolutions this node gets: `wanted`, or all.
        owner: Node that holds each of these.
        first: Sample number of the first one.
        own: Samples that this node holds, as they were resolved.
        records: Their resolutions.
    """

    key: int
    entry: int
    count: int
    offset: int
    wanted: np.ndarray
    needs_all: bool
    asked: np.ndarray
    owner: np.ndarray
    first: int = 0
    own: list[np.ndarray] = field(default_factory=list)
    records: list[torch.Tensor] = field(default_factory=list)


class Found(NamedTuple):
    """Samples of a cut with what they resolved to.

    Args:
        sample: Index in the cut. [n], int64.
        holder: Node that holds their rows. [n], int64.
        records: Resolutions, with the slots of the holder. [n, 8], int64.
        steps: Steps of their n-step returns, where windows follow them. [n], int64.
    """

    sample: np.ndarray
    holder: np.ndarray
    records: np.ndarray
    steps: np.ndarray | None

    def part(self, which: np.ndarray | slice) -> Found:
        """Return some of them."""
        steps = None if self.steps is None else self.steps[which]
        return Found(self.sample[which], self.holder[which], self.records[which], steps)


class Delivery:
    """Sends what other nodes lack of a cut, and fills this node's ring and arrivals. One thread at a time.

    Args:
        stream: Of this node's part of the table.
        link: To the other nodes.
        routes: Who needs what.
        carrier: Moves rows.
        goals: Draws the achieved goals of samples.
    """

    def __init__(self, stream: Stream, link: Link, routes: Routes, carrier: Carrier, goals: Goals) -> None:
        self._stream, self._link, self._routes, self._carrier = stream, link, routes, carrier
        self._goals, self._index, self._num_nodes = goals, routes.index, routes.num_nodes
        self.least_drawn = 0  # of the latest cut: the smallest mass that any node has drawn

    def fill(self, cut: NodeCut, own: np.ndarray, records: torch.Tensor) -> None:
        """Put what this node needs of a cut into the ring, and its rows into the arrivals.

        Args:
            cut: The cut.
            own: Samples that this node holds, ascending. [n], int64.
            records: Their resolutions. [n, 8], int64.
        """
        mine = Found(own, np.full_like(own, self._index), records.numpy(), self._carrier.steps_of(records))
        try:
            wait = self._link.begin(self._pack(cut, mine))
            ring = self._begin_ring(cut, mine)  # while the others' messages come
            self._receive(cut, mine, ring, wait())
        except Exception as error:
            self._link.abandon(error)
            raise

    def _pack(self, cut: NodeCut, mine: Found) -> list[np.ndarray]:
        """Return what each node needs of this node: its smallest mass, resolutions, rows."""
        packed = wire.pack_resolutions(mine.records, mine.steps)
        node, which = self._routes.destinations(mine.sample, cut.offset)
        outgoing = self._samples(cut, mine.part(which), node, node)
        if self._carrier.takes_own:
            outgoing = np.concatenate([outgoing, self._samples_here(cut, mine)])
        parts = np.split(packed[which], np.searchsorted(node, np.arange(1, self._num_nodes)))
        if cut.needs_all:
            parts = [packed] * self._num_nodes
            parts[self._index] = packed[:0]
        heads = np.array([WORD_BYTES * (HEAD_WORDS + part.size) for part in parts])
        messages = self._carrier.pack(outgoing, heads)
        self.least_drawn = int(mine.records[:, R_MASS].min(initial=wire.MOST))
        for message, part in zip(messages, parts, strict=True):
            message[1] = self.least_drawn
            message[HEAD_WORDS : HEAD_WORDS + part.size] = part.reshape(-1)
        return messages

    def _begin_ring(self, cut: NodeCut, mine: Found) -> np.ndarray:
        """Put this node's own resolutions into the ring."""
        ring = self._stream.ring[cut.entry].numpy()
        ring[: cut.count] = 0
        ring[: cut.count, R_ID] = wire.UNKNOWN
        self._put(cut, mine, ring)
        return ring

    def _put(self, cut: NodeCut, found: Found, ring: np.ndarray) -> None:
        assert self._stream.origins is not None
        ring[found.sample] = found.records
        origins = self._stream.origins[cut.entry].numpy()
        origins[found.sample] = found.holder << wire.SHARD_BITS | found.records[:, R_SLOT]

    def _receive(self, cut: NodeCut, mine: Found, ring: np.ndarray, heard: list[np.ndarray]) -> None:
        """Put what the others say into the ring, and their rows where they belong."""
        self.least_drawn = min(self.least_drawn, *(int(words[0]) for words in heard))
        theirs, heads = self._resolutions_in(cut, heard)
        self._put(cut, theirs, ring)
        got = theirs.part(np.nonzero(np.isin(theirs.sample, cut.wanted))[0]) if cut.needs_all else theirs
        incoming = self._samples(cut, got, got.holder, np.full_like(got.holder, self._index))
        sample = got.sample
        if self._carrier.takes_own:
            here = mine.part(np.isin(mine.sample, cut.wanted))
            incoming = np.concatenate([incoming, self._samples_here(cut, mine)])
            sample = np.concatenate([sample, here.sample])
        ring[sample[:, None], (R_FIRST_ROW, R_SLOT)] = self._carrier.unpack(cut.entry, incoming, heads, heard)

    def _resolutions_in(self, cut: NodeCut, heard: list[np.ndarray]) -> tuple[Found, np.ndarray]:
        """Return the resolutions of other nodes, and the bytes in front of the rows of each. [S]."""
        words = wire.resolution_words(self._carrier.has_steps)
        counts = np.bincount(cut.owner, minlength=self._num_nodes)
        counts[self._index] = 0
        ends = HEAD_WORDS - 1 + counts * words
        packed = [said[HEAD_WORDS - 1 : end] for said, end in zip(heard, ends.tolist(), strict=True)]
        records, steps = wire.unpack_resolutions(np.concatenate(packed).reshape(-1, words))
        order = np.argsort(cut.owner, kind="stable")
        order = order[cut.owner[order] != self._index]
        index = cut.asked[order]
        records[:, R_NUMBER] = cut.first + index
        return Found(index, cut.owner[order], records, steps), WORD_BYTES * ends

    def _samples_here(self, cut: NodeCut, mine: Found) -> np.ndarray:
        """Return the samples of which this node copies rows for itself, as of a mapped data set."""
        here = mine.part(np.isin(mine.sample, cut.wanted))
        return self._samples(cut, here, here.holder, here.holder)

    def _samples(self, cut: NodeCut, found: Found, peer: np.ndarray, reader: np.ndarray) -> np.ndarray:
        """Return samples whose rows travel between this node and `peer`, to be read by `reader`. [n, 7]."""
        samples = np.zeros((len(found.sample), SAMPLE_WORDS), np.int64)
        goal = self._goals(self._stream, torch.from_numpy(found.records))
        samples[:, S_PEER] = peer
        samples[:, S_NEED] = self._routes.need_of[reader, self._routes.replica_of(found.sample, cut.offset)]
        samples[:, S_SLOT : S_ANCHOR + 1] = found.records[:, (R_SLOT, R_NUM_STEPS, R_ANCHOR)]
        if found.steps is not None:
            samples[:, S_N_STEPS] = found.steps
        samples[:, S_GOAL] = -1 if goal is None else goal.numpy()
        return samples

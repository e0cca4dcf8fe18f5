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
)
from deepspeed_gear.parallel import wire
from deepspeed_gear.parallel.carrier import Carrier
from deepspeed_gear.parallel.link import Link
from deepspeed_gear.parallel.routes import Routes
from deepspeed_gear.parallel.rows import Samples
from deepspeed_gear.selection.stream import Stream

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

    def with_(self, other: Found) -> Found:
        """Return these and others."""
        steps = None
        if self.steps is not None and other.steps is not None:
            steps = np.concatenate([self.steps, other.steps])
        sample, holder = (np.concatenate(pair) for pair in zip(self[:2], other[:2], strict=True))
        return Found(sample, holder, np.concatenate([self.records, other.records]), steps)


class Own(NamedTuple):
    """Samples of which a node copies rows for itself, as of a mapped data set."""

    found: Found
    samples: Samples


class Begun(NamedTuple):
    """Resolutions that are under way.

    Args:
        least: The smallest mass that this node has drawn.
        node, which: Where its samples go, as `Routes.destinations`.
        wait: Returns the words of each node.
    """

    least: int
    node: np.ndarray
    which: np.ndarray
    wait: Callable[[], list[np.ndarray]]


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
        begun = self._send_resolutions(cut, mine)
        try:
            kept = self._pack_rows(cut, mine, begun.node, begun.which)  # while the others' resolutions come
            self._receive(cut, mine, begun, kept)
        except Exception as error:
            self._link.abandon(error)
            raise

    def _receive(self, cut: NodeCut, mine: Found, begun: Begun, kept: Own | None) -> None:
        theirs = self._receive_resolutions(cut, mine, begun)
        ring = self._stream.ring[cut.entry].numpy()
        ring[: cut.count] = 0
        ring[: cut.count, R_ID] = wire.UNKNOWN
        ring[theirs.sample] = theirs.records
        ring[mine.sample] = mine.records
        assert self._stream.origins is not None
        origins = self._stream.origins[cut.entry].numpy()
        for found in (mine, theirs):
            origins[found.sample] = found.holder << wire.SHARD_BITS | found.records[:, R_SLOT]
        self._swap_rows(cut, theirs, kept, ring)

    def _send_resolutions(self, cut: NodeCut, mine: Found) -> Begun:
        """Begin to tell each node what it needs of this node's resolutions."""
        packed = wire.pack_resolutions(mine.records, mine.steps)
        node, which = self._routes.destinations(mine.sample, cut.offset)
        parts = np.split(which, np.searchsorted(node, np.arange(1, self._num_nodes)))
        if cut.needs_all:
            parts = [np.arange(len(packed))] * self._num_nodes
        head = np.zeros((1, packed.shape[1]), np.int64)
        head[0, 0] = least = int(mine.records[:, R_MASS].min(initial=wire.MOST))
        sent = [np.concatenate([head, packed[part]]) for part in parts]
        sent[self._index] = sent[self._index][:0]
        counts = 1 + np.bincount(cut.owner, minlength=self._num_nodes)
        counts[self._index] = 0
        return Begun(least, node, which, self._link.begin_words(sent, counts))

    def _receive_resolutions(self, cut: NodeCut, mine: Found, begun: Begun) -> Found:
        """Return what the others say."""
        heard = [rows for rows in begun.wait() if len(rows)]
        self.least_drawn = min([begun.least, *(int(rows[0, 0]) for rows in heard)])
        order = np.argsort(cut.owner, kind="stable")
        order = order[cut.owner[order] != self._index]
        records, steps = wire.unpack_resolutions(np.concatenate([rows[1:] for rows in heard]))
        index = cut.asked[order]
        records[:, R_NUMBER] = cut.first + index
        return Found(index, cut.owner[order], records, steps)

    def _pack_rows(self, cut: NodeCut, mine: Found, node: np.ndarray, which: np.ndarray) -> Own | None:
        """Pack the rows that other nodes lack; return what this node copies for itself."""
        outgoing, own = self._samples(cut, mine.part(which), node, node), None
        if self._carrier.takes_own:
            here = mine.part(np.nonzero(np.isin(mine.sample, cut.wanted))[0])
            own = Own(here, self._samples(cut, here, here.holder, here.holder))
            outgoing = _together(outgoing, own.samples)
        self._carrier.pack(outgoing)
        return own

    def _swap_rows(self, cut: NodeCut, theirs: Found, own: Own | None, ring: np.ndarray) -> None:
        """Exchange rows, and say where those lie that this node has got."""
        needed = np.nonzero(np.isin(theirs.sample, cut.wanted))[0] if cut.needs_all else slice(None)
        got = theirs.part(needed)
        incoming = self._samples(cut, got, got.holder, np.full_like(got.holder, self._index))
        if own is not None:
            got, incoming = got.with_(own.found), _together(incoming, own.samples)
        first_row, slot = self._carrier.carry(cut.entry, incoming)
        ring[got.sample, R_FIRST_ROW], ring[got.sample, R_SLOT] = first_row, slot

    def _samples(self, cut: NodeCut, found: Found, peer: np.ndarray, reader: np.ndarray) -> Samples:
        """Return samples whose rows travel between this node and `peer`, to be read by `reader`."""
        replica = self._routes.replica_of(found.sample, cut.offset)
        records, none = found.records, np.zeros_like(found.sample)
        goal = self._goals(self._stream, torch.from_numpy(records))
        return Samples(
            peer,
            self._routes.need_of[reader, replica],
            records[:, R_SLOT],
            records[:, R_NUM_STEPS],
            records[:, R_ANCHOR],
            none if found.steps is None else found.steps,
            none - 1 if goal is None else goal.numpy(),
        )


def _together(one: Samples, other: Samples) -> Samples:
    return Samples(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))

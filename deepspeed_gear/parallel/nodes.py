"""Cuts over the nodes that hold a table: each resolves its own draws, and sends what others lack.

Every node computes all coordinates; those that fall into its own part of the total mass it resolves. Then
each node gets the resolutions of the samples that its ranks train on, and the rows of them that their windows
read. What a node says first in a cut (`Hello`) carries its status, so that all fail or none does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.constants import (
    HIGHEST_PRIORITY,
    R_ANCHOR,
    R_FIRST_ROW,
    R_ID,
    R_MASS,
    R_NUM_STEPS,
    R_NUMBER,
    R_SLOT,
    REPORT_WORDS,
    RESOLUTION_WORDS,
)
from deepspeed_gear.parallel import wire
from deepspeed_gear.parallel.carrier import Carrier
from deepspeed_gear.parallel.link import Link
from deepspeed_gear.parallel.routes import Routes
from deepspeed_gear.parallel.rows import Samples
from deepspeed_gear.parallel.window import edge_over_nodes
from deepspeed_gear.selection.age import AgeMasses, items_of
from deepspeed_gear.selection.priorities import PriorityMasses
from deepspeed_gear.selection.selector import Check, Selector
from deepspeed_gear.selection.shards import merge_top
from deepspeed_gear.selection.stream import Stream

# Words of what a node says first: the last one is for each receiver a word of its own.
KEY, STATUS, STOP, WAITED_US, WAITING, TOTAL, ITEMS, LEAST, HIGHEST, REPORTS = range(10)
HELLO_WORDS = 10
FINE, FAILED = 0, 1
TEXT_WORDS = 64
MOST_LEAVE_S = 10.0  # what a node that leaves waits for the others to hear it
Goals = Callable[[Stream, torch.Tensor], torch.Tensor | None]


@dataclass
class _Cut:
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


class _Found(NamedTuple):
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

    def part(self, which: np.ndarray | slice) -> _Found:
        """Return some of them."""
        steps = None if self.steps is None else self.steps[which]
        return _Found(self.sample[which], self.holder[which], self.records[which], steps)

    def with_(self, other: _Found) -> _Found:
        """Return these and others."""
        steps = None
        if self.steps is not None and other.steps is not None:
            steps = np.concatenate([self.steps, other.steps])
        sample, holder = (np.concatenate(pair) for pair in zip(self[:2], other[:2], strict=True))
        return _Found(sample, holder, np.concatenate([self.records, other.records]), steps)


class NodeSelector(Selector):
    """The items of all nodes, asked by the one process of this node that makes its cuts.

    One thread at a time. It takes the table's lock itself, and never while it waits for other nodes.

    Args:
        stream: Of this node's part of the table.
        link: To the other nodes; shared by the streams of one thread.
        routes: Who needs what.
        carrier: Moves rows.
        goals: Draws the achieved goals of samples, or None.
        verify_every: As the config's.
    """

    in_store = False

    def __init__(
        self,
        stream: Stream,
        link: Link,
        routes: Routes,
        carrier: Carrier,
        goals: Goals,
        verify_every: int,
    ) -> None:
        super().__init__(stream.spec, stream.masses)
        self.stream, self.link, self._routes, self._carrier = stream, link, routes, carrier
        self._table, self._goals, self._verify_every = stream.table, goals, verify_every
        self._index, self._num_nodes = routes.index, routes.num_nodes
        self._totals = np.zeros(self._num_nodes, np.int64)
        self._records = np.zeros((self._num_nodes, HELLO_WORDS), np.int64)
        self._waiting = False
        self._is_first = True
        self._least_drawn = 0
        self._cut: _Cut | None = None
        self.late_s = np.zeros(self._num_nodes)  # how long the others have waited for each node

    # ---- phases ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return self._waiting

    @property
    def total(self) -> int:
        return int(self._totals.sum())

    def begin(self, key: int, entry: int, count: int, check: Check) -> None:
        """Agree with the other nodes to make a cut.

        Raises:
            StoreError: The stream is being closed.
            PeerError: A node has failed, ended, or asks for another global batch.
        """
        self._cut = self._new_cut(key, entry, count)
        reports = np.zeros(self._num_nodes, np.int64)
        error: Exception | None = None
        try:
            if isinstance(self.masses, PriorityMasses):
                reports = self._take_reports(key)
            elif not self._has_window and self.spec.kind not in ("epoch", "pass"):
                with self._table.lock:
                    self.masses.apply(key)
        except Exception as caught:
            error = caught
        self._hello(error, self.stream.stopped, reports)

    def _new_cut(self, key: int, entry: int, count: int) -> _Cut:
        offset = 0 if self.spec.offset is None else self.spec.offset(key)
        wanted = self._routes.wanted(count, offset)
        verifies = self.spec.kind != "pass" and bool(self._verify_every) and key % self._verify_every == 0
        asked = np.arange(count) if verifies else wanted
        return _Cut(key, entry, count, offset, wanted, verifies, asked, np.zeros_like(asked))

    @property
    def _has_window(self) -> bool:
        return isinstance(self.masses, AgeMasses) and self.spec.rule.window is not None

    def _hello(self, error: Exception | None, stop: bool, reports: np.ndarray) -> None:
        words = np.empty((self._num_nodes, HELLO_WORDS), np.int64)
        words[:] = self._record()
        words[:, KEY] = -1 if self._cut is None else self._cut.key
        words[:, STATUS], words[:, STOP] = (FINE if error is None else FAILED), stop
        words[:, REPORTS] = reports
        heard = self.link.swap_equal(words)
        self._records = heard
        self._note_waits(heard[:, WAITED_US])
        if heard[:, STOP].any():
            self.link.left = True
            self._raise_stop(heard)
        self._raise_failure(heard, error)
        if (heard[:, KEY] != words[0, KEY]).any():
            asked = {self.link.name(i): key for i, key in enumerate(heard[:, KEY].tolist())}
            raise PeerError(
                f"stream {self.spec.name}: the nodes",
                "must ask for the same global batch",
                asked,
                "all ranks must take the same batches in the same order",
            )
        self._waiting = bool(heard[:, WAITING].any())
        self._totals = heard[:, TOTAL].copy()

    def leave(self) -> None:
        """Tell the other nodes that this one makes no further cut, unless one of them has said so."""
        if not self.link.left:
            self._cut = None
            patience, self.link.timeout_s = self.link.timeout_s, min(self.link.timeout_s, MOST_LEAVE_S)
            with contextlib.suppress(PeerError, StoreError):
                self._hello(None, True, np.zeros(self._num_nodes, np.int64))
            self.link.timeout_s = patience
        self.link.left = False

    def _record(self) -> np.ndarray:
        """Return what the others must know of this node's part."""
        words = np.zeros(HELLO_WORDS, np.int64)
        masses = self.masses
        with self._table.lock:
            words[WAITING] = masses.waiting and not isinstance(masses, PriorityMasses)
            words[TOTAL] = masses.total
            if isinstance(masses, PriorityMasses):
                words[ITEMS] = masses.num_drawable
                words[HIGHEST] = masses.counts[HIGHEST_PRIORITY]
                if masses.rule.normalize == "table":
                    words[LEAST] = masses.least
        words[WAITED_US] = int(self.link.last_wait_s * 1e6)
        return words

    def _note_waits(self, waited_us: np.ndarray) -> None:
        """Whoever has waited least in the exchange before was the last to come."""
        self.late_s += (waited_us.max() - waited_us) * 1e-6

    def _raise_stop(self, heard: np.ndarray) -> None:
        if self.stream.stopped or self._cut is None:
            name = f"stream {self.spec.name}"
            raise StoreError(name, "must be open", None, "it was closed while it waited")
        node = int(np.nonzero(heard[:, STOP])[0][0])
        had = f"it ended before global batch {self._cut.key}"
        raise PeerError(self.link.name(node), "must take as many batches as this rank", None, had)

    def _raise_failure(self, heard: np.ndarray, error: Exception | None) -> None:
        """Raise if a node says that it has failed: its own error there, its text elsewhere."""
        if not heard[:, STATUS].any():
            return
        text = "" if error is None else wire.text_of(error)
        texts = self.link.gather(wire.pack_text(text, TEXT_WORDS))
        if error is not None:
            raise error
        node = int(np.nonzero(heard[:, STATUS])[0][0])
        raise PeerError(
            self.link.name(node), "must succeed on every node", None, wire.unpack_text(texts[node])
        )

    # ---- masses ----------------------------------------------------------------------------------

    def apply(self, key: int) -> int:
        if isinstance(self.masses, PriorityMasses):
            self._apply_reports(key)
        elif self._has_window:
            if self._waiting or self._is_first:
                self._apply_window(key)
        elif self.spec.kind in ("epoch", "pass") and self._waiting:
            self._apply_together(lambda: self.masses.apply(key))
        self._is_first = False
        return self.total

    def _apply_together(self, action: Callable[[], None]) -> None:
        """Change this node's masses, and hear what all have then."""
        error: Exception | None = None
        try:
            with self._table.lock:
                action()
        except Exception as caught:
            error = caught
        words = self._record()
        words[STATUS] = FINE if error is None else FAILED
        heard = self.link.gather(words)
        self._raise_failure(heard, error)
        self._records, self._totals = heard, heard[:, TOTAL].copy()

    def _apply_window(self, key: int) -> None:
        masses = self.masses
        assert isinstance(masses, AgeMasses)
        assert self.spec.rule.window is not None
        with self._table.lock:
            contents = masses.contents()
        edge = edge_over_nodes(self.link, self.spec.rule.window, *contents)

        def change() -> None:
            masses.apply_window(edge)
            masses.apply(key)

        self._apply_together(change)

    def _take_reports(self, key: int) -> np.ndarray:
        """Copy the reports that are due, by the node that they go to; return how many go to each. [S]."""
        masses = self.masses
        assert isinstance(masses, PriorityMasses)
        with self._table.lock:
            self._due = masses.reports.due(key)
            entries = [rows for _, rows in self._due]
            reports = np.concatenate(entries) if entries else np.empty((0, REPORT_WORDS), np.int64)
            self._reports = wire.by_shard(reports, self._num_nodes)
        counts = np.array([len(rows) for rows in self._reports])
        counts[self._index] = 0
        return counts

    def _apply_reports(self, key: int) -> None:
        masses = self.masses
        assert isinstance(masses, PriorityMasses)
        latest = key - masses.rule.lag
        sent = [wire.pack_reports(rows, latest) for rows in self._reports]
        sent[self._index] = np.empty((0, wire.PACKED_REPORT_WORDS), np.int64)
        received = self.link.swap_words(sent, self._records[:, REPORTS])
        highest = int(self._records[:, HIGHEST].max())

        def change() -> None:
            masses.counts[HIGHEST_PRIORITY] = max(highest, int(masses.counts[HIGHEST_PRIORITY]))
            mine = wire.local_reports(self._reports[self._index])
            others = [wire.unpack_reports(words, latest) for words in received]
            found = [masses.known_reports(rows) for rows in (mine, *others) if len(rows)]
            masses.apply_reports(key, found)
            if self._due:
                masses.reports.take(self._due)
            masses.check_clamped()

        self._apply_together(change)

    # ---- draws -----------------------------------------------------------------------------------

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        cut = self._cut
        assert cut is not None
        points = coordinates.numpy()
        ends = np.cumsum(self._totals)
        low = int(ends[self._index] - self._totals[self._index])
        own = np.nonzero((points >= low) & (points < low + int(self._totals[self._index])))[0]
        records = torch.empty(len(own), RESOLUTION_WORDS, dtype=torch.int64)
        if len(own):
            with self._table.lock:
                self.masses.resolve_numbered(records, torch.from_numpy(points[own] - low), own + first)
        cut.first = first - done
        cut.own.append(own + done)
        cut.records.append(records)
        begin, end = np.searchsorted(cut.asked, [done, done + len(points)])
        cut.owner[begin:end] = np.searchsorted(ends, points[cut.asked[begin:end] - done], side="right")

    def highest(self, count: int) -> torch.Tensor:
        masses = self.masses
        assert isinstance(masses, PriorityMasses)
        with self._table.lock:
            items = masses.highest_items(count)
            own = np.stack(
                [
                    masses.values[items].view(np.int32).astype(np.int64),
                    masses.ids_of(items.numpy()),
                    masses.coordinates_of(items).numpy(),
                ],
                axis=1,
            )
        found = self.link.gather_ragged(own)
        priorities = [rows[:, 0].astype(np.int32).view(np.float32) for rows in found]
        if self._table.spec.dataset is None:  # equal priorities by the age of their trajectories
            shards, which = wire.merge_by_id(priorities, [rows[:, 1] for rows in found], count)
        else:
            shards, which = merge_top(priorities, [np.arange(len(rows)) for rows in found], count)
        before = np.cumsum(self._totals) - self._totals
        chosen = [before[shard] + found[shard][index, 2] for shard, index in zip(shards, which, strict=True)]
        return torch.tensor(chosen, dtype=torch.int64)

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        masses = self.masses
        assert isinstance(masses, AgeMasses)
        with self._table.lock:
            own = np.stack(masses.ends(count, newest), axis=1)
        found = self.link.gather_ragged(own)
        before = np.cumsum(self._totals) - self._totals
        for rows, start in zip(found, before, strict=True):
            rows[:, 2] += start
        every = np.concatenate(found)
        order = np.argsort(every[:, 0], kind="stable")
        every = every[order[::-1] if newest else order]
        return items_of(every[:, 1], every[:, 2], count, newest)

    # ---- what travels ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Swap the resolutions and the rows of the cut."""
        cut = self._cut
        assert cut is not None
        own = np.concatenate([np.empty(0, np.int64), *cut.own])
        records = torch.cat([torch.empty(0, RESOLUTION_WORDS, dtype=torch.int64), *cut.records])
        if self.stream.draws is not None and len(own):
            with self._table.lock:
                self.stream.draws.count(records.numpy())
        self._fill(cut, own, records)

    def deliver(
        self, key: int, entry: int, first: int, owner: np.ndarray, own: np.ndarray, records: torch.Tensor
    ) -> None:
        """Fill an entry of the ring with a cut of a checkpoint, as `finish` does with a new one.

        Args:
            key: Number of the global batch.
            entry: Of the ring.
            first: Sample number of the cut's first sample.
            owner: Which node holds each sample. [count], int64.
            own: Samples that this node holds, ascending. [n], int64.
            records: Their resolutions. [n, 8], int64.
        """
        cut = self._cut = self._new_cut(key, entry, len(owner))
        cut.first, cut.owner = first, owner[cut.asked]
        self._fill(cut, own, records)

    def restart(self) -> None:
        """Ask what a window admits anew at the next cut: the table holds something else."""
        self._is_first = True

    def _fill(self, cut: _Cut, own: np.ndarray, records: torch.Tensor) -> None:
        """Put what this node needs of a cut into the ring, and its rows into the arrivals."""
        mine = _Found(own, np.full_like(own, self._index), records.numpy(), self._carrier.steps_of(records))
        theirs = self._swap_resolutions(cut, mine)
        ring = self.stream.ring[cut.entry].numpy()
        ring[: cut.count] = 0
        ring[: cut.count, R_ID] = wire.UNKNOWN
        ring[theirs.sample] = theirs.records
        ring[mine.sample] = mine.records
        assert self.stream.origins is not None
        origins = self.stream.origins[cut.entry].numpy()
        for found in (mine, theirs):
            origins[found.sample] = found.holder << wire.SHARD_BITS | found.records[:, R_SLOT]
        self._swap_rows(cut, mine, theirs, ring)

    def _swap_resolutions(self, cut: _Cut, mine: _Found) -> _Found:
        """Tell each node what it needs of this node's resolutions; return what the others say."""
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
        heard = [rows for rows in self.link.swap_words(sent, counts) if len(rows)]
        self._least_drawn = min([least, *(int(rows[0, 0]) for rows in heard)])
        order = np.argsort(cut.owner, kind="stable")
        order = order[cut.owner[order] != self._index]
        records, steps = wire.unpack_resolutions(np.concatenate([rows[1:] for rows in heard]))
        index = cut.asked[order]
        records[:, R_NUMBER] = cut.first + index
        return _Found(index, cut.owner[order], records, steps)

    def _swap_rows(self, cut: _Cut, mine: _Found, theirs: _Found, ring: np.ndarray) -> None:
        """Send the rows that other nodes lack, and say where those lie that this one has got."""
        node, which = self._routes.destinations(mine.sample, cut.offset)
        outgoing = self._samples(cut, mine.part(which), node, node)
        needed = np.nonzero(np.isin(theirs.sample, cut.wanted))[0] if cut.needs_all else slice(None)
        got = theirs.part(needed)
        if self._carrier.takes_own:
            here = mine.part(np.nonzero(np.isin(mine.sample, cut.wanted))[0])
            own = self._samples(cut, here, here.holder, here.holder)
            outgoing, got = _together(outgoing, own), got.with_(here)
        incoming = self._samples(cut, got, got.holder, np.full_like(got.holder, self._index))
        first_row, slot = self._carrier.carry(cut.entry, outgoing, incoming)
        ring[got.sample, R_FIRST_ROW], ring[got.sample, R_SLOT] = first_row, slot

    def _samples(self, cut: _Cut, found: _Found, peer: np.ndarray, reader: np.ndarray) -> Samples:
        """Return samples whose rows travel between this node and `peer`, to be read by `reader`."""
        replica = self._routes.replica_of(found.sample, cut.offset)
        records, none = found.records, np.zeros_like(found.sample)
        goal = self._goals(self.stream, torch.from_numpy(records))
        return Samples(
            peer,
            self._routes.need_of[reader, replica],
            records[:, R_SLOT],
            records[:, R_NUM_STEPS],
            records[:, R_ANCHOR],
            none if found.steps is None else found.steps,
            none - 1 if goal is None else goal.numpy(),
        )

    def weigh(self, key: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        del drawn
        masses = self.masses
        assert isinstance(masses, PriorityMasses)
        beta = masses.beta_at(key)
        if masses.rule.normalize == "batch":
            return self._least_drawn, 1, beta
        if masses.rule.normalize == "table":
            least = self._records[:, LEAST]
            return int(least[least > 0].min()), 1, beta
        return total, int(self._records[:, ITEMS].sum()), beta

    def fail(self, key: int, error: Exception) -> None:
        assert self.stream.notice is not None
        self.stream.notice.write(key, error)


def _together(one: Samples, other: Samples) -> Samples:
    return Samples(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))

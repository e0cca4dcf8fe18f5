"""Tensors between nodes: one rank of each node sends and receives for it. Transport: torch.distributed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.errors import LostNodeError, PeerError, StoreError
from deepspeed_gear.parallel.exchange import lane
from deepspeed_gear.parallel.topology import Topology
from deepspeed_gear.parallel.watch import SOME_NODE

GRACE_S = 5.0  # beyond our own wait, so that gloo's wait ends after it


class Link:
    """Exchanges between the nodes that hold a table. One thread at a time; all nodes call in one order.

    A wait that fails leaves messages behind that nobody may take for others: the link is broken for good.

    Args:
        topology: Where the ranks sit.
        order: Nodes that take part.
        purpose: Exchanges of different purposes have groups of their own and never wait for each other.
        timeout_s: Longest wait for another node, in seconds.
        group: Whose ranks the topology counts; None for all.
    """

    def __init__(
        self, topology: Topology, order: Sequence[int], purpose: str, timeout_s: float, group: Any = None
    ) -> None:
        self._topology, self.timeout_s = topology, timeout_s
        self.nodes = list(order)
        self.count, self.index = len(self.nodes), self.nodes.index(topology.node)
        members = [topology.ranks_of(node)[0] for node in self.nodes]
        self._ranks = members if group is None else [dist.get_global_rank(group, rank) for rank in members]
        self._purpose = purpose
        self._group: Any = None
        self._broken: LostNodeError | None = None
        self.check: Callable[[], None] = lambda: None  # raises what is known to be lost
        self.note: Callable[[LostNodeError], None] = lambda error: None  # is told what was found lost
        self.bytes_sent = self.bytes_received = 0
        self.num_exchanges, self.last_wait_s = 0, 0.0
        self.left = False  # some node has said that it makes no further cut

    def open(self) -> None:
        """Make the group. Collective over the ranks that exchange."""
        self._group = lane(tuple(sorted(self._ranks)), self._purpose, self.timeout_s + GRACE_S)

    def name(self, index: int) -> str:
        """Return one of the nodes as errors name it."""
        return self._topology.describe(self.nodes[index])

    def gather(self, words: np.ndarray) -> np.ndarray:
        """Return the same number of words of every node. [n], int64 -> [S, n], int64."""
        return self.swap_equal(np.broadcast_to(words, (self.count, len(words))))

    def swap_equal(self, words: np.ndarray) -> np.ndarray:
        """Send each node a row, of equal size everywhere; return the row from each. [S, n], int64, both."""
        size = words.shape[1] * 8
        sizes = [size] * self.count
        sent = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8).reshape(-1))
        received = torch.empty(size * self.count, dtype=torch.uint8)
        self.swap(sent, sizes, received, sizes)
        return received.numpy().view(np.int64).reshape(words.shape)

    def swap_words(self, rows: Sequence[np.ndarray], counts: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Send each node rows of equally many words; return the rows from each.

        Args:
            rows: [n_s, words] for each node, int64.
            counts: Rows from each node. [S].
        """
        return self.begin_words(rows, counts)()

    def begin_words(
        self, rows: Sequence[np.ndarray], counts: Sequence[int] | np.ndarray
    ) -> Callable[[], list[np.ndarray]]:
        """Begin `swap_words`; return what waits for it."""
        words = rows[0].shape[1]
        sent = torch.from_numpy(np.concatenate(rows).reshape(-1).view(np.uint8))
        expected = [int(count) * words * 8 for count in counts]
        received = torch.empty(sum(expected), dtype=torch.uint8)
        wait = self.begin(sent, [part.nbytes for part in rows], received, expected)

        def end() -> list[np.ndarray]:
            wait()
            found = received.numpy().view(np.int64).reshape(-1, words)
            return list(np.split(found, np.cumsum(np.asarray(counts, np.int64))[:-1]))

        return end

    def gather_ragged(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the rows of every node. [n, words], int64 -> [n_s, words] each."""
        counts = self.gather(np.array([len(rows)]))[:, 0]
        return self.swap_words([rows] * self.count, counts)

    def swap(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, expected: Sequence[int]
    ) -> None:
        """Send bytes to each node and receive bytes from each.

        Args:
            sent: The messages one behind the other, in the order of nodes. [sum(sizes)], uint8.
            sizes: Bytes for each node; what is for this node itself is copied. [S].
            received: Gets the messages of all nodes. [sum(expected)], uint8.
            expected: Bytes from each node, as it has them in its own `sizes`. [S].
        Raises:
            LostNodeError: A node does not answer in time, or its connection has ended.
        """
        self.begin(sent, sizes, received, expected)()

    def begin(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, expected: Sequence[int]
    ) -> Callable[[], None]:
        """Begin `swap`; return what waits for it, to be called before the next exchange begins.

        One collective: with sends and receives between pairs a cut over two nodes of one core each takes two
        to three times as long, most of it in gloo's own threads.
        """
        if self._broken is not None:
            raise self._broken
        order = np.argsort(self._ranks).tolist()  # of the nodes in the group, whose ranks ascend
        to, source = [sizes[node] for node in order], [expected[node] for node in order]
        in_order = order == list(range(self.count))
        given = sent if in_order else torch.cat([_pieces(sent, sizes)[node] for node in order])
        found = received if in_order else torch.empty_like(received)
        self.bytes_sent += sum(sizes) - sizes[self.index]
        try:
            work = dist.all_to_all_single(found, given, source, to, group=self._group, async_op=True)
        except RuntimeError as error:
            self._fail(error)

        def wait() -> None:
            begin = time.monotonic()
            try:
                work.wait(timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                self._fail(error)
            self.num_exchanges += 1
            self.last_wait_s = time.monotonic() - begin
            self.bytes_received += sum(expected) - expected[self.index]
            if not in_order:
                parts = _pieces(received, expected)
                for node, part in zip(order, _pieces(found, source), strict=True):
                    parts[node].copy_(part)

        return wait

    @contextlib.contextmanager
    def parting(self, timeout_s: float) -> Iterator[None]:
        """Wait no longer than this for nodes that may have left already, and call none of them lost."""
        kept = self.timeout_s, self.check, self.note
        self.timeout_s = min(self.timeout_s, timeout_s)
        self.check, self.note = lambda: None, lambda error: None
        try:
            with contextlib.suppress(PeerError, StoreError):
                yield
        finally:
            self.timeout_s, self.check, self.note = kept

    def begin_pairs(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin `gather` with messages between pairs; return what waits for it. [n], int64 -> [S, n], int64.

        Unlike a collective under way they may stay unanswered for any time, and do not keep a process from
        ending.
        """
        if self._broken is not None:
            raise self._broken
        sent = torch.from_numpy(np.array(words, np.int64))
        received = sent.repeat(self.count, 1)
        others = [(self.index + i) % self.count for i in range(1, self.count)]
        works: list[tuple[int, Any]] = []
        try:
            for node in others:
                works.append((node, dist.irecv(received[node], self._ranks[node], group=self._group)))
            for node in others:
                works.append((node, dist.isend(sent, self._ranks[node], group=self._group)))
        except RuntimeError as error:
            self._fail(error)

        def wait() -> np.ndarray:
            begin, until = time.monotonic(), time.monotonic() + self.timeout_s
            for node, work in works:
                try:
                    work.wait(timedelta(seconds=max(until - time.monotonic(), 1e-3)))
                except RuntimeError as error:
                    self._fail(error, node)
            self.num_exchanges += 1
            self.last_wait_s = time.monotonic() - begin
            return np.asarray(received.numpy())

        return wait

    def abandon(self, error: Exception) -> None:
        """Break the link: an error keeps this node from an exchange that the others wait in."""
        if self._broken is None:
            remedy = "start all ranks again"
            self._broken = LostNodeError(
                "this node", "must make the cuts that it has begun", str(error), remedy
            )
            self._broken.__cause__ = error

    def _fail(self, error: RuntimeError, node: int | None = None) -> NoReturn:
        """Raise what the watch knows, else what the transport says."""
        text = str(error).splitlines()[0]
        node = 1 - self.index if node is None and self.count == 2 else node
        name = SOME_NODE if node is None else self.name(node)
        rule = f"must answer in gear.timeout_s = {self.timeout_s} s"
        remedy = "look for the first error in the logs of its ranks, and at the network"
        self._broken = LostNodeError(name, rule, text, remedy)
        self._broken.__cause__ = error
        self.note(self._broken)
        self.check()
        raise self._broken


def _pieces(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(buffer, list(sizes)))

"""Tensors between nodes: one rank of each node sends and receives for it. Transport: torch.distributed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.errors import LostNodeError
from deepspeed_gear.parallel.exchange import lane
from deepspeed_gear.parallel.topology import Topology

# Sends and receives between pairs, up to so many nodes; beyond it one collective, whose fixed cost is higher
# (docs/many_nodes.md has the measurement).
MOST_PAIRS = 32
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
        self._sent: deque[tuple[torch.Tensor, Sequence[int], list[tuple[int, Any]]]] = deque()  # not received
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
        self.send_words(rows)
        return self.receive_words(rows[0].shape[1], counts)

    def send_words(self, rows: Sequence[np.ndarray]) -> None:
        """Send each node rows; as `swap_words`."""
        sent = torch.from_numpy(np.concatenate(rows).reshape(-1).view(np.uint8))
        self.send(sent, [part.nbytes for part in rows])

    def receive_words(self, words: int, counts: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Receive rows of so many words; as `swap_words`."""
        expected = [int(count) * words * 8 for count in counts]
        received = torch.empty(sum(expected), dtype=torch.uint8)
        self.receive(received, expected)
        found = received.numpy().view(np.int64).reshape(-1, words)
        return list(np.split(found, np.cumsum(np.asarray(counts, np.int64))[:-1]))

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
        self.send(sent, sizes)
        self.receive(received, expected)

    def send(self, sent: torch.Tensor, sizes: Sequence[int]) -> None:
        """Send bytes to each node; as `swap`. A `receive` follows for each, in the same order.

        `sent` must not change before that.
        """
        if self._broken is not None:
            raise self._broken
        works: list[tuple[int, Any]] = []
        if self.count <= MOST_PAIRS:
            works = self._in_pairs(dist.isend, sent, sizes)
        self._sent.append((sent, sizes, works))
        self.bytes_sent += sum(sizes) - sizes[self.index]

    def receive(self, received: torch.Tensor, expected: Sequence[int]) -> None:
        """Receive what the other nodes have sent; as `swap`."""
        if self._broken is not None:
            raise self._broken
        sent, sizes, works = self._sent.popleft()
        if sizes[self.index]:
            _pieces(received, expected)[self.index].copy_(_pieces(sent, sizes)[self.index])
        begin = time.monotonic()
        if self.count <= MOST_PAIRS:
            timeout = timedelta(seconds=self.timeout_s)
            for node, work in [*self._in_pairs(dist.irecv, received, expected), *works]:
                try:
                    work.wait(timeout)
                except RuntimeError as error:
                    self._fail(node, error)
        else:
            self._at_once(sent, sizes, received, expected)
        self.num_exchanges += 1
        self.last_wait_s = time.monotonic() - begin
        self.bytes_received += sum(expected) - expected[self.index]

    def abandon(self, error: Exception) -> None:
        """Break the link where an error has left messages behind that nobody receives."""
        if self._sent and self._broken is None:
            remedy = "start all ranks again"
            self._broken = LostNodeError("this node", "must receive all that it was sent", str(error), remedy)
            self._broken.__cause__ = error

    def _in_pairs(
        self, transfer: Callable[..., Any], buffer: torch.Tensor, sizes: Sequence[int]
    ) -> list[tuple[int, Any]]:
        """Begin to send to, or to receive from, every other node; return what to wait for, by node."""
        parts, works = _pieces(buffer, sizes), []
        # Each begins with the node behind it, so that not all of them send to the same one first.
        for node in ((self.index + i) % self.count for i in range(1, self.count)):
            if sizes[node]:
                try:
                    works.append((node, transfer(parts[node], self._ranks[node], group=self._group)))
                except RuntimeError as error:
                    self._fail(node, error)
        return works

    def _at_once(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, expected: Sequence[int]
    ) -> None:
        order = np.argsort(self._ranks).tolist()  # of the nodes in the group, whose ranks ascend
        to, source = [sizes[node] for node in order], [expected[node] for node in order]
        in_order = order == list(range(self.count))
        given = sent if in_order else torch.cat([_pieces(sent, sizes)[node] for node in order])
        found = received if in_order else torch.empty_like(received)
        work = dist.all_to_all_single(found, given, source, to, group=self._group, async_op=True)
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            self._fail(None, error)
        if not in_order:
            parts = _pieces(received, expected)
            for node, part in zip(order, _pieces(found, source), strict=True):
                parts[node].copy_(part)

    def _fail(self, node: int | None, error: RuntimeError) -> NoReturn:
        """Raise what the watch knows, else what the transport says."""
        text = str(error).splitlines()[0]
        name = "another node" if node is None else self.name(node)
        rule = f"must answer in gear.timeout_s = {self.timeout_s} s"
        remedy = "look for the first error in the logs of its ranks, and at the network"
        self._broken = LostNodeError(name, rule, text, remedy)
        self._broken.__cause__ = error
        self.note(self._broken)
        self.check()
        raise self._broken


def _pieces(buffer: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(buffer, list(sizes)))

"""Heartbeats between node leaders, through torch.distributed's rendezvous store.

The store lives in one process, mostly that of rank 0, and ends with it. A node that has read by then that the
node of rank 0 has ended does not treat missing heartbeats as a loss.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.timeouts import wait_until

LOG = logging.getLogger("deepspeed_gear")
SOME_NODE = "another node"  # name in the error of a failure whose node is not known
_ENDED = float("inf")  # in place of the time of the last heartbeat: the node has ended
_FIRST = 0  # the node of rank 0


class Heartbeats:
    """Publishes this node's heartbeats and reads those of the other nodes.

    Args:
        topology: Places and nodes of all ranks.
        store: A connection of its own to the rendezvous store.
        name: Of this run in the store.
        timeout_s: Longest time between two heartbeats of a node.
        beat_s: Interval of the heartbeats.
        local_state: Returns the rank of this node that has ended after the fewest batch barriers, with their
            number, or None while none has ended; and the problem that its ranks have reported, or "".
    """

    def __init__(
        self,
        topology: Topology,
        store: Any,
        name: str,
        timeout_s: float,
        beat_s: float,
        local_state: Callable[[], tuple[tuple[int, int] | None, str]],
    ) -> None:
        self._topology, self._store, self._name = topology, store, name
        self._timeout_s, self._beat_s, self._local_state = timeout_s, beat_s, local_state
        self._others = [node for node in range(topology.num_nodes) if node != topology.node]
        self._answered = time.monotonic()  # when the store last answered
        self._nodes: dict[int, tuple[int, float]] = {}  # number and time of each node's latest heartbeat
        self._ended_first: dict[int, tuple[int, int]] = {}  # rank of `local_state` on the other nodes
        self._is_disconnected = False  # reads no more heartbeats
        self._beat = 0  # number of this node's next heartbeat
        self.problem = ""  # the first problem that any node has reported; part of each heartbeat

    def report(self, problem: str) -> None:
        """Publish a problem with the next heartbeat, unless there is one already."""
        self.problem = self.problem or problem

    def send(self, ended: bool = False) -> None:
        """Publish this node's heartbeat."""
        ended_first, found = self._local_state()
        self.problem = self.problem or found
        record = {"beat": self._beat, "ended": ended, "problem": self.problem, "left_first": ended_first}
        self._store.set(self._key(self._topology.node), json.dumps(record))
        self._beat += 1

    def run(self, stop: threading.Event) -> None:
        """Exchange heartbeats until this node ends, and publish its end.

        Once the node of rank 0 has ended, no more batch barriers follow: this node publishes its own end, so
        that the others need not wait for it, and stops, since the store may end at any time.
        """
        try:
            while not self._first_has_ended and not stop.wait(self._beat_s):
                self.send()
                self._receive()
                self._answered = time.monotonic()
            self._is_disconnected = self._first_has_ended
            self.send(ended=True)
        except Exception as error:
            self._is_disconnected = True
            if not stop.is_set() and not self._first_has_ended:
                LOG.warning("gear: the rendezvous store does not answer: %s", str(error).splitlines()[0])

    def linger(self) -> None:
        """Keep rank 0's store for two more intervals, so that the other nodes can read how this one ended."""
        if self._topology.rank != 0 or self._is_disconnected:
            return
        try:
            wait_until(self._have_others_ended, 2 * self._beat_s, self._beat_s / 8, self._receive)
        except Exception as error:
            LOG.debug("gear: the rendezvous store has ended: %s", error)

    def _have_others_ended(self) -> bool:
        return all(self._received_at(node) == _ENDED for node in self._others)

    def _received_at(self, node: int) -> float | None:
        """Return when a node's last heartbeat was received; None: there was none; infinite: it has ended."""
        return self._nodes[node][1] if node in self._nodes else None

    def has_ended(self, name: str) -> bool:
        """Return whether a node has published its end; for SOME_NODE, whether any node has."""
        ended = [node for node in self._others if self._received_at(node) == _ENDED]
        return bool(ended) if name == SOME_NODE else name in map(self._topology.describe, ended)

    def lost(self, num_barriers: int) -> str:
        """Describe a rank or node that is lost on another node; "" if there is none.

        Args:
            num_barriers: Batch barriers that the ranks of this node have passed.
        """
        if self.problem:
            return self.problem
        now = time.monotonic()
        for node, (rank, passed) in list(self._ended_first.items()):
            if passed < num_barriers:
                had = f"{passed} of {num_barriers} batch barriers"
                return f"rank {rank} ({self._topology.describe(node)}), which has ended after {had},"
        if self._is_disconnected and self._first_has_ended:
            return ""
        silent = now - self._answered
        if silent > self._timeout_s:
            first, here = (self._topology.describe(node) for node in (_FIRST, self._topology.node))
            if self._topology.node != _FIRST:
                return f"{first}, whose rendezvous store {here} cannot reach for {silent:.0f} s,"
            return f"the rendezvous store, which {here} cannot reach for {silent:.0f} s,"
        for node, (_, since) in list(self._nodes.items()):
            if now - since > self._timeout_s:
                return f"{self._topology.describe(node)}, whose last heartbeat is {now - since:.0f} s old,"
        return ""

    @property
    def _first_has_ended(self) -> bool:
        return self._received_at(_FIRST) == _ENDED

    def _receive(self) -> None:
        texts = self._store.multi_get([self._key(node) for node in self._others])
        for node, text in zip(self._others, texts, strict=True):
            self._note(node, json.loads(text))

    def _note(self, node: int, record: dict[str, Any]) -> None:
        now = time.monotonic()
        beat, _ = self._nodes.get(node, (-1, now))
        if record["left_first"] is not None:
            rank, passed = record["left_first"]
            self._ended_first[node] = int(rank), int(passed)
        if record["problem"] and not self.problem:
            self.problem = str(record["problem"])
        if record["ended"]:  # last: a thread that reads it also reads the problem
            self._nodes[node] = beat, _ENDED
        elif record["beat"] != beat:
            self._nodes[node] = int(record["beat"]), now

    def _key(self, node: int) -> str:
        return f"gear/{self._name}/{node}"

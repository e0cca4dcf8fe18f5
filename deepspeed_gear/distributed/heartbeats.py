"""What the leaders of nodes tell each other, through torch.distributed's rendezvous store.

The store lives in one process, mostly that of rank 0, and goes with it. A rank that has read by then that the
node of rank 0 has ended takes no rank for lost because it receives nothing more.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_gear.distributed.topology import Topology

LOG = logging.getLogger("deepspeed_gear")
SOME_NODE = "another node"  # name of a failure of which nothing else is known
_FOR_EVER = float("inf")  # when a node that has ended was heard last
_FIRST = 0  # the node of rank 0


class Heartbeats:
    """What this node tells, and what it has heard of the others.

    Args:
        topology: Where the ranks sit.
        store: A connection of its own to the rendezvous store.
        name: Of this run in the store.
        timeout_s: How long a node may be silent.
        beat_s: How often it tells and hears.
        look: Returns that rank of this node which has ended after the fewest turns, and their number, None
            while none has; and what its ranks have found to be wrong, or nothing.
    """

    def __init__(
        self,
        topology: Topology,
        store: Any,
        name: str,
        timeout_s: float,
        beat_s: float,
        look: Callable[[], tuple[tuple[int, int] | None, str]],
    ) -> None:
        self._topology, self._store, self._name = topology, store, name
        self._timeout_s, self._beat_s, self._look = timeout_s, beat_s, look
        self._others = [node for node in range(topology.num_nodes) if node != topology.node]
        self._heard = time.monotonic()  # when the store last answered
        self._nodes: dict[int, tuple[int, float]] = {}  # latest beat of each other node, and when it was new
        self._left_first: dict[int, tuple[int, int]] = {}  # what `look` gives on the other nodes
        self._is_cut_off = False  # it hears nothing more
        self._beat = 0
        self.problem = ""  # what is wrong: told to all nodes, and heard of them

    def report(self, problem: str) -> None:
        """Publish with the next heartbeat what is wrong, unless something is already."""
        self.problem = self.problem or problem

    def send(self, ended: bool = False) -> None:
        """Say how this node does."""
        left_first, found = self._look()
        self.problem = self.problem or found
        words = {"beat": self._beat, "ended": ended, "problem": self.problem, "left_first": left_first}
        self._store.set(self._key(self._topology.node), json.dumps(words))
        self._beat += 1

    def run(self, stop: threading.Event) -> None:
        """Tell and hear until this node ends, and say then that it does.

        Once the node of rank 0 has ended there are no more turns: this one ends for the others as well, who
        need not wait for it, and talks no more, since the store may go at any time.
        """
        try:
            while not self._first_has_ended and not stop.wait(self._beat_s):
                self.send()
                self._hear()
                self._heard = time.monotonic()
            self._is_cut_off = self._first_has_ended
            self.send(ended=True)
        except Exception as error:
            self._is_cut_off = True
            if not stop.is_set() and not self._first_has_ended:
                LOG.warning("gear: the rendezvous store does not answer: %s", str(error).splitlines()[0])

    def linger(self) -> None:
        """Give the other nodes two beats to hear how this one has ended, where the store may go with it."""
        if self._topology.rank != 0 or self._is_cut_off:
            return
        until = time.monotonic() + 2 * self._beat_s
        try:
            while time.monotonic() < until and any(self.heard_at(node) != _FOR_EVER for node in self._others):
                time.sleep(self._beat_s / 8)
                self._hear()
        except Exception as error:
            LOG.debug("gear: the rendezvous store has gone: %s", error)

    def heard_at(self, node: int) -> float | None:
        """Return when a node was heard last, infinite once it has ended; None: not yet."""
        return self._nodes[node][1] if node in self._nodes else None

    def has_ended(self, name: str) -> bool:
        """Whether a node has said that it ends; of one that is not known, whether any has."""
        ended = [node for node in self._others if self.heard_at(node) == _FOR_EVER]
        return bool(ended) if name == SOME_NODE else name in map(self._topology.describe, ended)

    def lost(self, turns: int) -> str:
        """Return what is wrong with another node, or nothing.

        Args:
            turns: That ranks of this node have taken.
        """
        if self.problem:
            return self.problem
        now = time.monotonic()
        for node, (rank, taken) in list(self._left_first.items()):
            if taken < turns:
                had = f"{taken} turns of {turns}"
                return f"rank {rank} ({self._topology.describe(node)}), which has ended after {had},"
        if self._is_cut_off and self._first_has_ended:
            return ""
        silent = now - self._heard
        if silent > self._timeout_s:
            first, here = (self._topology.describe(node) for node in (_FIRST, self._topology.node))
            if self._topology.node != _FIRST:
                return f"{first}, whose rendezvous store {here} cannot reach for {silent:.0f} s,"
            return f"the rendezvous store, which {here} cannot reach for {silent:.0f} s,"
        for node, (_, since) in list(self._nodes.items()):
            if now - since > self._timeout_s:
                return (
                    f"{self._topology.describe(node)}, which has not been heard of for {now - since:.0f} s,"
                )
        return ""

    @property
    def _first_has_ended(self) -> bool:
        return self.heard_at(_FIRST) == _FOR_EVER

    def _hear(self) -> None:
        texts = self._store.multi_get([self._key(node) for node in self._others])
        for node, text in zip(self._others, texts, strict=True):
            self._note(node, json.loads(text))

    def _note(self, node: int, said: dict[str, Any]) -> None:
        now = time.monotonic()
        beat, _ = self._nodes.get(node, (-1, now))
        if said["left_first"] is not None:
            rank, taken = said["left_first"]
            self._left_first[node] = int(rank), int(taken)
        if said["problem"] and not self.problem:
            self.problem = str(said["problem"])
        if said["ended"]:  # last: a reader of it sees the reason too
            self._nodes[node] = beat, _FOR_EVER
        elif said["beat"] != beat:
            self._nodes[node] = int(said["beat"]), now

    def _key(self, node: int) -> str:
        return f"gear/{self._name}/{node}"

"""How far each rank of a node is, in its shared memory: an error, a death or an early end is raised on all.

A rank that enters a collective which another one never enters hangs. So ranks that train together say after
each batch that they have it, and wait until all do, before any of them goes on to the model.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from deepspeed_gear.errors import GearError, PeerError
from deepspeed_gear.parallel.topology import Topology
from deepspeed_gear.store.layout import Region
from deepspeed_gear.store.table import Table

T = TypeVar("T")
REACHED, FAILED, ENDED, DIGESTS = 0, 1, 2, 4  # words of a rank; two digests by turns
WORDS, TEXT_BYTES = 8, 2048
_AWAKE_S, _POLL_S = 500e-6, 200e-6


class Status:
    """The ranks of a node that train together. Main thread only.

    Args:
        table: Whose store holds the words.
        topology: Where the ranks sit.
        timeout_s: How long one waits for another.
    """

    def __init__(self, table: Table, topology: Topology, timeout_s: float) -> None:
        self._table, self._ranks, self._timeout_s = table, topology.peers, timeout_s
        self._places = [topology.places[rank] for rank in self._ranks]
        self.leads = topology.rank == 0
        self._words: np.ndarray = table.views["status/words"]
        self._texts: np.ndarray = table.views["status/texts"]
        self._reached: np.ndarray = self._words[:, REACHED]
        self._mine: np.ndarray = self._words[table.memory.peer]
        self._count = 0  # calls of this rank that went well
        self._verified = 0

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        """Return what it keeps in the store."""
        return [
            Region("status/words", "int64", (num_peers, WORDS)),
            Region("status/texts", "uint8", (num_peers, TEXT_BYTES)),
        ]

    def agree(self, action: Callable[[], T], wait: bool = True) -> T:
        """Do something on this rank; raise if another rank failed in its turn.

        Args:
            action: What all ranks do, once each, in the same order.
            wait: Wait until all have done it; else only look.
        Returns:
            Its result.
        Raises:
            Exception: What `action` raised here.
            PeerError: Another rank failed, has died or ended, or has not done it in time.
        """
        try:
            result = action()
        except Exception as error:
            self.fail(error)
            raise
        self.reach()
        if wait:
            self.wait()
        return result

    def reach(self) -> None:
        """Say that this rank has done its part."""
        self._count += 1
        self._mine[FAILED], self._mine[REACHED] = 0, self._count

    def fail(self, error: Exception) -> None:
        """Say that this rank cannot do its part: the others raise with its text when they wait."""
        text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
        encoded = text.encode()[: TEXT_BYTES - 1]
        row = self._texts[self._table.memory.peer]
        row[: len(encoded)], row[len(encoded) :] = np.frombuffer(encoded, np.uint8), 0
        self._mine[FAILED] = self._count + 1

    def end(self) -> None:
        """Say that this rank will do nothing more."""
        self._mine[ENDED] = 1

    def wait(self) -> None:
        """Wait until every rank has done as much as this one."""
        if min(self._reached.tolist()) >= self._count:
            return
        begin = time.monotonic()
        while min(self._reached.tolist()) < self._count:
            waited = time.monotonic() - begin
            if waited < _AWAKE_S:
                os.sched_yield()
                continue
            self._check(waited)
            time.sleep(_POLL_S)

    def _check(self, waited_s: float) -> None:
        """Raise if a rank that is behind will never come."""
        for peer in np.nonzero(self._reached < self._count)[0].tolist():
            words, name = self._words[peer], f"rank {self._ranks[peer]}"
            if words[FAILED] == self._count:
                text = bytes(self._texts[peer]).rstrip(b"\0").decode(errors="replace")
                raise PeerError(name, "must succeed on every rank", None, text)
            took = f"it ended after {int(words[REACHED])} of {self._count}"
            if words[ENDED]:
                raise PeerError(name, "must take as many batches as this rank", None, took)
            if not self._table.memory.is_alive(peer) and self._reached[peer] < self._count:
                raise PeerError(name, "must live as long as the others sample", None, f"{took}: it died")
            if waited_s > self._timeout_s:
                raise PeerError(
                    name,
                    f"must have its batch in gear.timeout_s = {self._timeout_s} s",
                    f"{int(words[REACHED])} of {self._count} batches",
                    "look what it does; if it evaluates or saves for so long, raise gear.timeout_s",
                )

    def restart(self) -> None:
        """Begin again, as when a checkpoint is loaded: between two barriers of all ranks."""
        self._count = self._verified = 0
        self._mine[[REACHED, FAILED]] = 0

    def publish_digest(self, digest: int) -> None:
        """Give the digest of this rank's global batch; the next `wait` makes it readable to all."""
        with self._table.lock:  # so that who sees the next count sees the digest
            self._mine[DIGESTS + self._verified % 2] = digest

    def compare_digests(self) -> None:
        """Compare the digests inside each replica, behind a `wait`.

        Raises:
            PeerError: A rank has other samples than its replica; on every rank.
        """
        with self._table.lock:
            digests: list[int] = self._words[:, DIGESTS + self._verified % 2].tolist()
        self._verified += 1
        for replica in range(self._places[0].data_world):
            peers = [p for p, place in enumerate(self._places) if place.data_rank == replica and place.reads]
            if not peers:  # on another node
                continue
            usual = Counter(digests[peer] for peer in peers).most_common(1)[0][0]
            for peer in peers:
                if digests[peer] != usual:
                    raise PeerError(
                        f"rank {self._ranks[peer]}",
                        f"must have the samples of its replica ({replica})",
                        f"digest {digests[peer] % (1 << 64):016x}, the others {usual % (1 << 64):016x}",
                        "something changes ids or anchors of its batches",
                    )

"""Who is still there: ranks that died, stand still or cannot be reached, found while others wait for them.

Each rank counts up a word in its node's shared memory; the leader of each node looks at its ranks' words and
at their locks, and says through torch.distributed's own rendezvous store how its node does. Whatever a rank
waits for then asks `check`, which raises. A rank whose main thread stays inside one foreign call, such as the
all-reduce of a training step that cannot end any more, is ended with the error in its log: there is no other
way to leave such a call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

from deepspeed_gear.errors import LostNodeError, NotReadyError, PeerError
from deepspeed_gear.parallel.topology import Topology
from deepspeed_gear.store.layout import Region
from deepspeed_gear.store.memory import SharedMemory

LOG = logging.getLogger("deepspeed_gear")
BEAT, ENDED = 0, 1  # words of a rank
WORDS, TEXT_BYTES = 8, 2048
MOST_BEAT_S = 1.0
HEARD_BEATS = 3  # by then every node has told what it knows, and heard it from the others
STUCK_S = 5.0  # a main thread that does not move for so long, when a rank is lost, will not move any more
EXIT_STATUS = 114
_SAID = 300  # characters of an error that others hear
_FOR_EVER = float("inf")  # when a node that has ended was heard last
SOME_NODE = "another node"  # name of a failure of which nothing else is known


class Watch:
    """Watches the ranks of all nodes, in threads of its own. `check` is for any thread.

    Args:
        memory: A store of this node, whose locks tell who is attached.
        views: Its regions.
        topology: Where the ranks sit.
        store: A connection of its own to the rendezvous store, on the leaders of nodes; None elsewhere.
        name: Of this run in the store.
        timeout_s: How long a rank or a node may be silent.
    """

    def __init__(
        self,
        memory: SharedMemory,
        views: dict[str, np.ndarray],
        topology: Topology,
        store: Any,
        name: str,
        timeout_s: float,
    ) -> None:
        self._memory, self._topology, self._store, self._name = memory, topology, store, name
        self._words: np.ndarray = views["watch/words"]
        self._text: np.ndarray = views["watch/text"]
        self._timeout_s, self._beat_s = timeout_s, min(MOST_BEAT_S, timeout_s / 8)
        self._ranks, self._peer = topology.peers, memory.peer
        self._failure: LostNodeError | None = None
        self._stop = threading.Event()
        self._heard = time.monotonic()  # when the store last answered
        self._nodes: dict[int, tuple[int, float]] = {}  # latest beat of each other node, and when it was new
        self._problem = ""
        self._main = threading.main_thread()
        self._threads: list[threading.Thread] = []
        self._hook: Any = None
        self._leaves = False  # this rank ends by itself

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        """Return what it keeps in the store."""
        return [
            Region("watch/words", "int64", (num_peers, WORDS)),
            Region("watch/text", "uint8", (TEXT_BYTES,)),
        ]

    def prepare(self) -> None:
        """Say for the first time that this rank and this node are there."""
        self._beat()
        if self._store is not None:
            self._tell(0, ended=False)

    def start(self) -> None:
        """Begin to watch; all ranks have prepared."""
        self._hook, sys.excepthook = sys.excepthook, self._explain
        targets = [self._watch] + ([self._talk] if self._store is not None else [])
        for target in targets:
            thread = threading.Thread(target=target, name="gear-watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def check(self) -> None:
        """Raise if a rank or a node is lost.

        Raises:
            LostNodeError: One is; every later call raises it too.
        """
        if self._failure is None and self._text[0]:
            self._take_up(self._told())
        if self._failure is not None:
            raise self._failure

    def check_ended(self) -> None:
        """Raise if a rank that has ended was lost: what it says of that may be heard a moment later.

        Raises:
            LostNodeError: It was.
        """
        until = time.monotonic() + HEARD_BEATS * self._beat_s
        while time.monotonic() < until and not self._stop.is_set():
            self.check()
            time.sleep(self._beat_s / 8)
        self.check()

    def part(self) -> None:
        """Let this rank end by itself, however long that takes: what it waits for has an end."""
        self._leaves = True

    def end(self) -> None:
        """Say that this rank leaves, and watch no longer."""
        if self._stop.is_set():
            return
        if self._hook is not None and sys.excepthook == self._explain:
            sys.excepthook = self._hook
        self._words[self._peer, ENDED] = 1
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self._beat_s)  # its store may be gone with another rank
        if self._problem and self._store is not None and self._topology.rank == 0:
            time.sleep(2 * self._beat_s)  # the store may be this process's own, and go with it unread

    # ---- threads ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        stuck_since, place = time.monotonic(), None
        while not self._stop.wait(self._beat_s):
            self._beat()
            if self._failure is None:
                found = self._told() or self._lost_here() or self._lost_nodes()
                if found:
                    self._take_up(found)
                stuck_since, place = time.monotonic(), None
                continue
            now = self._place_of_main()
            if now != place:
                stuck_since, place = time.monotonic(), now
            elif not self._leaves and time.monotonic() - stuck_since > STUCK_S:
                self._leave()

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Name the rank that is lost behind an error that ends this one, such as a broken all-reduce.

        If none is, this one is the first: the others hear of its error.
        """
        if self._stop.is_set():
            return
        until = time.monotonic() + (self._timeout_s + 2 * self._beat_s if _is_of_transport(error) else 0)
        while self._failure is None and time.monotonic() < until:
            time.sleep(self._beat_s / 4)
        self._leaves = True
        if self._failure is not None:
            if not isinstance(error, LostNodeError):
                self._log(f"{self._failure}; that is why this rank has failed")
        elif isinstance(error, Exception) and not isinstance(error, (PeerError, NotReadyError)):
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self._problem = (
                f"rank {self._topology.rank} ({self._node}), which has failed with {said[:_SAID]},"
            )
            self._say(self._problem)

    def note(self, failure: LostNodeError) -> bool:
        """Take up what an exchange has found, unless more is known in a moment: which rank it was.

        Returns:
            False if nothing is lost: the node has ended, and whoever does not need it may go on.
        """
        patience = 2 * self._beat_s + (self._timeout_s if failure.name == SOME_NODE else 0)
        until = time.monotonic() + patience
        while self._failure is None and time.monotonic() < until and not self._stop.is_set():
            time.sleep(self._beat_s / 8)
        if self._failure is None and self._has_ended(failure.name):
            return False
        if self._failure is None:
            self._problem = f"{failure.name}, which does not answer,"
            self._say(self._problem)
            self._failure = failure
        return True

    def _has_ended(self, name: str) -> bool:
        """Whether a node has said that it ends; of one that is not known, whether any has."""
        ended = [node for node, (_, since) in list(self._nodes.items()) if since == _FOR_EVER]
        return bool(ended) if name == SOME_NODE else name in map(self._topology.describe, ended)

    def _log(self, text: str) -> None:
        line = f"gear: error on rank {self._topology.rank}: {text}"
        with contextlib.suppress(Exception):
            print(line, file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """End the process: its main thread waits for a rank that is lost."""
        self._log(f"{self._failure}; this rank waits for it, and is ended")
        time.sleep(2 * self._beat_s)  # so that other nodes hear of it
        os._exit(EXIT_STATUS)

    def _place_of_main(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._main.ident or 0)
        return None if frame is None else (id(frame), frame.f_lasti)

    def _talk(self) -> None:
        """Tell other nodes how this one does, and hear of them."""
        beat = 0
        others = [node for node in range(self._topology.num_nodes) if node != self._topology.node]
        try:
            while not self._stop.wait(self._beat_s):
                beat += 1
                self._tell(beat, ended=False)
                for node, text in zip(others, self._store.multi_get(self._keys(others)), strict=True):
                    self._hear(node, json.loads(text))
                self._heard = time.monotonic()
            self._tell(beat + 1, ended=True)
        except Exception as error:
            if not self._stop.is_set():
                LOG.warning("gear: the rendezvous store does not answer: %s", str(error).splitlines()[0])

    def _keys(self, nodes: list[int]) -> list[str]:
        return [f"gear/{self._name}/{node}" for node in nodes]

    def _tell(self, beat: int, ended: bool) -> None:
        words = {"beat": beat, "ended": ended, "problem": self._problem}
        self._store.set(self._keys([self._topology.node])[0], json.dumps(words))

    def _hear(self, node: int, said: dict[str, Any]) -> None:
        now = time.monotonic()
        beat, _ = self._nodes.get(node, (-1, now))
        if said["ended"]:
            self._nodes[node] = beat, _FOR_EVER
        elif said["beat"] != beat:
            self._nodes[node] = int(said["beat"]), now
        if said["problem"] and not self._problem:
            self._problem = str(said["problem"])

    def _take_up(self, found: str) -> None:
        """Tell all what is wrong, and raise it from now on."""
        self._problem = self._problem or found
        self._say(found)
        self._failure = LostNodeError(found, "must live and answer as long as the others train")

    # ---- findings --------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._words[self._peer, BEAT] = time.monotonic_ns()

    def _lost_here(self) -> str:
        """Return what is wrong with a rank of this node, or nothing."""
        now = time.monotonic_ns()
        for peer, rank in enumerate(self._ranks):
            if peer == self._peer or self._words[peer, ENDED]:
                continue
            if not self._memory.is_alive(peer):
                if not self._words[peer, ENDED]:  # it may have ended meanwhile
                    return f"rank {rank} ({self._node}), which has died,"
            elif now - self._words[peer, BEAT] > self._timeout_s * 1e9:
                silent = (now - int(self._words[peer, BEAT])) / 1e9
                return f"rank {rank} ({self._node}), which has stood still for {silent:.0f} s,"
        return ""

    @property
    def _node(self) -> str:
        return self._topology.describe(self._topology.node)

    def _lost_nodes(self) -> str:
        """Return what is wrong with another node, or nothing."""
        if self._store is None:
            return ""
        now = time.monotonic()
        if self._problem:
            return self._problem
        if now - self._heard > self._timeout_s:
            return f"the other nodes, which {self._node} cannot reach for {now - self._heard:.0f} s,"
        for node, (_, since) in list(self._nodes.items()):
            if now - since > self._timeout_s:
                name = self._topology.describe(node)
                return f"{name}, which has not been heard of for {now - since:.0f} s,"
        return ""

    def _say(self, text: str) -> None:
        """Tell the ranks of this node."""
        encoded = np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)
        if not self._text.any():
            self._text[1 : len(encoded)] = encoded[1:]
            self._text[0] = encoded[0]  # last: who sees it sees all

    def _told(self) -> str:
        """Return what another rank of this node has found."""
        return bytes(self._text).rstrip(b"\0").decode(errors="replace")


def _is_of_transport(error: BaseException) -> bool:
    """Whether an error is one of a collective that another rank has left."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))

"""The failure detector: ranks that died, stand still or cannot be reached, found while others wait.

Each rank counts up a word in its node's shared memory; the leader of each node looks at its ranks' words and
at their locks, and says through torch.distributed's own rendezvous store how its node does. Whatever a rank
waits for then asks `check`, which raises. A rank whose main thread stays inside one foreign call, such as the
all-reduce of a training step that cannot end any more, is ended with the error in its log: there is no other
way to leave such a call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Final

import numpy as np

from deepspeed_gear.distributed.heartbeats import SOME_NODE, Heartbeats
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import GearError, LostNodeError, NotReadyError, PeerError
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.shared_memory import SharedMemory

MOST_BEAT_S = 1.0
HEARD_BEATS = 3  # by then every node has told what it knows, and heard it from the others
STUCK_S = 5.0  # a main thread that does not move for so long, when a rank is lost, will not move any more
EXIT_STATUS = 114
_SAID = 300  # characters of an error that others hear


class RankWord:
    """Words of a rank in its node's shared memory."""

    HEARTBEAT: Final = 0
    ENDED: Final = 1
    BATCHES: Final = 2  # batch barriers that it has reached, plus 1
    NUM_WORDS: Final = 8
    NUM_TEXT_BYTES: Final = 2048


class FailureDetector:
    """Watches the ranks of all nodes, in threads of its own. `check` is for any thread.

    Args:
        memory: A store of this node, whose locks show which processes are attached.
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
        self._memory, self._topology = memory, topology
        self._words: np.ndarray = views["watch/words"]
        self._texts: np.ndarray = views["watch/texts"]
        self._timeout_s, self._beat_s = timeout_s, min(MOST_BEAT_S, timeout_s / 8)
        self._ranks, self._peer = topology.peers, memory.peer
        self._news: Heartbeats | None = None
        if store is not None:
            self._news = Heartbeats(topology, store, name, timeout_s, self._beat_s, self._look)
        self._failure: LostNodeError | None = None
        self._patience_s = STUCK_S
        self._stop, self._saying = threading.Event(), threading.Lock()
        self._main = threading.main_thread()
        self._threads: list[threading.Thread] = []
        self._hook: Any = None
        self._leaves = False  # this rank ends by itself

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        """Return what it keeps in the store."""
        return [
            Region("watch/words", "int64", (num_peers, RankWord.NUM_WORDS)),
            Region("watch/texts", "uint8", (num_peers, RankWord.NUM_TEXT_BYTES)),
        ]

    def prepare(self) -> None:
        """Say for the first time that this rank and this node are there."""
        self._beat()
        if self._news is not None:
            self._news.send()

    def start(self) -> None:
        """Begin to watch; all ranks have prepared."""
        self._hook, sys.excepthook = sys.excepthook, self._explain
        targets = [self._watch]
        if self._news is not None:
            targets.append(lambda news=self._news: news.run(self._stop))  # type: ignore[misc]
        for target in targets:
            thread = threading.Thread(target=target, name="gear-watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def take(self, num_turns: int) -> None:
        """Say how many turns this rank has taken; one that takes none never says so.

        If a rank ends after fewer than others have taken, these may wait for it in a collective.
        """
        self._words[self._peer, RankWord.BATCHES] = num_turns + 1

    def check(self) -> None:
        """Raise if a rank or a node is lost.

        Raises:
            LostNodeError: One is; every later call raises it too.
        """
        if self._failure is None:
            found = self._told() or (self._news.problem if self._news is not None else "")
            if found:
                self._take_up(found)
        if self._failure is not None:
            if threading.current_thread() is self._main:
                self._patience_s = max(STUCK_S, self._timeout_s)  # it knows, and may save what it has
            raise self._failure

    def check_ended(self) -> None:
        """Raise if a rank that has ended was lost: what it says of that may be heard a moment later.

        Raises:
            LostNodeError: It was.
        """
        until = time.monotonic() + HEARD_BEATS * self._beat_s
        while time.monotonic() < until and not self._leaves and not self._stop.is_set():
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
        self._words[self._peer, RankWord.ENDED] = 1
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self._beat_s)  # its store may be gone with another rank
        if self._news is not None and not any(thread.is_alive() for thread in self._threads):
            self._news.linger()

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
            elif not self._leaves and time.monotonic() - stuck_since > self._patience_s:
                self._leave()

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Name the rank that is lost after an error that ends this one, such as a broken all-reduce.

        If none is, this one is the first: the others hear of its error.
        """
        if self._stop.is_set() or self._leaves:
            return
        until = time.monotonic()
        if _is_of_transport(error):
            until += self._timeout_s + HEARD_BEATS * self._beat_s
        while not self._is_known() and time.monotonic() < until:
            time.sleep(self._beat_s / 4)
        self._leaves = True
        if self._is_known():
            if not isinstance(error, LostNodeError):
                self._log(f"{self._failure}; that is why this rank has failed")
        elif isinstance(error, Exception) and not isinstance(error, (PeerError, NotReadyError)):
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self._say(f"rank {self._topology.rank} ({self._node}), which has failed with {said[:_SAID]},")

    def note(self, failure: LostNodeError) -> bool:
        """Take up what an exchange has found, unless more is known in a moment: which rank it was.

        Returns:
            False if nothing is lost: the node has ended, and a rank that does not need it may go on.
        """
        patience = HEARD_BEATS * self._beat_s + (self._timeout_s if failure.name == SOME_NODE else 0)
        until = time.monotonic() + patience
        while not self._is_known() and time.monotonic() < until and not self._stop.is_set():
            time.sleep(self._beat_s / 8)
        if self._is_known():
            return True
        if self._news is not None and self._news.has_ended(failure.name):
            return False
        self._say(f"{failure.name}, which does not answer,")
        self._failure = failure
        return True

    def _is_known(self) -> bool:
        """Whether somebody is known to be lost."""
        with contextlib.suppress(LostNodeError):
            self.check()
        return self._failure is not None

    def _log(self, text: str) -> None:
        line = f"gear: error on rank {self._topology.rank}: {text}"
        with contextlib.suppress(Exception):
            print(line, file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """End the process: its main thread waits for a rank that is lost."""
        place = self._place_of_main()
        time.sleep(2 * self._beat_s)  # so that other nodes hear of it
        if not self._leaves and self._place_of_main() == place:
            self._log(f"{self._failure}; this rank waits for it, and is ended")
            os._exit(EXIT_STATUS)

    def _place_of_main(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._main.ident or 0)
        return None if frame is None else (id(frame), frame.f_lasti)

    def _take_up(self, found: str) -> None:
        """Tell all what is wrong, and raise it from now on."""
        self._say(found)
        self._failure = LostNodeError(found, "must live and answer as long as the others train")

    # ---- findings --------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._words[self._peer, RankWord.HEARTBEAT] = time.monotonic_ns()

    def _lost_here(self) -> str:
        """Return what is wrong with a rank of this node, or nothing."""
        now = time.monotonic_ns()
        for peer, rank in enumerate(self._ranks):
            if peer == self._peer:
                continue
            if self._words[peer, RankWord.ENDED]:
                taken, most = (
                    int(self._words[peer, RankWord.BATCHES]),
                    int(self._words[:, RankWord.BATCHES].max()),
                )
                if 0 < taken < most:
                    had = f"{taken - 1} turns of {most - 1}"
                    return f"rank {rank} ({self._node}), which has ended after {had},"
                continue
            if not self._memory.is_alive(peer):
                if not self._words[peer, RankWord.ENDED]:  # it may have ended meanwhile
                    return f"rank {rank} ({self._node}), which has died,"
            elif now - self._words[peer, RankWord.HEARTBEAT] > self._timeout_s * 1e9:
                silent = (now - int(self._words[peer, RankWord.HEARTBEAT])) / 1e9
                return f"rank {rank} ({self._node}), which has stood still for {silent:.0f} s,"
        return ""

    @property
    def _node(self) -> str:
        return self._topology.describe(self._topology.node)

    def _look(self) -> tuple[tuple[int, int] | None, str]:
        """Return what other nodes must know: see `Heartbeats`."""
        words = self._words[:, [RankWord.ENDED, RankWord.BATCHES]].tolist()
        ended = [
            (taken - 1, rank)
            for rank, (has_ended, taken) in zip(self._ranks, words, strict=True)
            if has_ended and taken  # one that takes none is not missed
        ]
        first = min(ended)[::-1] if ended else None
        return first, self._told()  # after the turns: a rank that fails reports it before it ends

    def _lost_nodes(self) -> str:
        """Return what is wrong with another node, or nothing."""
        return "" if self._news is None else self._news.lost(int(self._words[:, RankWord.BATCHES].max()) - 1)

    def _say(self, text: str) -> None:
        """Tell the ranks of this node, and where this one leads it the other nodes."""
        with self._saying:
            if self._news is not None:
                self._news.report(text)
            encoded, row = (
                np.frombuffer(text.encode()[: RankWord.NUM_TEXT_BYTES], np.uint8),
                self._texts[self._peer],
            )
            if not row[0]:
                row[1 : len(encoded)] = encoded[1:]
                row[0] = encoded[0]  # last: a reader of it sees all

    def _told(self) -> str:
        """Return what a rank of this node has found."""
        said = np.flatnonzero(self._texts[:, 0])
        return bytes(self._texts[said[0]]).rstrip(b"\0").decode(errors="replace") if len(said) else ""


def _is_of_transport(error: BaseException | None) -> bool:
    """Whether an error is one of a collective that another rank has left."""
    if isinstance(error, GearError) and not isinstance(error, LostNodeError):
        error = error.__cause__
    if not isinstance(error, RuntimeError) or isinstance(error, GearError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))

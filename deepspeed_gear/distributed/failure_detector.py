"""Failure detector: finds ranks and nodes that died, stand still or cannot be reached (heartbeats).

Each rank updates a heartbeat word in shared memory; ranks of a node check each other's words and
locks, and leaders publish heartbeats through torch.distributed's rendezvous store. Every wait
calls `check`. A rank whose main thread stays in one foreign call (an all-reduce that cannot end) is
ended with the error in its log: there is no other way to leave such a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Final

import numpy as np

from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import GearError, LostNodeError, NotReadyError, PeerError
from deepspeed_gear.log import LOG
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.timeouts import wait_until

MOST_BEAT_S = 1.0
SPREAD_BEATS = 3  # heartbeats after which a problem of one node has been read by all nodes
SOME_NODE = "another node"  # name in the error of a failure whose node is not known
BROKEN_S = 5.0  # longest silence of a node where a connection has broken, which must have a cause
# A main thread that does not move for so long, when a rank is lost, will not move any more.
STUCK_S = 5.0
EXIT_STATUS = 114
_FIRST = 0  # the node of rank 0, which has the rendezvous store
_MOST_ERROR_CHARS = 300  # of an error that is reported to other ranks


class RankWord:
    """Words of a rank in its node's shared memory."""

    HEARTBEAT: Final = 0
    ENDED: Final = 1
    BATCHES: Final = 2  # batch barriers that it has passed, plus 1
    BROKEN: Final = 3  # whether one of its connections to another rank has broken
    NUM_WORDS: Final = 8
    NUM_TEXT_BYTES: Final = 2048


class FailureDetector:
    """Detects lost ranks and nodes, in threads of its own; `check` is for any thread. Locks of
    `memory` show which processes are attached; node leaders have their own connection to the
    rendezvous `store`. It is made with the first heartbeat of its rank and node.
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
        self._memory = memory
        self._topology = topology
        self._words: np.ndarray = views["watch/words"]
        self._texts: np.ndarray = views["watch/texts"]
        self._timeout_s = timeout_s
        self._beat_s = min(MOST_BEAT_S, timeout_s / 8)
        self._ranks = topology.peers
        self._peer = memory.peer
        self._problem = ""  # the first one of any rank that has reached this rank
        self._failure: LostNodeError | None = None
        self._patience_s = STUCK_S
        self._stop = threading.Event()
        self._report_lock = threading.Lock()
        self._main = threading.main_thread()
        self._threads: list[threading.Thread] = []
        self._hook: Any = None
        self._ends_itself = False  # this rank ends by itself, and is not to be ended
        # On node leaders: the heartbeats of this node and of the others.
        self._store = store
        self._keys = f"gear/{name}"
        self._others = [node for node in range(topology.num_nodes) if node != topology.node]
        self._num_beats = 0
        self._answered = time.monotonic()  # when the store last answered
        # Number and time of each node's latest heartbeat.
        self._beats: dict[int, tuple[int, float]] = {}
        self._ended: set[int] = set()  # nodes that have published their end
        self._ended_first: dict[int, tuple[int, int]] = {}  # of each node, as in its heartbeat
        self._is_disconnected = False  # reads no more heartbeats
        self._words[self._peer, RankWord.HEARTBEAT] = time.monotonic_ns()
        if self._store is not None:
            self._send()

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        return [
            Region("watch/words", "int64", (num_peers, RankWord.NUM_WORDS)),
            Region("watch/texts", "uint8", (num_peers, RankWord.NUM_TEXT_BYTES)),
        ]

    def start(self) -> None:
        """Start the threads that watch for failures, after all ranks have a detector."""
        self._hook, sys.excepthook = sys.excepthook, self._explain
        targets = [self._watch] if self._store is None else [self._watch, self._send_heartbeats]
        self._threads = [
            threading.Thread(target=one, name="gear-watch", daemon=True) for one in targets
        ]
        for thread in self._threads:
            thread.start()

    def take(self, num_barriers: int) -> None:
        """Publish how many batch barriers this rank has passed, unless it takes no part: if it ends
        after fewer than others have passed, these may wait for it in a collective.
        """
        self._words[self._peer, RankWord.BATCHES] = num_barriers + 1

    def check(self) -> None:
        """Raise LostNodeError if a rank or a node is lost, in every later call too."""
        if self._failure is None and self._known_problem():
            self._set_failure(self._problem)
        if self._failure is not None:
            if threading.current_thread() is self._main:
                # It gets the error, and may save its state.
                self._patience_s = max(STUCK_S, self._timeout_s)
            raise self._failure

    def check_ended(self) -> None:
        """Raise LostNodeError if an ended rank was lost; waits until its report must
        have arrived.
        """
        beat_s = self._beat_s
        wait_until(
            lambda: self._ends_itself or self._stop.is_set(),
            SPREAD_BEATS * beat_s,
            beat_s / 8,
            self.check,
        )
        self.check()

    def note_broken(self) -> None:
        """Record that a connection of this rank broke: a node that is silent for `BROKEN_S` is lost
        then. It may have lost the rank that sends its heartbeats.
        """
        self._words[self._peer, RankWord.BROKEN] = 1

    def part(self) -> None:
        """Do not end this rank any more, however long its end takes: its waits have a limit."""
        self._ends_itself = True

    def end(self) -> None:
        """Mark this rank as ended, and stop the threads."""
        if self._stop.is_set():
            return
        if self._hook is not None and sys.excepthook == self._explain:
            sys.excepthook = self._hook
        self._words[self._peer, RankWord.ENDED] = 1
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self._beat_s)  # its store may have ended with another rank
        if self._topology.rank != 0 or self._store is None or self._is_disconnected:
            return
        if any(thread.is_alive() for thread in self._threads):
            return
        # rank 0's store ends with it: the other nodes have two intervals to read how this one ended
        try:
            others = set(self._others)
            wait_until(
                lambda: others <= self._ended, 2 * self._beat_s, self._beat_s / 8, self._receive
            )
        except Exception as error:
            LOG.debug("gear: the rendezvous store has ended: %s", error)

    def explain(self, error: BaseException) -> None:
        """Log the lost rank after an error that ends this one; if none is lost, report
        this error.
        """
        if self._stop.is_set() or self._ends_itself:
            return
        patience = 0.0
        if _is_of_transport(error):
            self.note_broken()
            patience = self._timeout_s + SPREAD_BEATS * self._beat_s
        wait_until(self._has_failure, patience, self._beat_s / 4)
        self._ends_itself = True
        if self._has_failure():
            if not isinstance(error, LostNodeError):
                self._log(f"{self._failure}; that is why this rank has failed")
        elif isinstance(error, Exception) and not isinstance(error, (PeerError, NotReadyError)):
            text = f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_ERROR_CHARS]
            self._report(f"{self._describe(self._topology.rank)}, which has failed with {text},")

    def note(self, failure: LostNodeError) -> bool:
        """Record a round's failure unless a more exact one comes first; False: none, a node has
        ended.
        """
        is_some = failure.name == SOME_NODE
        self.note_broken()
        patience = SPREAD_BEATS * self._beat_s + (self._timeout_s if is_some else 0)
        wait_until(lambda: self._has_failure() or self._stop.is_set(), patience, self._beat_s / 8)
        if self._has_failure():
            return True
        if any(
            is_some or failure.name == self._topology.describe(node) for node in list(self._ended)
        ):
            self._words[self._peer, RankWord.BROKEN] = 0
            return False
        self._report(f"{failure.name}, which does not answer,")
        self._failure = failure
        return True

    def _watch(self) -> None:
        """Publish heartbeats, and look for lost ranks; end this rank if it stands still after a
        loss.
        """
        stuck_since = time.monotonic()
        place = None
        while not self._stop.wait(self._beat_s):
            self._words[self._peer, RankWord.HEARTBEAT] = time.monotonic_ns()
            if self._failure is None:
                if problem := self._known_problem() or self._lost_rank() or self._lost_node():
                    self._set_failure(problem)
                stuck_since = time.monotonic()
                place = None
                continue
            now = self._place_of_main()
            if now != place:
                stuck_since = time.monotonic()
                place = now
            elif not self._ends_itself and time.monotonic() - stuck_since > self._patience_s:
                time.sleep(2 * self._beat_s)  # so that the other nodes read the report
                if not self._ends_itself and self._place_of_main() == place:
                    self._log(f"{self._failure}; this rank waits for it, and is ended")
                    os._exit(EXIT_STATUS)

    def _place_of_main(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._main.ident or 0)
        return None if frame is None else (id(frame), frame.f_lasti)

    def _send_heartbeats(self) -> None:
        """Publish and read heartbeats until this node ends, and publish its end.

        After the end of rank 0's node it ends too: no barriers follow, and the store may end at any
        time.
        """
        try:
            while _FIRST not in self._ended and not self._stop.wait(self._beat_s):
                self._send()
                self._receive()
                self._answered = time.monotonic()
            self._is_disconnected = _FIRST in self._ended
            self._send(ended=True)
        except Exception as error:
            self._is_disconnected = True
            if not self._stop.is_set() and _FIRST not in self._ended:
                LOG.warning(
                    "gear: the rendezvous store does not answer: %s", str(error).splitlines()[0]
                )

    def _send(self, ended: bool = False) -> None:
        """Publish the heartbeat: count, end, problem, and which ended rank passed the fewest
        barriers.
        """
        words = self._words[:, [RankWord.ENDED, RankWord.BATCHES]].tolist()
        ranks = zip(self._ranks, words, strict=True)
        # No rank waits for one that takes no part in barriers.
        ended_ranks = [
            (passed - 1, rank) for rank, (has_ended, passed) in ranks if has_ended and passed
        ]
        first = min(ended_ranks)[::-1] if ended_ranks else None
        problem = self._known_problem()  # read last: a rank that fails reports it before it ends
        message = {"beat": self._num_beats, "ended": ended, "problem": problem, "left_first": first}
        self._store.set(f"{self._keys}/{self._topology.node}", json.dumps(message))
        self._num_beats += 1

    def _receive(self) -> None:
        texts = self._store.multi_get([f"{self._keys}/{node}" for node in self._others])
        for node, text in zip(self._others, texts, strict=True):
            message = json.loads(text)
            now = time.monotonic()
            beat, _ = self._beats.get(node, (-1, now))
            if message["left_first"] is not None:
                rank, passed = message["left_first"]
                self._ended_first[node] = int(rank), int(passed)
            self._problem = self._problem or str(message["problem"])
            if message["ended"]:  # last: a thread that reads it also reads the problem
                self._ended.add(node)
            elif message["beat"] != beat:
                self._beats[node] = int(message["beat"]), now

    def _lost_rank(self) -> str:
        """Describe a rank of this node that is lost; "" if there is none."""
        for peer, rank in enumerate(self._ranks):
            if peer == self._peer:
                continue
            if self._words[peer, RankWord.ENDED]:
                passed = int(self._words[peer, RankWord.BATCHES])
                most = int(self._words[:, RankWord.BATCHES].max())
                if 0 < passed < most:
                    return f"{self._describe(rank)}, {_ended_early(passed - 1, most - 1)}"
                continue
            silent_s = (time.monotonic_ns() - int(self._words[peer, RankWord.HEARTBEAT])) / 1e9
            if not self._memory.is_alive(peer):
                if not self._words[peer, RankWord.ENDED]:  # it may have ended meanwhile
                    return f"{self._describe(rank)}, which has died,"
            elif silent_s > self._timeout_s:
                return f"{self._describe(rank)}, which has stood still for {silent_s:.0f} s,"
        return ""

    def _lost_node(self) -> str:
        """Describe a rank or node that is lost on another node; "" if there is none."""
        if self._store is None:
            return ""
        now = time.monotonic()
        num_barriers = int(self._words[:, RankWord.BATCHES].max()) - 1
        for node, (rank, passed) in list(self._ended_first.items()):
            if passed < num_barriers:
                return f"{self._describe(rank, node)}, {_ended_early(passed, num_barriers)}"
        if self._is_disconnected and _FIRST in self._ended:
            return ""
        is_broken = bool(self._words[:, RankWord.BROKEN].any())
        longest = min(self._timeout_s, BROKEN_S) if is_broken else self._timeout_s
        silent = now - self._answered
        if silent > longest:
            first, here = (self._topology.describe(node) for node in (_FIRST, self._topology.node))
            what = "the rendezvous store, which"
            if self._topology.node != _FIRST:
                what = f"{first}, whose rendezvous store"
            return f"{what} {here} cannot reach for {silent:.0f} s,"
        beats = [
            (since, node)
            for node, (_, since) in list(self._beats.items())
            if node not in self._ended
        ]
        if beats:
            since, node = min(beats)  # others may have ended because of it
            if now - since > longest:
                return (
                    f"{self._topology.describe(node)}, whose last heartbeat is "
                    f"{now - since:.0f} s old,"
                )
        return ""

    def _describe(self, rank: int, node: int | None = None) -> str:
        return (
            f"rank {rank} "
            f"({self._topology.describe(self._topology.node if node is None else node)})"
        )

    def _known_problem(self) -> str:
        """Return the first problem that a rank has reported; "" if there is none."""
        if not self._problem and self._texts[:, 0].any():
            row = self._texts[np.flatnonzero(self._texts[:, 0])[0]]
            self._problem = bytes(row).rstrip(b"\0").decode(errors="replace")
        return self._problem

    def _report(self, text: str) -> None:
        """Publish a problem to the ranks of this node and, on a node leader, to the other nodes."""
        with self._report_lock:
            self._problem = self._problem or text
            encoded = np.frombuffer(text.encode()[: RankWord.NUM_TEXT_BYTES], np.uint8)
            row = self._texts[self._peer]
            if not row[0]:
                row[1 : len(encoded)] = encoded[1:]
                row[0] = encoded[0]  # last: a reader that sees it sees the whole text

    def _set_failure(self, problem: str) -> None:
        self._report(problem)
        self._failure = LostNodeError(
            problem,
            "must run and answer while the others train",
            remedy="start all ranks again, from the last checkpoint",
        )

    def _has_failure(self) -> bool:
        with contextlib.suppress(LostNodeError):
            self.check()
        return self._failure is not None

    def _explain(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._hook(kind, error, trace)
        self.explain(error)

    def _log(self, text: str) -> None:
        with contextlib.suppress(Exception):
            print(f"gear: error on rank {self._topology.rank}: {text}", file=sys.stderr, flush=True)


def _ended_early(passed: int, most: int) -> str:
    return f"which has ended after {passed} of {most} batch barriers,"


def _is_of_transport(error: BaseException | None) -> bool:
    """Return whether an error comes from a collective that another rank has left."""
    if isinstance(error, GearError) and not isinstance(error, LostNodeError):
        error = error.__cause__
    if not isinstance(error, RuntimeError) or isinstance(error, GearError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))

"""Tensors between nodes: one rank of each node sends and receives for it. Transport: torch.distributed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import lane
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.heartbeats import SOME_NODE
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import LostNodeError, PeerError, StoreError

GRACE_S = 5.0  # beyond our own wait, so that gloo's wait ends after it
FIRST_ROOM = 1024  # words that a message has room for before any has come
MUST_TAKE_ALL = "must take as many batches as this rank"  # the rule of ranks and nodes that end early
_LEAST_WAIT_S = 1e-3
NO_WORDS = np.empty(0, np.int64)
_tags: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # links of a group, each with a tag


class _Failed(NamedTuple):
    """A receive that could not begin: its node may have said all that it had to say."""

    error: RuntimeError

    def wait(self, timeout: timedelta) -> NoReturn:
        raise self.error


class NodeChannel:
    """Exchanges between the nodes that hold a table. One thread at a time; all nodes call in one order.

    A wait that fails leaves messages that must not be taken for others: the channel is broken for good.

    Args:
        topology: Where the ranks sit.
        order: Nodes that take part.
        purpose: Exchanges of different purposes have groups of their own and never wait for each other.
        timeout_s: Longest wait for another node, in seconds.
        group: Whose ranks the topology counts; None for all.
        detector: Finds lost ranks and nodes; None: what the transport says is all that is known.
    """

    def __init__(
        self,
        topology: Topology,
        order: Sequence[int],
        purpose: str,
        timeout_s: float,
        group: Any = None,
        detector: FailureDetector | None = None,
    ) -> None:
        self._topology, self.timeout_s = topology, timeout_s
        self.nodes = list(order)
        self.count, self.index = len(self.nodes), self.nodes.index(topology.node)
        members = [topology.ranks_of(node)[0] for node in self.nodes]
        self._ranks = members if group is None else [dist.get_global_rank(group, rank) for rank in members]
        self._purpose = purpose
        self._up: Any = None  # the group of messages to nodes after their sender
        self._down: Any = None  # that of the others
        self._tag = 0  # of this channel's messages among those of the groups
        self._others = [(self.index + i) % self.count for i in range(1, self.count)]
        self._members = np.argsort(np.argsort(self._ranks)).tolist()  # of the group, whose ranks ascend
        self._reach = [FIRST_ROOM] * self.count  # words that each node has room for
        self._spare = [np.empty(FIRST_ROOM, np.int64) for _ in self.nodes]  # what came last
        self._rooms: dict[int, tuple[np.ndarray, Any]] = {}  # for what comes next
        self._broken: LostNodeError | None = None
        self._detector = detector
        self.bytes_sent = self.bytes_received = 0
        self.num_exchanges, self.last_wait_s = 0, 0.0
        self._left = False

    def open(self) -> None:
        """Make the groups. Collective over the ranks that exchange.

        Each way has a group of its own: while a thread sends, gloo's thread that hears of a message between
        the same two ranks of the same group spins, and maybe on the core that the sender waits for.
        """
        ranks, timeout_s = tuple(sorted(self._ranks)), self.timeout_s + GRACE_S
        self._up, self._down = (lane(ranks, f"{self._purpose}, {way}", timeout_s) for way in ("up", "down"))
        self._tag = _tags[self._up] = _tags.get(self._up, 0) + 1
        for node in self._others:
            room = np.empty(FIRST_ROOM, np.int64)
            self._rooms[node] = room, self._make_room(node, room)

    def name(self, index: int) -> str:
        """Return one of the nodes as errors name it."""
        return self._topology.describe(self.nodes[index])

    def gather(self, words: np.ndarray) -> np.ndarray:
        """Return the same number of words of every node. [n], int64 -> [S, n], int64."""
        return self.begin_gather(words)()

    def begin_gather(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin `gather`; return what waits for it, to be called before the next exchange begins.

        A message may stay unanswered for any time, and does not keep a process from ending.
        """
        wait = self.begin([message_of(words)] * self.count)
        return lambda: np.stack(wait())

    def gather_ragged(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the rows of every node. [n, words], int64 -> [n_s, words] each."""
        found = self.begin([message_of(rows.reshape(-1))] * self.count)()
        return [words.copy().reshape(-1, rows.shape[1]) for words in found]

    def begin(self, messages: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
        """Begin to send each node a message; return what waits for those from each.

        A message says how long it is, so no receiver has to know. It goes into the room that its receiver has
        made before it was sent, without a word between the two; what is longer follows in a second part, and
        from then on there is as much room. What has come stays as it is until the next exchange ends.

        Args:
            messages: Words for each node, whose first one is set here; not to be changed before the exchange
                ends. What is for this node itself is given back. [1 + n_s] each, int64.
        Returns:
            What returns the words after the first one, of each node. [n_s] each.
        Raises:
            LostNodeError: A node does not answer in time, or its connection has ended.
        """
        if self._broken is not None:
            raise self._broken
        sent: list[tuple[int, Any]] = []
        for node in self._others:
            words, room = messages[node], self._reach[node]
            words[0] = len(words)
            self.bytes_sent += words.nbytes
            parts = [words] if len(words) <= room else [words[:room], words[room:]]
            self._reach[node] = _room_for(len(words), room)
            sent += [(node, self._send(node, part)) for part in parts]

        def wait() -> list[np.ndarray]:
            begin = time.monotonic()
            until = begin + self.timeout_s
            found = [messages[self.index][1:]] * self.count
            for node in self._others:
                found[node] = self._receive(node, until)
            for node, work in sent:
                self._wait(node, work, until)
            self.num_exchanges += 1
            self.last_wait_s = time.monotonic() - begin
            return found

        return wait

    def _send(self, node: int, words: np.ndarray) -> Any:
        try:
            group = self._up if node > self.index else self._down
            return group.send([torch.from_numpy(words)], self._members[node], self._tag)
        except RuntimeError as error:
            self._fail(error, node)

    def _receive(self, node: int, until: float) -> np.ndarray:
        """Wait for a message, and make room for the next one."""
        room, work = self._rooms[node]
        self._wait(node, work, until)
        size = int(room[0])
        words = _room_for(size, len(room))
        if words > len(room):
            longer = np.empty(words, np.int64)
            longer[: len(room)] = room
            self._wait(node, self._make_room(node, longer[len(room) : size]), until)
            room = longer
        other = self._spare[node]
        if len(other) < words:
            other = np.empty(words, np.int64)
        self._spare[node], self._rooms[node] = room, (other, self._make_room(node, other))
        self.bytes_received += 8 * size
        return room[1:size]

    def _make_room(self, node: int, words: np.ndarray) -> Any:
        """Receive into words; return what waits for it, and says then if the node has ended already."""
        try:
            group = self._down if node > self.index else self._up
            return group.recv([torch.from_numpy(words)], self._members[node], self._tag)
        except RuntimeError as error:
            return _Failed(error)

    def _wait(self, node: int, work: Any, until: float) -> None:
        try:
            work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST_WAIT_S)))
        except RuntimeError as error:
            self._fail(error, node)

    @property
    def ranks(self) -> list[int]:
        """Global rank that exchanges for each node."""
        return self._ranks

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Name the node that is lost where a collective of the same ranks fails."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except RuntimeError as error:
            self._fail(error)

    @contextlib.contextmanager
    def parting(self, timeout_s: float) -> Iterator[None]:
        """Wait no longer than this for nodes that may have left already, and call none of them lost."""
        kept = self.timeout_s, self._detector
        self.timeout_s = min(self.timeout_s, timeout_s)
        self.part()
        try:
            with contextlib.suppress(PeerError, StoreError):
                yield
        finally:
            self.timeout_s, self._detector = kept

    def part(self) -> None:
        """Call no node lost from now on: this one leaves, and the others need not answer any more.

        Any thread; another one may be in an exchange, which ends as it would have ended.
        """
        self._detector = None

    def note_left(self, left: bool = True) -> None:
        """Note that some node makes no further selection, so that this one need not announce it."""
        self._left = left

    @property
    def left(self) -> bool:
        """Whether some node has announced that it makes no further selection."""
        return self._left

    def count_bytes(self, sent: int, received: int) -> None:
        """Count bytes of these nodes' rows that another transport has moved."""
        self.bytes_sent += sent
        self.bytes_received += received

    def raise_ended(self, index: int, had: str) -> NoReturn:
        """Raise that a node has ended while this one still asks for batches.

        Raises:
            LostNodeError: It ended with an error, or has lost somebody.
            PeerError: It is not known to have.
        """
        if self._detector is not None:
            self._detector.check_ended()
        raise PeerError(self.name(index), MUST_TAKE_ALL, None, had)

    def abandon(self, error: Exception) -> None:
        """Break the channel: an error keeps this node from an exchange that the others wait in."""
        if self._broken is None:
            remedy = "start all ranks again"
            self._broken = LostNodeError(
                "this node", "must make the selections that it has begun", str(error), remedy
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
        detector = self._detector  # another thread may part
        if detector is not None:
            if not detector.note(self._broken):
                self._broken = LostNodeError(name, MUST_TAKE_ALL, None, "it has ended")
                self._broken.__cause__ = error
            detector.check()
        raise self._broken


def message_of(words: np.ndarray, more: np.ndarray = NO_WORDS) -> np.ndarray:
    """Return words and more words as `NodeChannel.begin` takes them. [n], [m] -> [1 + n + m], int64."""
    message = np.empty(1 + len(words) + len(more), np.int64)
    message[1 : 1 + len(words)], message[1 + len(words) :] = words, more
    return message


def _room_for(size: int, room: int) -> int:
    """Return the words that a message after one of some size has room for, as both ends know."""
    return room if size <= room else 1 << (size - 1).bit_length()

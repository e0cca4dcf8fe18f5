"""Node channel: messages and all-gathers between node leaders, which name a node that is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import purpose_group
from deepspeed_gear.distributed.failure_detector import SOME_NODE, FailureDetector
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import GearError, LostNodeError, PeerError, StoreError
from deepspeed_gear.outcome import Outcome

GRACE_S = 5.0  # beyond our own wait, so that gloo's wait ends after it
OUTCOME_WORDS = 256  # of a failure
FIRST_WORDS = 1024  # words of a receive buffer before any message has come
# The rule of ranks and nodes that end early.
MUST_TAKE_ALL = "must take as many batches as this rank"
_LEAST_WAIT_S = 1e-3
NO_WORDS = np.empty(0, np.int64)
_tags: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # links of a group, each with a tag


class NodeChannel:
    """Messages between the nodes that hold a table, in the `order` of their shards. One thread at a
    time; all nodes call in one order. Rounds of different purposes never wait for each other.

    Construction is collective over the ranks that send. A wait that fails leaves messages that
    a later round could receive: the channel stays broken. Without a detector only the transport
    reports failures.
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
        self._topology = topology
        self.timeout_s = timeout_s
        self.nodes = list(order)
        self.count = len(self.nodes)
        self.index = self.nodes.index(topology.node)
        members = [topology.ranks_of(node)[0] for node in self.nodes]
        #: Global rank of each node that sends and receives.
        self.ranks = (
            members if group is None else [dist.get_global_rank(group, rank) for rank in members]
        )
        # Messages to nodes after their sender and to those before it have groups of their own:
        # while a thread sends, gloo's thread that is notified of a message between the same two
        # ranks of the same group spins, maybe on the core that the sender needs.
        ranks = tuple(sorted(self.ranks))
        wait_s = timeout_s + GRACE_S
        self._up, self._down = (
            purpose_group(ranks, f"{purpose}, {way}", wait_s) for way in ("up", "down")
        )
        #: Of this channel's messages among those of the groups.
        self._tag = _tags[self._up] = _tags.get(self._up, 0) + 1
        self._others = [(self.index + i) % self.count for i in range(1, self.count)]
        # Of the group, whose ranks ascend.
        self._members = np.argsort(np.argsort(self.ranks)).tolist()
        # Words of the receive buffer that each node has for us.
        self._peer_words = [FIRST_WORDS] * self.count
        # The last message of each node.
        self._spare = [np.empty(FIRST_WORDS, np.int64) for _ in self.nodes]
        self._buffers: dict[int, tuple[np.ndarray, Any]] = {}  # for the next message of each node
        for node in self._others:
            buffer = np.empty(FIRST_WORDS, np.int64)
            self._buffers[node] = buffer, self._begin_receive(node, buffer)
        self._broken: LostNodeError | None = None
        self._detector = detector
        self.bytes_sent = self.bytes_received = 0
        self.num_rounds = 0
        self.last_wait_s = 0.0
        self.left = False  # whether a node has announced that it makes no further selection

    def name(self, index: int) -> str:
        return self._topology.describe(self.nodes[index])

    def all_gather(self, words: np.ndarray) -> np.ndarray:
        """Return the same number of words of every node. [n], int64 -> [S, n], int64."""
        return self.begin_all_gather(words)()

    def begin_all_gather(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin `all_gather`; return the function that waits for it.

        It must be called before the next round. A message may stay unanswered for any time, and
        does not block the end of the process.
        """
        wait = self.begin([message_of(words)] * self.count)
        return lambda: np.stack(wait())

    def all_gather_ragged(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of all nodes, and the node of each. [n, words] -> [m, words],
        [m], int64.
        """
        received = self.begin([message_of(rows.reshape(-1))] * self.count)()
        every = np.concatenate(received).reshape(-1, rows.shape[1])
        return every, np.repeat(
            np.arange(self.count), [len(words) // rows.shape[1] for words in received]
        )

    def first_failure(self, failed: np.ndarray, own: Outcome | None) -> GearError | None:
        """Return the first failed node's error, if any; then collective. `failed`, [S], is equal on
        all.
        """
        if not failed.any():
            return None
        every = self.all_gather((own or Outcome(0, "")).words(OUTCOME_WORDS))
        node = int(np.nonzero(failed)[0][0])
        return Outcome.read(every[node]).error(self.name(node))

    def begin(self, messages: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
        """Begin to send each node a message, [1 + n_s], int64; return the function that waits for
        all, [n_s] each.

        A message's first word, set here, is its length, which receivers read first. It arrives
        in a buffer posted before, without a handshake; what does not fit follows in a second part,
        and the next buffer is larger. Sent words must not change before the round ends, this
        node's own are returned to it, and received ones are valid until the next round ends. The
        wait raises LostNodeError where a node does not answer in time or its connection has ended.
        """
        if self._broken is not None:
            raise self._broken
        sent: list[tuple[int, Any]] = []
        for node in self._others:
            words = messages[node]
            size = self._peer_words[node]
            words[0] = len(words)
            self.bytes_sent += words.nbytes
            self._peer_words[node] = _next_buffer_words(len(words), size)
            group = self._up if node > self.index else self._down
            to = self._members[node]
            for part in [words] if len(words) <= size else [words[:size], words[size:]]:
                try:
                    sent.append((node, group.send([torch.from_numpy(part)], to, self._tag)))
                except RuntimeError as error:
                    self._fail(error, node)

        def wait() -> list[np.ndarray]:
            begin = time.monotonic()
            until = begin + self.timeout_s
            received = [messages[self.index][1:]] * self.count
            for node in self._others:
                received[node] = self._receive(node, until)
            for node, work in sent:
                self._wait(node, work, until)
            self.num_rounds += 1
            self.last_wait_s = time.monotonic() - begin
            return received

        return wait

    def _receive(self, node: int, until: float) -> np.ndarray:
        """Wait for a message, and post the buffer of the next one."""
        buffer, work = self._buffers[node]
        self._wait(node, work, until)
        size = int(buffer[0])
        words = _next_buffer_words(size, len(buffer))
        if words > len(buffer):
            longer = np.empty(words, np.int64)
            longer[: len(buffer)] = buffer
            self._wait(node, self._begin_receive(node, longer[len(buffer) : size]), until)
            buffer = longer
        other = self._spare[node]
        if len(other) < words:
            other = np.empty(words, np.int64)
        receive = self._begin_receive(node, other)
        self._spare[node] = buffer
        self._buffers[node] = (other, receive)
        self.bytes_received += 8 * size
        return buffer[1:size]

    def _begin_receive(self, node: int, words: np.ndarray) -> Any:
        """Begin to receive words; return the work, or the error (for the next wait) if the node has
        ended.
        """
        group = self._down if node > self.index else self._up
        try:
            return group.recv([torch.from_numpy(words)], self._members[node], self._tag)
        except RuntimeError as error:
            return error

    def _wait(self, node: int, work: Any, until: float) -> None:
        try:
            if isinstance(work, RuntimeError):
                raise work
            work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST_WAIT_S)))
        except RuntimeError as error:
            self._fail(error, node)

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Raise a LostNodeError with the node's name where a collective of the same ranks fails."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except RuntimeError as error:
            self._fail(error)

    @contextlib.contextmanager
    def parting(self, timeout_s: float) -> Iterator[None]:
        """Limit waits for nodes that may have ended already, and suppress errors about them."""
        kept = self.timeout_s, self._detector
        self.timeout_s = min(self.timeout_s, timeout_s)
        self.part()
        try:
            with contextlib.suppress(PeerError, StoreError):
                yield
        finally:
            self.timeout_s, self._detector = kept

    def part(self) -> None:
        """Report no lost node from now on, as this node ends.

        Any thread; rounds under way go on.
        """
        self._detector = None

    def note_left(self, left: bool = True) -> None:
        """Record that a node has announced its last selection, so that this one need not announce
        its own.
        """
        self.left = left

    def count_bytes(self, sent: int, received: int) -> None:
        self.bytes_sent += sent
        self.bytes_received += received

    def raise_ended(self, index: int, had: str) -> NoReturn:
        """Raise that a node has ended while this one still samples: with the cause, if one was
        reported.
        """
        if self._detector is not None:
            self._detector.check_ended()
        raise PeerError(self.name(index), MUST_TAKE_ALL, None, had)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Break the channel if an error keeps this node from a round that the
        others wait in.
        """
        try:
            yield
        except Exception as error:
            if self._broken is None:
                rule = "must make the selections that it has begun"
                self._broken = LostNodeError("this node", rule, str(error), "start all ranks again")
                self._broken.__cause__ = error
            raise

    def _fail(self, error: RuntimeError, node: int | None = None) -> NoReturn:
        """Raise the detector's error, or else that of the transport."""
        text = str(error).splitlines()[0]
        node = 1 - self.index if node is None and self.count == 2 else node
        name = SOME_NODE if node is None else self.name(node)
        is_late = any(word in text.lower() for word in ("timed out", "timeout"))
        rule = f"must answer within {self.timeout_s:g} s" if is_late else "must stay connected"
        remedy = "look for the first error in the logs of its ranks, and at the network"
        self._broken = LostNodeError(name, rule, text, remedy)
        self._broken.__cause__ = error
        detector = self._detector  # another thread may call `part`
        if detector is not None:
            if not detector.note(self._broken):
                self._broken = LostNodeError(name, MUST_TAKE_ALL, None, "it has ended")
                self._broken.__cause__ = error
            detector.check()
        raise self._broken


class LoneChannel:
    """The channel of a node that selects alone: its own words are those of all."""

    count = 1
    index = 0
    last_wait_s = 0.0

    def all_gather(self, words: np.ndarray) -> np.ndarray:
        """Return the words of the one node. [n] -> [1, n]."""
        return words[None]

    def all_gather_ragged(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the one node, and its index for each. [n, words], [n]."""
        return rows, np.zeros(len(rows), np.int64)


def message_of(words: np.ndarray, more: np.ndarray = NO_WORDS) -> np.ndarray:
    """Return a message of `NodeChannel.begin` with these words. [n], [m] -> [1 + n + m], int64."""
    message = np.empty(1 + len(words) + len(more), np.int64)
    message[1 : 1 + len(words)] = words
    message[1 + len(words) :] = more
    return message


def _next_buffer_words(size: int, words: int) -> int:
    """Return the words of the buffer after a message of `size`: sender and receiver compute the
    same.
    """
    return words if size <= words else 1 << (size - 1).bit_length()

"""Turns of the ranks that train together: a failure, a death or an early end of one is raised on all.

A rank that enters a collective which another one never enters hangs. So the ranks take turns: each does its
part, says in shared memory how it went, and waits until all have, before any of them goes on to the model.
A turn in which one rank failed is over for all, with an error on each; the next turn tries again.

Over several nodes each node's leader waits for its own ranks, tells the leaders of the others how it went,
and then lets its ranks go on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeVar

import numpy as np

from deepspeed_gear.distributed import node_messages
from deepspeed_gear.distributed.failure_detector import HEARD_BEATS, MOST_BEAT_S, FailureDetector
from deepspeed_gear.distributed.node_channel import MUST_TAKE_ALL, NodeChannel
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import GearError, LostNodeError, NotReadyError, PeerError, relayed
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.table import Table

T = TypeVar("T")
_NOT_READY = "not ready: "  # begins the text of a rank that may be ready later
MOST_DRAIN_S = 3.0  # what a rank that ends waits for other nodes
SETTLE_S = 0.1  # in it a rank sees what another one did before it ended
GRACE_S = 2 + 2 * HEARD_BEATS * MOST_BEAT_S  # ranks wait longer for their leader than it for other nodes
NO_DIGEST = 0
_AWAKE_S, _POLL_S = 500e-6, 200e-6


class BarrierWord:
    """Words of a rank in its node's shared memory."""

    REACHED: Final = 0
    FAILED: Final = 1
    ENDED: Final = 2
    RELEASED: Final = 3
    DIGESTS: Final = 4  # of even and of odd barriers: two words
    NUM_WORDS: Final = 8
    NUM_TEXT_BYTES: Final = 2048


class BarrierMessage:
    """The message of a node leader to the others."""

    NUMBER: Final = 0
    STATUS: Final = 1
    VERIFIES: Final = 2
    NUM_WORDS: Final = 3


class EndCode:
    """How a rank has ended."""

    WELL: Final = 1
    ERROR: Final = 2


class BatchBarrier:
    """The turns of a node's ranks. Main thread only.

    Args:
        table: Whose store holds the words.
        topology: Where the ranks sit.
        only_readers: Inner stages of a pipeline take no turns.
        timeout_s: How long one waits for another.
        channel: To the leaders of the other nodes, on a leader.
        over_nodes: Whether there are other nodes.
        early: Whether ranks may reach a turn before they wait for it.
        watch: Over the ranks of all nodes; None for one node.
    """

    def __init__(
        self,
        table: Table,
        topology: Topology,
        only_readers: bool,
        timeout_s: float,
        channel: NodeChannel | None = None,
        over_nodes: bool = False,
        early: bool = False,
        watch: FailureDetector | None = None,
    ) -> None:
        self._table, self._timeout_s, self._topology = table, timeout_s, topology
        self._channel, self._watch = channel, watch
        self.is_early = early and over_nodes
        self._flying: Callable[[], np.ndarray] | None = None  # what waits for the message of the next turn
        self._ranks = topology.peers
        self._places = [topology.places[rank] for rank in self._ranks]
        members = [p for p, place in enumerate(self._places) if place.reads or not only_readers]
        self._members = members
        self._words: np.ndarray = table.views["status/words"]
        self._texts: np.ndarray = table.views["status/texts"]
        self._mine: np.ndarray = self._words[table.memory.peer]
        everyone = len(members) == len(self._ranks)
        self._reached: np.ndarray = self._words[:, BarrierWord.REACHED]
        self._lagging = self._lagging_of_all if everyone else self._lagging_of_members
        self._follows = over_nodes and channel is None  # its leader tells it how turns went
        if self._follows:
            self._lagging = self._lagging_of_leader
        self._leader_ended: float | None = None  # when that was first seen
        self._end = EndCode.WELL
        self._count = 0  # turns of this rank
        self._is_open = False  # it has done its part of the last one, and not heard of all others yet
        self._takes_turns = table.memory.peer in members
        self._note_taken()

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        """Return what it keeps in the store."""
        return [
            Region("status/words", "int64", (num_peers, BarrierWord.NUM_WORDS)),
            Region("status/texts", "uint8", (num_peers, BarrierWord.NUM_TEXT_BYTES)),
        ]

    def agree(self, action: Callable[[], T], digest: Callable[[], int] = lambda: NO_DIGEST) -> T:
        """Take a turn: do something on this rank; raise if another rank failed at it.

        Args:
            action: What all ranks do; called again by the next turn if this one fails.
            digest: Of what this rank has got, for `verify_every`; asked after `action`.
        Returns:
            Its result.
        Raises:
            Exception: What `action` raised here.
            PeerError, NotReadyError: As `wait`.
        """
        try:
            result = action()
        except Exception as error:
            self.fail(error)
            raise
        self.reach(digest())
        self.wait()
        return result

    def reach(self, digest: int = NO_DIGEST) -> None:
        """Say that this rank has done its part."""
        if not self._is_open:
            self._count += 1
            if digest:
                with self._table.lock:  # so that a reader of the count sees the digest
                    self._mine[BarrierWord.DIGESTS + self._count % 2] = digest
            else:
                self._mine[BarrierWord.DIGESTS + self._count % 2] = NO_DIGEST
            self._mine[BarrierWord.REACHED] = self._count
            self._is_open = True

    def fail(self, error: Exception) -> None:
        """Say that this rank cannot do its part: the turn is over, and the others raise with this text."""
        text = _text_of(error)
        with self._table.lock:
            self._write(text)
            self._mine[BarrierWord.FAILED] = self._count + 1
        self.reach()
        if self._channel is not None and not isinstance(error, LostNodeError):
            with contextlib.suppress(PeerError, NotReadyError):
                self._exchange_error(self._channel, text)
        self._is_open = False

    def begin(self) -> None:
        """Tell the other nodes already that this one has had the turn, if all its ranks have reached it."""
        if self._channel is None or not self._is_open or self._flying is not None or self._lagging():
            return
        if all(self._words[peer, BarrierWord.FAILED] < self._count for peer in self._members):
            self._flying = self._begin_status(self._channel, failed=False)

    def explain(self, error: BaseException) -> None:
        """Say what ends this rank, for those that miss it in a turn."""
        if isinstance(error, Exception) and self._end == EndCode.WELL:
            self._write(_text_of(error))
            self._end = EndCode.ERROR

    def end(self) -> None:
        """Say that this rank takes no more turns."""
        self._mine[BarrierWord.ENDED] = self._end
        self.drain(MOST_DRAIN_S)

    def drain(self, timeout_s: float | None = None) -> None:
        """Let no message of a turn be under way: every leader sends and receives one more. Collective."""
        if self._channel is None or not self.is_early:
            return
        with self._channel.parting(timeout_s or self._channel.timeout_s):
            (self._flying or self._channel.begin_gather(np.zeros(BarrierMessage.NUM_WORDS, np.int64)))()
        self._flying = None

    def restart(self) -> None:
        """Begin again, as when a checkpoint is loaded: between two barriers of all ranks."""
        self._count, self._is_open = 0, False
        self._mine[[BarrierWord.REACHED, BarrierWord.FAILED, BarrierWord.RELEASED]] = 0
        self._note_taken()

    def wait(self) -> None:
        """Wait until every rank has had this rank's turn.

        Raises:
            PeerError: One failed, has died or ended, does not come in time, or has other samples than its
                replica.
            NotReadyError: One says so: the turn is over, and can be tried again.
        """
        if self._lagging():
            begin = time.monotonic()
            while self._lagging():
                waited = time.monotonic() - begin
                if waited < _AWAKE_S:
                    os.sched_yield()
                    continue
                try:
                    self._check(waited)
                except PeerError as error:
                    self._give_up(error)
                    raise
                time.sleep(_POLL_S)
        if self._channel is not None:
            self._finish_status(self._channel)
        self._is_open = False
        self._raise_failure(self._count)
        if self._channel is None and any(self._words[:, BarrierWord.DIGESTS + self._count % 2].tolist()):
            self._compare_digests(self._digests())  # an inner stage has none
        self._note_taken()

    def _note_taken(self) -> None:
        if self._watch is not None and self._takes_turns:
            self._watch.take(self._count)

    def _lagging_of_leader(self) -> bool:
        return bool(
            self._words[0, BarrierWord.RELEASED] < self._count
            and self._words[0, BarrierWord.FAILED] < self._count
        )

    # ---- over nodes ------------------------------------------------------------------------------

    def _give_up(self, error: PeerError) -> None:
        """Let the other ranks of the node, and the other nodes, know that a turn cannot be finished."""
        if self._channel is None:
            return
        self._publish(str(error))
        if not isinstance(error, LostNodeError):
            with contextlib.suppress(PeerError, NotReadyError):
                self._exchange_error(self._channel, str(error))
        self._is_open = False

    def _finish_status(self, channel: NodeChannel) -> None:
        """Tell the other nodes how the turn went here, hear how it went there, and let the ranks go on."""
        failed = [peer for peer in self._members if self._words[peer, BarrierWord.FAILED] >= self._count]
        text = self._text_of(failed[0]) if failed else ""
        try:
            self._exchange_error(channel, text)
        except (PeerError, NotReadyError) as error:
            if not failed:
                self._publish(_text_of(error))
                self._is_open = False
                raise
        self._mine[BarrierWord.RELEASED] = self._count

    def _exchange_error(self, channel: NodeChannel, text: str) -> None:
        """Swap with the other leaders: turn, whether it failed, whether digests are to be compared.

        Raises:
            PeerError: It failed on another node.
        """
        digests, wait = self._digests(), self._flying or self._begin_status(channel, bool(text))
        self._flying, received = None, wait()
        if (received[:, BarrierMessage.NUMBER] != self._count).any():
            node = int(np.nonzero(received[:, BarrierMessage.NUMBER] != self._count)[0][0])
            channel.raise_ended(node, f"it ended before turn {self._count}")
        texts = None
        if received[:, BarrierMessage.STATUS].any():
            texts = channel.gather(node_messages.pack_text(text, BarrierWord.NUM_TEXT_BYTES // 8))
        every = (
            channel.gather_ragged(np.array(digests).reshape(-1, 3))
            if received[:, BarrierMessage.VERIFIES].any()
            else []
        )
        if texts is not None and not text:
            node = int(np.nonzero(received[:, BarrierMessage.STATUS])[0][0])
            text = node_messages.unpack_text(texts[node])
            raise _failure_of(channel.name(node), text)
        if every and texts is None:
            self._compare_digests([(int(a), int(b), int(c)) for rows in every for a, b, c in rows])

    def _begin_status(self, channel: NodeChannel, failed: bool) -> Callable[[], np.ndarray]:
        """Send turn, status and whether digests are to be compared; return what waits for the others'."""
        verifies = any(digest for _, _, digest in self._digests())
        return channel.begin_gather(np.array([self._count, failed, verifies]))

    def _publish(self, text: str) -> None:
        """Say to the ranks of the node why the turn is over."""
        with self._table.lock:
            self._write(text)
            self._mine[BarrierWord.FAILED] = self._count
            self._mine[BarrierWord.RELEASED] = self._count

    def _write(self, text: str) -> None:
        encoded, row = text.encode()[: BarrierWord.NUM_TEXT_BYTES - 1], self._texts[self._table.memory.peer]
        row[: len(encoded)], row[len(encoded) :] = np.frombuffer(encoded, np.uint8), 0

    def _text_of(self, peer: int) -> str:
        with self._table.lock:
            return bytes(self._texts[peer]).rstrip(b"\0").decode(errors="replace")

    def _digests(self) -> list[tuple[int, int, int]]:
        """Return rank, replica and digest of this node's ranks in the turn."""
        with self._table.lock:
            digests: list[int] = self._words[:, BarrierWord.DIGESTS + self._count % 2].tolist()
        replicas = [self._places[peer].data_rank for peer in self._members]
        return [
            (self._ranks[peer], replica, digests[peer])
            for peer, replica in zip(self._members, replicas, strict=True)
            if digests[peer]
        ]

    def _lagging_of_all(self) -> bool:
        return bool(min(self._reached.tolist()) < self._count)

    def _lagging_of_members(self) -> bool:
        return bool(self._reached[self._members].min() < self._count)

    def check(self) -> None:
        """Raise if another rank has failed in the turn that this one prepares. Any thread.

        Raises:
            PeerError: One has: what this rank waits for may never come.
        """
        self._raise_failure(self._count + 1)
        if self._watch is not None:
            self._watch.check()
        if self._follows and self._words[0, BarrierWord.ENDED]:
            self._leader_ended = self._leader_ended or time.monotonic()
            if time.monotonic() - self._leader_ended > SETTLE_S:  # by then what it has made was seen
                self._raise_ended(0)

    def _raise_failure(self, turn: int) -> None:
        if max(self._words[:, BarrierWord.FAILED].tolist()) < turn:
            return
        for peer in self._members:
            if self._words[peer, BarrierWord.FAILED] >= turn and peer != self._table.memory.peer:
                raise _failure_of(f"rank {self._ranks[peer]}", self._text_of(peer))

    def _check(self, waited_s: float) -> None:
        """Raise if a rank that is after will never come."""
        if self._watch is not None:
            self._watch.check()
        if self._follows:
            self._check_leader(waited_s)
            return
        for peer in self._members:
            if self._reached[peer] >= self._count:
                continue
            name, had = f"rank {self._ranks[peer]}", f"{int(self._reached[peer])} of {self._count} turns"
            lives = self._table.memory.is_alive(peer)
            if self._words[peer, BarrierWord.ENDED] and self._reached[peer] < self._count:
                self._raise_ended(peer)
            if not lives and self._reached[peer] < self._count:
                raise PeerError(name, "must live as long as the others train", None, f"it died after {had}")
            if waited_s > self._timeout_s:
                raise PeerError(
                    name,
                    f"must have its batch in gear.timeout_s = {self._timeout_s} s",
                    had,
                    "look what it does; if it evaluates or saves for so long, raise gear.timeout_s",
                )

    def _raise_ended(self, peer: int) -> NoReturn:
        """Raise that a rank of this node has ended while this one still asks for batches."""
        if self._watch is not None:
            self._watch.check_ended()
        name, had = f"rank {self._ranks[peer]}", f"after {int(self._reached[peer])} of {self._count} turns"
        if self._words[peer, BarrierWord.ENDED] == EndCode.ERROR:
            rule = "must train as long as the others"
            raise PeerError(name, rule, None, f"it failed {had}: {self._text_of(peer)}")
        raise PeerError(name, MUST_TAKE_ALL, None, f"it ended {had}")

    def _check_leader(self, waited_s: float) -> None:
        name = f"rank {self._ranks[0]}"
        lives = self._table.memory.is_alive(0)
        if self._words[0, BarrierWord.ENDED] and self._lagging():
            self._raise_ended(0)
        if not lives and self._lagging():
            raise PeerError(name, "must live as long as the others train", None, "it died")
        if waited_s > self._timeout_s + GRACE_S:
            rule = f"must hear of the other nodes in gear.timeout_s = {self._timeout_s} s"
            raise PeerError(name, rule, None, "look what it does, and at its log")

    def _compare_digests(self, known: Sequence[tuple[int, int, int]]) -> None:
        """Compare the digests inside each replica.

        Args:
            known: Rank, replica and digest.
        """
        for replica in sorted({replica for _, replica, _ in known}):
            digests = {rank: digest for rank, its, digest in known if its == replica}
            usual = Counter(digests.values()).most_common(1)[0][0]
            for rank, digest in digests.items():
                if digest != usual:
                    raise PeerError(
                        f"rank {rank}",
                        f"must have the samples of its replica ({replica})",
                        f"digest {digest % (1 << 64):016x}, the others {usual % (1 << 64):016x}",
                        "something changes ids or anchors of its batches",
                    )


def _text_of(error: Exception) -> str:
    """Return what other ranks are told of an error."""
    text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
    return _NOT_READY + text if isinstance(error, NotReadyError) else text


def _failure_of(name: str, text: str) -> GearError:
    """Return the error of a rank, or node, that has reported `text`."""
    if text.startswith(_NOT_READY):
        return relayed(NotReadyError, text.removeprefix(_NOT_READY), name)
    return relayed(PeerError, text, name)

"""Batch barrier: a rank's failure, death, early end or wrong samples are raised on all ranks.

A rank that enters a collective which another one never enters hangs. So at each barrier every rank
publishes its outcome in shared memory and waits for all others before it continues to the model. A
failed barrier is over for all; the next one tries again. Node leaders compare the outcome of their
nodes before they release their ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn, TypeVar

import numpy as np

from deepspeed_gear.distributed.failure_detector import MOST_BEAT_S, SPREAD_BEATS, FailureDetector
from deepspeed_gear.distributed.node_channel import MUST_TAKE_ALL, OUTCOME_WORDS, NodeChannel
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import LostNodeError, NotReadyError, PeerError
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import WaitLog

T = TypeVar("T")
MOST_DRAIN_S = 3.0  # longest wait of a rank that ends for other nodes
LOOK_S = 0.25  # between two looks for ranks that have died, while another thing is waited for
SETTLE_S = 0.1  # after it the last writes of a rank that has ended are visible
# Ranks wait longer for their leader than it for other nodes.
GRACE_S = 2 + 2 * SPREAD_BEATS * MOST_BEAT_S
NO_DIGEST = 0
_AWAKE_S = 500e-6
_POLL_S = 200e-6


class BarrierWord:
    """Words of a rank in its node's shared memory."""

    REACHED: Final = 0
    FAILED: Final = 1
    ENDED: Final = 2  # ENDED_WELL or ENDED_BY_ERROR; 0: the rank takes part
    RELEASED: Final = 3
    DIGESTS: Final = 4  # of even and of odd barriers: two words
    ARRIVED_NS: Final = 6  # when the rank reached its barrier, by the monotonic clock
    REQUESTED: Final = 7  # barrier before which the rank has begun its part
    REQUESTED_NS: Final = 8  # when it did
    LATE_NS: Final = 9  # how long the first rank of the node has waited for this one, in all
    NUM_WORDS: Final = 16
    ENDED_WELL: Final = 1
    ENDED_BY_ERROR: Final = 2


class BarrierMessage:
    """The message of a node leader to the others."""

    NUMBER: Final = 0
    STATUS: Final = 1
    VERIFIES: Final = 2
    NUM_WORDS: Final = 3


class BatchBarrier:
    """The batch barriers of a node's ranks. Main thread only. A leader's `channel` leads to the
    other leaders; with `only_readers` inner pipeline stages take no part; with `early` ranks may
    arrive before they wait.
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
        detector: FailureDetector | None = None,
    ) -> None:
        self._table = table
        self._timeout_s = timeout_s
        self._topology = topology
        self._channel = channel
        self._detector = detector
        self._peer = table.memory.peer
        self.is_early = early and over_nodes
        # Waits for messages of the barrier under way.
        self._pending: Callable[[], np.ndarray] | None = None
        self._ranks = topology.peers
        places = [topology.places[rank] for rank in self._ranks]
        self._replicas = [place.data_rank for place in places]
        self._members = [p for p, place in enumerate(places) if place.reads or not only_readers]
        self._words: np.ndarray = table.views["status/words"]
        self._outcomes: np.ndarray = table.views["status/outcomes"]
        # Of this rank. Read and written once a batch: NumPy's scalars take several times as long.
        self._own: memoryview = self._words[self._peer].data
        # It waits for all ranks of its node; or for the leader, which publishes the outcome of all
        # nodes.
        self._follows = over_nodes and channel is None
        self._awaited = [0] if self._follows else self._members
        word = BarrierWord.RELEASED if self._follows else BarrierWord.REACHED
        self._progress: np.ndarray = self._words[:, word]
        self._leader_ended: float | None = None  # when the leader was first found to have ended
        self._end = BarrierWord.ENDED_WELL
        self._next_look = 0.0
        self._count = 0  # barriers that this rank has reached
        self._is_open = False  # this rank has reached the last one, but not passed it yet
        self._late_ns = 0  # by which it has begun its part of the next one after the first rank
        self._takes_part = self._peer in self._members
        self._publish_passed()

    @staticmethod
    def regions(num_peers: int) -> list[Region]:
        return [
            Region("status/words", "int64", (num_peers, BarrierWord.NUM_WORDS)),
            Region("status/outcomes", "int64", (num_peers, OUTCOME_WORDS)),
        ]

    def agree(self, action: Callable[[], T], digest: Callable[[], int] = lambda: NO_DIGEST) -> T:
        """Run an action on every rank and pass a barrier; raise if it failed on another one. After
        a failure the next barrier repeats it. Then `digest` gives the digest of this rank's samples
        (`verify_every`).
        """
        self.note_request()
        try:
            result = action()
        except Exception as error:
            self.fail(error)
            raise
        self.reach(digest())
        self.wait()
        return result

    def reach(self, digest: int = NO_DIGEST) -> None:
        """Mark this rank's part of the next barrier as done."""
        if not self._is_open:
            self._count += 1
            self._note_arrival()
            # Locked so that a reader of the count sees the digest.
            with self._table.lock if digest else contextlib.nullcontext():
                self._own[BarrierWord.DIGESTS + self._count % 2] = digest
            self._own[BarrierWord.REACHED] = self._count
            self._is_open = True

    def note_request(self) -> None:
        """Record that this rank begins its part of the next barrier, and how long after the first.

        Another rank may wait for this one before it reaches the barrier: a selection needs the
        priorities of all ranks.
        """
        number = self._count + (not self._is_open)
        now = time.monotonic_ns()
        if self._own[BarrierWord.REQUESTED] < number:
            word = BarrierWord.REQUESTED_NS
            self._late_ns = self._after_first(BarrierWord.REQUESTED, number, word, now)
            self._own[word] = now
            self._own[BarrierWord.REQUESTED] = number

    def _note_arrival(self) -> None:
        """Record when this rank reaches the barrier, and add to how late it was."""
        now = time.monotonic_ns()
        word = BarrierWord.ARRIVED_NS
        late_ns = self._after_first(BarrierWord.REACHED, self._count, word, now)
        if self._takes_part:
            self._own[BarrierWord.LATE_NS] += max(late_ns, self._late_ns)
        self._late_ns = 0
        self._own[word] = now

    def _after_first(self, number_word: int, number: int, time_word: int, now: int) -> int:
        """Return the nanoseconds since the first rank of the node was as far as this one is now.

        No other rank passes this barrier before this one has reached it, so that their times stay.
        """
        times = [words[time_word] for words in self._words.tolist() if words[number_word] == number]
        return max(now - min(times, default=now), 0)

    def late_s(self) -> dict[int, float]:
        """Return the seconds that the first rank has waited for each rank, in all.

        Of the ranks of this node, by their numbers.
        """
        late = (self._words[:, BarrierWord.LATE_NS] / 1e9).tolist()
        return {self._ranks[peer]: late[peer] for peer in self._members}

    def fail(self, error: Exception) -> None:
        """Publish that this rank cannot do its part: the barrier is over, and the others raise this
        error.
        """
        self._publish(error, self._count + 1)
        self.reach()
        self._relay(error)

    def begin(self) -> None:
        """Send this node's status to the other nodes, if all its ranks have reached the barrier."""
        if (
            self._channel is None
            or not self._is_open
            or self._pending is not None
            or self._lagging()
        ):
            return
        if all(self._words[peer, BarrierWord.FAILED] < self._count for peer in self._members):
            self._pending = self._begin_status(self._channel, failed=False)

    def explain(self, error: BaseException) -> None:
        """Publish the error that ends this rank, for ranks that wait for it at a barrier."""
        if isinstance(error, Exception) and self._end == BarrierWord.ENDED_WELL:
            self._write(error)
            self._end = BarrierWord.ENDED_BY_ERROR

    def end(self) -> None:
        """Mark this rank as ended: it takes part in no more barriers."""
        self._own[BarrierWord.ENDED] = self._end
        self.drain(MOST_DRAIN_S)

    def drain(self, timeout_s: float | None = None) -> None:
        """Complete the messages under way: every leader sends and receives one more status.
        Collective.
        """
        if self._channel is None or not self.is_early:
            return
        with self._channel.parting(timeout_s or self._channel.timeout_s):
            (
                self._pending
                or self._channel.begin_all_gather(np.zeros(BarrierMessage.NUM_WORDS, np.int64))
            )()
        self._pending = None

    def restart(self) -> None:
        """Count barriers from 0 again, as when a checkpoint is loaded, between two waits of all
        ranks.
        """
        self._count = 0
        self._is_open = False
        self._late_ns = 0
        for word in (
            BarrierWord.REACHED,
            BarrierWord.FAILED,
            BarrierWord.RELEASED,
            BarrierWord.REQUESTED,
        ):
            self._own[word] = 0
        self._publish_passed()

    def wait(self) -> None:
        """Wait until every rank has reached this rank's barrier. PeerError: one failed, died,
        ended, is late or has other samples than its replica; NotReadyError: the next barrier may
        succeed.
        """
        log = WaitLog(f"rank {self._topology.rank}")
        while self._lagging():
            waited = log.note(self._named_lagging)
            if waited < _AWAKE_S:
                os.sched_yield()
                continue
            try:
                self._check(waited)
            except PeerError as error:
                if self._channel is not None:
                    self._publish(error, self._count)
                    self._relay(error)
                raise
            time.sleep(_POLL_S)
        if self._channel is not None:
            failed = [
                peer
                for peer in self._members
                if self._words[peer, BarrierWord.FAILED] >= self._count
            ]
            try:
                self._compare_outcomes(
                    self._channel, self._outcome_of(failed[0]) if failed else None
                )
            except (PeerError, NotReadyError) as error:
                if not failed:
                    self._publish(error, self._count)
                    self._is_open = False
                    raise
            self._own[BarrierWord.RELEASED] = self._count
        self._is_open = False
        self._raise_failure(self._count)
        if self._channel is None and any(
            self._words[:, BarrierWord.DIGESTS + self._count % 2].tolist()
        ):
            self._compare_digests(self._digests())  # an inner stage has none
        self._publish_passed()

    def _publish_passed(self) -> None:
        if self._detector is not None and self._takes_part:
            self._detector.take(self._count)

    def _lagging(self) -> list[int]:
        progress = self._progress.tolist()
        return [peer for peer in self._awaited if progress[peer] < self._count]

    def _publish(self, error: Exception, number: int) -> None:
        """Publish to the ranks of the node why a barrier is over."""
        with self._table.lock:
            self._write(error)
            self._own[BarrierWord.FAILED] = number
            self._own[BarrierWord.RELEASED] = number

    def _write(self, error: Exception) -> None:
        self._outcomes[self._peer] = Outcome.of(error).words(OUTCOME_WORDS)

    def _outcome_of(self, peer: int) -> Outcome:
        with self._table.lock:
            return Outcome.read(self._outcomes[peer])

    def _relay(self, error: Exception) -> None:
        """End the barrier that has failed; on a leader, send the other nodes the error."""
        if self._channel is not None and not isinstance(error, LostNodeError):
            with contextlib.suppress(PeerError, NotReadyError):
                self._compare_outcomes(self._channel, Outcome.of(error))
        self._is_open = False

    def _compare_outcomes(self, channel: NodeChannel, failure: Outcome | None) -> None:
        """Compare status, failures and digests with the other leaders; raise their PeerError."""
        digests = self._digests()
        wait = self._pending or self._begin_status(channel, failure is not None)
        self._pending = None
        received = wait()
        if (received[:, BarrierMessage.NUMBER] != self._count).any():
            node = int(np.nonzero(received[:, BarrierMessage.NUMBER] != self._count)[0][0])
            channel.raise_ended(node, f"it ended before batch barrier {self._count}")
        error = channel.first_failure(received[:, BarrierMessage.STATUS], failure)
        every = np.empty((0, 3), np.int64)
        if received[:, BarrierMessage.VERIFIES].any():
            every, _ = channel.all_gather_ragged(np.array(digests).reshape(-1, 3))
        if error is None:
            self._compare_digests(every.tolist())
        elif failure is None:
            raise error

    def _begin_status(self, channel: NodeChannel, failed: bool) -> Callable[[], np.ndarray]:
        """Send number, status and whether digests are to be compared; return what waits for the
        others'.
        """
        return channel.begin_all_gather(np.array([self._count, failed, bool(self._digests())]))

    def _digests(self) -> list[tuple[int, int, int]]:
        """Return rank, replica and digest of this node's ranks that verify this barrier."""
        with self._table.lock:
            digests: list[int] = self._words[:, BarrierWord.DIGESTS + self._count % 2].tolist()
        return [
            (self._ranks[p], self._replicas[p], digests[p]) for p in self._members if digests[p]
        ]

    def check(self) -> None:
        """Raise PeerError if another rank has failed at the next barrier. Any thread."""
        self._raise_failure(self._count + 1)
        if self._detector is not None:
            self._detector.check()
        elif time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            for peer in self._members:
                if (
                    not self._table.memory.is_alive(peer)
                    and not self._words[peer, BarrierWord.ENDED]
                ):
                    raise self._died(peer)
        if self._follows and self._words[0, BarrierWord.ENDED]:
            self._leader_ended = self._leader_ended or time.monotonic()
            # By then its selections are visible.
            if time.monotonic() - self._leader_ended > SETTLE_S:
                self._raise_ended(0)

    def _raise_failure(self, number: int) -> None:
        if max(self._words[:, BarrierWord.FAILED].tolist()) < number:
            return
        for peer in self._members:
            if self._words[peer, BarrierWord.FAILED] >= number and peer != self._peer:
                raise self._outcome_of(peer).error(f"rank {self._ranks[peer]}")

    def _check(self, waited_s: float) -> None:
        """Raise if a rank that has not reached the barrier never will."""
        if self._detector is not None:
            self._detector.check()
        for peer in self._lagging():
            lives = self._table.memory.is_alive(peer)
            has_ended = self._words[peer, BarrierWord.ENDED]
            if self._progress[peer] >= self._count:  # meanwhile
                continue
            if has_ended:
                self._raise_ended(peer)
            if not lives:
                raise self._died(peer)
            if waited_s > self._timeout_s + (GRACE_S if self._follows else 0.0):
                part = (
                    "publish the outcome of the other nodes" if self._follows else "have its batch"
                )
                rule = f"must {part} within {self._timeout_s} s"
                remedy = (
                    "look at what it does; if it evaluates or saves for so long, raise "
                    "gear.timeout_s; "
                )
                remedy += (
                    "with gear.pack, where it may generate, the timeout_s of the table's "
                    "rate_limiter"
                )
                raise PeerError(f"rank {self._ranks[peer]}", rule, self._passed(peer), remedy)

    def _died(self, peer: int) -> PeerError:
        name = f"rank {self._ranks[peer]}"
        rule = "must run while the others train"
        return PeerError(name, rule, None, f"it died after {self._passed(peer)}")

    def _passed(self, peer: int) -> str:
        return f"{int(self._words[peer, BarrierWord.REACHED])} of {self._count} batch barriers"

    def _named_lagging(self) -> str:
        """Name the ranks that this one waits for, for the log, on the first that waits; else return
        "".
        """
        if self._follows:
            return ""
        late = self._lagging()
        first = next(peer for peer in self._members if peer not in late)
        return (
            ", ".join(f"rank {self._ranks[peer]}" for peer in late) if self._peer == first else ""
        )

    def _raise_ended(self, peer: int) -> NoReturn:
        """Raise that a rank of this node has ended while this one still samples."""
        if self._detector is not None:
            self._detector.check_ended()
        name = f"rank {self._ranks[peer]}"
        had = f"after {self._passed(peer)}"
        if self._words[peer, BarrierWord.ENDED] == BarrierWord.ENDED_BY_ERROR:
            rule = "must train as long as the others"
            raise PeerError(name, rule, None, f"it failed {had}: {self._outcome_of(peer).text}")
        raise PeerError(name, MUST_TAKE_ALL, None, f"it ended {had}")

    def _compare_digests(self, known: Iterable[Sequence[int]]) -> None:
        """Raise unless the ranks of a replica have equal digests. Each of `known`: rank, replica,
        digest.
        """
        of_replicas: dict[int, dict[int, int]] = {}
        for rank, replica, digest in known:
            of_replicas.setdefault(replica, {})[rank] = digest
        for replica, digests in sorted(of_replicas.items()):
            usual = Counter(digests.values()).most_common(1)[0][0]
            for rank, digest in digests.items():
                if digest != usual:
                    rule = f"must have the samples of its replica ({replica})"
                    given = f"digest {digest % (1 << 64):016x}, the others {usual % (1 << 64):016x}"
                    remedy = "something changes ids or anchors of its batches"
                    raise PeerError(f"rank {rank}", rule, given, remedy)

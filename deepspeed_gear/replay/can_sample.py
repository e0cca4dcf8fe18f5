"""Questions about the next batch with equal answers on all ranks, such as `can_sample`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from deepspeed_gear.context import WaitLog
from deepspeed_gear.errors import PeerError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream

_POLL_S = 100e-6
_CALLS = "can_sample() or missing_groups()"


class Readiness:
    """Numbered calls; the first rank of a node that makes or ends a call answers it for all."""

    def __init__(self, parts: ReplayParts) -> None:
        self._parts = parts
        self._rates = parts.rates
        self._timeout_s = parts.plan.config.rollout_timeout_s
        # Raises if a rank is lost.
        self._check = parts.context.check if parts.barrier is None else parts.barrier.check
        self._streams = parts.train
        self._table = parts.train[0].table
        self._asked: np.ndarray = self._table.views["questions/asked"]
        self._answers: np.ndarray = self._table.views["questions/answers"]
        self._peer = self._table.memory.peer

    def ask(self, number: int) -> bool:
        """Return whether a global batch could be selected at the first rank's call. Collective."""
        turn = int(self._asked[self._peer])
        streams = [stream for stream in self._streams if not stream.spec.is_optional]
        self._wait_for_slowest(turn)
        if self._parts.plan.topology.num_nodes == 1:
            answer = bool(self._first(turn, lambda: all(s.can_select(number) for s in streams)))
            self._asked[self._peer] = turn + 1
            return answer
        self._asked[self._peer] = turn + 1
        if self._rates.leads:  # no rank of this node writes while nodes divide quotas
            self._wait_for_slowest(turn + len(self._answers))
        may_be_selecting = self._parts.prefetcher.is_alive
        # Every rank takes part for each stream, also after one that cannot be selected from.
        answers = [self._rates.may_select(stream, number, may_be_selecting) for stream in streams]
        return all(answers)

    def missing(self, stream: BatchStream, number: int) -> int:
        """Return this rank's share of the items to add for a global batch. Collective.

        A remainder goes to the first ranks. Items are counted once all ranks of the node have
        called.
        """
        turn = int(self._asked[self._peer])
        place = self._parts.plan.topology.place
        self._wait_for_slowest(turn)
        self._asked[self._peer] = turn + 1
        self._wait_for_slowest(turn + len(self._answers))
        if stream.spec.num_shards > 1:
            missing = self._rates.missing_items(stream, number)
        else:
            here = stream.missing_items(number, [stream.held_items(number)])
            missing = self._first(turn, lambda: here)
        share, rest = divmod(missing, place.data_world)
        return share + int(place.data_rank < rest)

    def _first(self, turn: int, answer: Callable[[], int]) -> int:
        entry = self._answers[turn % len(self._answers)]
        with self._table.lock:
            if entry[0] == turn + 1:
                return int(entry[1])
        own = answer()
        with self._table.lock:
            if entry[0] != turn + 1:
                entry[:] = turn + 1, own
            return int(entry[1])

    def _wait_for_slowest(self, turn: int) -> None:
        """Wait until all living readers have read the answer that would be overwritten."""
        topology = self._parts.plan.topology
        memory = self._table.memory
        log = WaitLog(_CALLS)

        def lagging() -> list[int]:
            late = np.nonzero(self._asked <= turn - len(self._answers))[0].tolist()
            reads = [topology.places[topology.peers[peer]].reads for peer in late]
            return [
                peer
                for peer, does in zip(late, reads, strict=True)
                if does and memory.is_alive(peer)
            ]

        def named() -> str:  # by the first rank of the node that waits for them
            is_first = self._peer == min(set(range(len(topology.peers))) - set(late))
            return ", ".join(f"rank {topology.peers[peer]}" for peer in late) if is_first else ""

        while late := lagging():
            self._check()
            if log.note(named) > self._timeout_s:
                rule = f"must call can_sample() as often as this rank, within {self._timeout_s} s"
                remedy = (
                    "every rank must call it in turn; one that generates for longer needs a larger "
                )
                remedy += "timeout_s of the table's rate_limiter"
                raise PeerError(f"rank {topology.peers[late[0]]}", rule, None, remedy)
            time.sleep(_POLL_S)

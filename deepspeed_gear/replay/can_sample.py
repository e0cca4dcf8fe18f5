"""Answers about the next batch, equal on all ranks: `can_sample`, `missing_groups`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from deepspeed_gear.errors import ConfigError, PeerError
from deepspeed_gear.replay.batch_loader import BatchLoader
from deepspeed_gear.replay.packed.rollout_loader import RolloutLoader
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import WaitLog
from deepspeed_gear.writer.inserter import refuse_read_only

_POLL_S = 100e-6
_CALLS = "can_sample() or missing_groups()"


class Readiness:
    """Whether the next batch can be sampled, and what it lacks, with equal answers on all ranks.

    Calls are numbered; the first rank of a node that makes or ends a call answers it for all.
    """

    def __init__(self, parts: ReplayParts, loader: BatchLoader | RolloutLoader) -> None:
        self._parts = parts
        self._loader = loader
        self._rates = parts.rates
        self._timeout_s = parts.plan.config.rollout_timeout_s
        # Raises if a rank is lost.
        self._check = parts.context.check if parts.barrier is None else parts.barrier.check
        self._table = parts.train[0].table
        # By peer: how many calls it has made. A ring: call + 1 and the answer of the latest calls;
        # in a ring of 64, call 70 overwrites the answer of call 6, which all must have read.
        self._asked: np.ndarray = self._table.views["questions/asked"]
        self._answers: np.ndarray = self._table.views["questions/answers"]
        self._peer = self._table.memory.peer

    def can_sample(self) -> bool:
        """Return whether the next global batch could be selected at the first rank's call.

        Collective.
        """
        if self._loader.holds_batch:
            return True
        number = self._loader.next_number
        turn = int(self._asked[self._peer])
        streams = [stream for stream in self._parts.train if not stream.spec.is_optional]
        self._wait_for_calls(turn - len(self._answers) + 1)
        if self._parts.plan.topology.num_nodes == 1:
            answer = bool(self._first(turn, lambda: all(s.can_select(number) for s in streams)))
            self._asked[self._peer] = turn + 1
            return answer
        self._asked[self._peer] = turn + 1
        if self._rates.leads:  # no rank of this node writes while nodes divide quotas
            self._wait_for_calls(turn + 1)
        may_be_selecting = self._parts.prefetcher.is_alive
        # Every rank takes part for each stream, also after one that cannot be selected from.
        answers = [self._rates.may_select(stream, number, may_be_selecting) for stream in streams]
        return all(answers)

    def missing_groups(self, table: Table) -> int:
        """Return this rank's share of the groups to add for the next global batch. Collective.

        A remainder goes to the first ranks. Groups are counted once all ranks of the node have
        called.
        """
        name = table.spec.name
        if table.groups is None or name not in self._parts.plan.config.sampled_tables:
            remedy = f"set gear.tables.{name}.group"
            raise ConfigError(f"table {name}", "must have groups", None, remedy)
        refuse_read_only(table)
        if self._loader.holds_batch:
            return 0
        number = self._loader.next_number
        stream = self._parts.streams[name][TRAIN]
        turn = int(self._asked[self._peer])
        self._wait_for_calls(turn - len(self._answers) + 1)
        self._asked[self._peer] = turn + 1
        self._wait_for_calls(turn + 1)  # groups are counted after all have added theirs
        if stream.spec.num_shards > 1:
            missing = self._rates.missing_items(stream, number)
        else:
            here = stream.missing_items(number, [stream.held_items(number)])
            missing = self._first(turn, lambda: here)
        # 7 groups over 3 replicas: 3, 2 and 2.
        place = self._parts.plan.topology.place
        share, rest = divmod(missing, place.data_world)
        return share + int(place.data_rank < rest)

    def _first(self, turn: int, answer: Callable[[], int]) -> int:
        """Return the answer to a call: of the rank that stores one first, for all of the node."""
        entry = self._answers[turn % len(self._answers)]
        with self._table.lock:
            if entry[0] == turn + 1:
                return int(entry[1])
        own = answer()
        with self._table.lock:
            if entry[0] != turn + 1:
                entry[:] = turn + 1, own
            return int(entry[1])

    def _wait_for_calls(self, least: int) -> None:
        """Wait until every living reader of the node has made so many calls."""
        topology = self._parts.plan.topology
        memory = self._table.memory
        log = WaitLog(_CALLS)

        def lagging() -> list[int]:
            late = np.nonzero(self._asked < least)[0].tolist()
            reads = [topology.places[topology.peers[peer]].reads for peer in late]
            return [
                peer
                for peer, does in zip(late, reads, strict=True)
                if does and memory.is_alive(peer)
            ]

        def named() -> str:
            # One rank of a node logs: the first one that waits for the others.
            is_first = self._peer == min(set(range(len(topology.peers))) - set(late))
            return ", ".join(f"rank {topology.peers[peer]}" for peer in late) if is_first else ""

        while late := lagging():
            self._check()
            if log.note(named) > self._timeout_s:
                rule = f"must call can_sample() as often as this rank, within {self._timeout_s} s"
                remedy = (
                    "every rank must call it in turn; one that generates for longer needs a larger "
                    "timeout_s of the table's rate_limiter"
                )
                raise PeerError(f"rank {topology.peers[late[0]]}", rule, None, remedy)
            time.sleep(_POLL_S)

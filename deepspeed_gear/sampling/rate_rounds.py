"""Rate rounds: writers' quotas, `can_sample` and missing groups, decided by all nodes together.

Nodes divide what the table's rate limiter admits: their writers have quotas of items. Selections
renew these. Before the first selection, after a load, and when `can_sample` or `missing_groups` is
called, a round here does: the leader of each node sends the record of its store over the ranks'
control plane, and every rank computes the same answer from the records of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.sampling.batch_admission import NodeRate
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.records import Head

T = TypeVar("T")


@dataclass(frozen=True)
class RateRounds:
    """Rounds about the rate limiters of tables. Every method is collective over all ranks, returns
    the same on all, and is called outside of selections.

    Args:
        leads: Whether this rank changes its node's stores.
    """

    control_plane: ControlPlane
    leads: bool

    def set_quotas(self, streams: Sequence[BatchStream]) -> None:
        """Set the quotas of each node's writers."""
        for stream in streams:
            if stream.state.joint_limiter is not None:
                self.may_select(stream, int(stream.position[Head.NUMBER]))

    def may_select(self, stream: BatchStream, number: int, fixed: bool = False) -> bool:
        """Return whether a global batch was selected already, or could be now by all nodes.

        Quotas do not change if another thread may be in a selection (`fixed`).
        """
        limiter = stream.state.joint_limiter
        if limiter is None:
            can_select = partial(stream.can_select, number)
            answers = self.control_plane.all_results("looking at its node's items", can_select)
            # Where the table is in parts, one node's items are enough.
            return any(answers) if stream.spec.num_shards > 1 else all(answers)
        self._share_progress(stream)
        count = stream.spec.num_samples(number)

        def record() -> np.ndarray:
            with stream.table.lock:
                is_selected = stream.prepare(number)
                rate = limiter.rate(count, fixed, exact=True)
                return np.concatenate([[limiter.index, is_selected], rate])

        records = np.stack(self._of_leaders("the rate of its limiter", record))
        records = records[records[:, 0].argsort()]
        is_selected = bool(records[:, 1].any())
        rates = records[:, 2:]
        # No node may apply the records if one of them is fixed.
        applies = self.leads and not rates[:, NodeRate.IS_FIXED].any()
        with stream.table.lock:
            is_open = limiter.apply(rates, count) if applies else limiter.are_open(rates, count)
        self.control_plane.barrier()  # after it ranks may write, by the new quotas
        return is_open or is_selected

    def missing_items(self, stream: BatchStream, number: int) -> int:
        """Return how many items must be added, on any nodes, before a global batch is selected."""
        self._share_progress(stream)

        held_items = partial(stream.held_items, number)
        held = self._of_leaders("counting the items of its node", held_items)
        return stream.missing_items(number, held)

    def _share_progress(self, stream: BatchStream) -> None:
        """Share the progress of the stores of a ledger, if there is one."""
        ledger = stream.table.ledger
        if ledger is None:
            return
        limiter = stream.state.limiter
        assert limiter is not None

        def progress() -> np.ndarray:
            with stream.table.lock:
                return limiter.progress()

        of_stores = self._of_leaders("the progress of its prompts", progress)
        with stream.table.lock:
            ledger.take_progress(np.stack(of_stores))

    def _of_leaders(self, what: str, record: Callable[[], T]) -> list[T]:
        """Return what the leader of each node records."""
        of_ranks = self.control_plane.all_results(what, lambda: [record()] if self.leads else [])
        return [one for of_rank in of_ranks for one in of_rank]

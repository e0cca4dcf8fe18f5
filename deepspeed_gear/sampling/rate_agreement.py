"""Rate agreement: the nodes agree on what a table's rate limiter admits, outside of a selection.

Nodes divide what the table's rate limiter admits: their writers have quotas of items. Selections
renew these; before the first one, after a load, and when `can_sample` asks, `may_select` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.rate_limiting import NodeRate
from deepspeed_gear.store.records import Head


def agree_on_quotas(exchange: ControlPlane, leads: bool, streams: Sequence[BatchStream]) -> None:
    """Agree on the quotas of each node's writers. Collective; arguments as in `may_select`."""
    for stream in streams:
        if stream.state.joint_limiter is not None:
            may_select(exchange, leads, stream, int(stream.position[Head.KEY]))


def may_select(
    exchange: ControlPlane, leads: bool, stream: BatchStream, key: int, fixed: bool = False
) -> bool:
    """Return whether a global batch was selected already, or could be by all nodes together now.

    Collective over all ranks (the same result), outside of a selection; if another thread may be in
    one (`fixed`), quotas do not change. `leads`: this rank changes its node's shards.
    """
    limiter = stream.state.joint_limiter
    count = stream.spec.num_samples(key)
    assert limiter is not None
    agree_on_prompts(exchange, leads, stream)

    def record() -> tuple[int, bool, np.ndarray] | None:
        if not leads:
            return None
        with stream.table.lock:
            return limiter.index, stream.prepare(key), limiter.record(count, fixed, exact=True)

    records = exchange.collect("the record of its rate limiter", record)
    found = sorted((one for one in records if one is not None), key=lambda one: one[0])
    messages = np.stack([words for _, _, words in found])
    changes = (
        leads and not messages[:, NodeRate.IS_FIXED].any()
    )  # a fixed record: no node may `apply`
    with stream.table.lock:
        is_open = limiter.apply(messages, count) if changes else limiter.are_open(messages, count)
    exchange.barrier()  # after it ranks may write, by the new quotas
    return is_open or any(was_selected for _, was_selected, _ in found)


def agree_on_prompts(exchange: ControlPlane, leads: bool, stream: BatchStream) -> None:
    """Agree on the progress of the stores of a ledger, if there is one. As `may_select`."""
    ledger = stream.table.ledger
    if ledger is None:
        return
    lock = stream.table.lock
    limiter = stream.state.limiter
    assert limiter is not None

    def progress() -> np.ndarray | None:
        with lock:
            return limiter.progress() if leads else None

    of_ranks = exchange.collect("the progress of its prompts", progress)
    with lock:
        ledger.agree(np.stack([one for one in of_ranks if one is not None]))

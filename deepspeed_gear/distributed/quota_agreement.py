"""Agreement of all nodes on the rate limiter of a table that they hold together.

The nodes divide what the rate limiter admits: each node's writers have a quota of items that they may add.
The selections renew the quotas; here they are agreed on before the first one, after a load, and when
`can_sample` asks.
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
    joint = [stream for stream in streams if stream.state.joint_limiter is not None]
    for stream in joint:
        may_select(exchange, leads, stream, int(stream.position[Head.KEY]))
    if joint:
        exchange.barrier()  # after it ranks may write


def may_select(
    exchange: ControlPlane, leads: bool, stream: BatchStream, key: int, fixed: bool = False
) -> bool:
    """Return whether all nodes together admit a selection, outside of one. Collective over all ranks.

    Args:
        leads: Whether this rank is the one of its node that changes the node's shards.
        stream: The training stream, with a rate limiter of all nodes.
        key: Of the global batch that is asked for.
        fixed: Whether another thread of this rank may be in a selection: then quotas do not change.
    Returns:
        Whether the batch was selected already, or could be now; the same on every rank.
    """
    limiter, count = stream.state.joint_limiter, stream.spec.num_samples(key)
    assert limiter is not None

    def record() -> tuple[int, bool, np.ndarray] | None:
        if not leads:
            return None
        with stream.table.lock:
            return limiter.index, stream.prepare(key), limiter.record(count, fixed, exact=True)

    mine = exchange.agree("the record of its rate limiter", record)
    found = sorted((one for one in exchange.gather(mine) if one is not None), key=lambda one: one[0])
    messages = np.stack([words for _, _, words in found])
    changes = leads and not messages[:, NodeRate.IS_FIXED].any()  # a fixed record: no node may `apply`
    with stream.table.lock:
        is_open = limiter.apply(messages, count) if changes else limiter.are_open(messages, count)
    return is_open or any(was_selected for _, was_selected, _ in found)

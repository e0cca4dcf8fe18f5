"""Reverb: servers in the ranks' processes, so that their own rank reads without gRPC;
`TrajectoryDataset`.
"""

from __future__ import annotations

import reverb
import tensorflow as tf
import torch
from support.nodes import address
from speed import work
from torch import Tensor

from training.model import COLUMNS, MODES

TABLE = "main"
PORT = 8000
PORT_OF_ALL = 8001
_servers: list[reverb.Server] = []


def _serve(port: int, first: int, count: int) -> None:
    """Serve trajectories; each is one append, which is faster than its steps."""
    signature = {
        n: tf.TensorSpec((1, work.EPISODE, *shape), tf.float32) for n, shape in COLUMNS.items()
    }
    policies = reverb.selectors.Uniform(), reverb.selectors.Fifo()
    table = reverb.Table(
        TABLE, *policies, count, reverb.rate_limiters.MinSize(1), signature=signature
    )
    _servers.append(reverb.Server([table], port=port))
    with reverb.Client(f"localhost:{port}").trajectory_writer(num_keep_alive_refs=1) as writer:
        for number in range(first, first + count):
            rows = work.steps(number * work.EPISODE, work.EPISODE)
            writer.append({name: rows[name] for name in COLUMNS})
            writer.create_item(TABLE, 1.0, {name: writer.history[name][-1:] for name in COLUMNS})
            writer.flush(block_until_num_items=8)


def serve(rank: int, world: int, count: int) -> None:
    """Serve this node's part, on node 0 the whole too."""
    _serve(PORT, rank * count // world, count // world)
    if rank == 0:
        _serve(PORT_OF_ALL, 0, count)


class Source:
    """Batches of whole trajectories that a rank draws by itself."""

    def __init__(self, mode: str, batch: int, rank: int, world: int, folder: str) -> None:
        one = [f"{address(0)}:{PORT_OF_ALL}"]
        own = [f"localhost:{PORT}"]
        every = [f"{address(node)}:{PORT}" for node in range(world)]
        servers = dict(zip(MODES["reverb"], (one, own, every), strict=True))[mode]
        at_once = 2 * batch // len(servers)
        options = {"max_in_flight_samples_per_worker": at_once, "num_workers_per_iterator": 2}
        sets = [
            reverb.TrajectoryDataset.from_table_signature(one, TABLE, **options) for one in servers
        ]
        drawn = sets[0] if len(sets) == 1 else tf.data.Dataset.sample_from_datasets(sets)
        self._batches = iter(drawn.batch(batch, drop_remainder=True).prefetch(1))

    def next(self) -> dict[str, Tensor]:
        """Return a batch, whose memory torch shares."""
        data = next(self._batches).data
        shared = tf.experimental.dlpack.to_dlpack
        return {name: torch.from_dlpack(shared(data[name])).squeeze(1) for name in COLUMNS}

    def close(self) -> None:
        del self._batches

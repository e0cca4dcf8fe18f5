"""TransferQueue: the key-value interface to add, GRPOGroupNSampler to select, a column per task.

It has no packing: the sequences of a step are concatenated in their order, as its user would.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # all of it is local

import ray
import torch
import transfer_queue as tq
from speed.rollouts import MEMBERS, Micro, Rollouts, budget_packs
from tensordict import TensorDict

from peers.interface import Array, Rows, System

COLUMNS = ["tokens", "loss_mask", "logp", "reward"]


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _packs(data: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the micro batches of a step."""
    columns = {name: data[name].unbind() for name in data.keys()}  # noqa: SIM118
    lengths = [len(row) for row in columns["tokens"]]
    for pack in budget_packs(lengths):
        micro = {
            name: torch.stack([rows[at] for at in pack]).flatten()
            if name == "reward"
            else torch.cat([rows[at] for at in pack])
            for name, rows in columns.items()
        }
        micro["tokens"] = micro["tokens"].long()
        micro["targets"] = micro["tokens"].roll(-1)
        micro["position_ids"] = torch.cat([torch.arange(lengths[at]) for at in pack])
        micro["cu_seqlens"] = torch.tensor([0, *(lengths[at] for at in pack)]).cumsum(
            0, dtype=torch.int32
        )
        yield micro


def start(config: Any = None) -> tuple[Any, Callable[[], None]]:
    """Start Ray and TransferQueue; return its client, and what ends both."""
    folder = tempfile.mkdtemp(prefix="ray-")
    options = {
        "include_dashboard": False,
        "log_to_driver": False,
        "object_store_memory": 100_000_000,
    }
    ray.init(num_cpus=4, _temp_dir=folder, **options)
    tq.init(config)

    def end() -> None:
        tq.close()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    return tq.get_client(), end


class TqRollouts(Rollouts):
    def __init__(self, num_tokens: int, groups: int, step: int) -> None:
        sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=MEMBERS)
        self._client, self._end = start({"controller": {"sampler": sampler}})
        self._size = step * MEMBERS
        self._filled: list[torch.Tensor] = []

    def add(self, number: int, group: list[Rows]) -> None:
        fields = {
            name: jagged([torch.from_numpy(response[name]) for response in group])
            for name in ("tokens", "loss_mask", "logp")
        }
        fields["reward"] = torch.tensor([response["reward"] for response in group])
        keys = [f"{number}_{member}" for member in range(MEMBERS)]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, len(group)))

    def select(self) -> Any:
        return self._client.get_meta(COLUMNS, self._size, "train", task_name="train")

    def pack(self, step: Any) -> Iterator[Any]:
        return _packs(self._client.get_data(step.select_fields(["tokens"])))

    def tokens(self, micro: Any) -> Array:
        return micro["tokens"].numpy()

    def fill(self, micro: Any, values: Array) -> None:
        self._filled += torch.from_numpy(values).split(micro["cu_seqlens"].diff().tolist())

    def filled(self, step: Any) -> None:
        self._client.put(
            TensorDict({"ref_logp": jagged(self._filled)}, len(self._filled)), metadata=step
        )
        self._filled = []

    def train(self, step: Any) -> Iterator[Any]:
        yield from _packs(self._client.get_data(step))
        self._client.clear_samples(step)

    def micro(self, found: Any) -> Micro:
        tokens, *values = (
            found[name].numpy() for name in ("tokens", "loss_mask", "logp", "ref_logp")
        )
        return Micro(
            tokens, tokens[found["cu_seqlens"][:-1]], found["reward"].numpy(), tokens, *values
        )

    def close(self) -> None:
        self._end()


SYSTEM = System("transferqueue", rollouts=TqRollouts)

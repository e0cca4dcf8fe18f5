"""Bytes per second of TransferQueue over two backends, in turns: its own in memory, and this one.

It runs in the environment of TransferQueue. Each backend has a controller and a client of its own
in this process; a call is what a user writes (`client.put`, `client.get_data`), with everything
that TransferQueue does around the storage.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.utils.zmq_utils import process_zmq_server_info

from deepspeed_gear.integrations.transfer_queue import BACKEND, gear_backend

THEIRS = "SimpleStorage"
BACKENDS: dict[str, dict[str, Any]] = {
    THEIRS: {
        "storage_backend": THEIRS,
        THEIRS: {"total_storage_size": None, "num_data_storage_units": 2, "zmq_info": None},
    },
    BACKEND: gear_backend(),
}
Fields = dict[str, Any]


def jagged(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows = [torch.arange(int(length)).to(dtype) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def responses(count: int, longest: int) -> Fields:
    """Make responses of language models, ragged: 21 bytes a token."""
    lengths = torch.randint(longest // 4, longest + 1, (count,), generator=GENERATOR)
    return {
        "input_ids": jagged(lengths, torch.int64),
        "position_ids": jagged(lengths, torch.int64),
        "log_probs": jagged(lengths, torch.float32),
        "loss_mask": jagged(lengths, torch.bool),
        "reward": torch.rand(count, 1),
    }


GENERATOR = torch.Generator().manual_seed(0)
CASES: dict[str, Callable[[bool], Fields]] = {
    "512 responses of up to 1,024 tokens": lambda quick: responses(16 if quick else 512, 1024),
    "256 responses of up to 16,384 tokens": lambda quick: responses(8 if quick else 256, 16384),
    "a column of 512 rows of 4,096 float32": lambda quick: {
        "values": torch.rand(8 if quick else 512, 4096)
    },
    "256 images of 3 x 224 x 224 bytes": lambda quick: {
        "images": torch.zeros(8 if quick else 256, 3, 224, 224, dtype=torch.uint8)
    },
    "512 messages, as Python objects": lambda quick: {
        "messages": NonTensorStack(
            *[{"role": "user", "content": "text " * 50, "turn": at} for at in range(512)]
        )
    },
}


def start(name: str) -> Any:
    """Start a controller and the storage of a backend; return a client."""
    controller = TransferQueueController.options(name=f"controller-{name}").remote()
    conf = OmegaConf.create({}, flags={"allow_objects": True})
    conf = OmegaConf.merge(conf, {"backend": BACKENDS[name]})
    provider = StorageBootstrapProvider.get_provider(name)
    assert provider is not None
    held = provider(conf)
    client = TransferQueueClient(f"client-{name}", process_zmq_server_info(controller))
    client.initialize_storage_manager(manager_type=name, config=conf.backend[name])
    return client, controller, held


def num_bytes(fields: Fields) -> int:
    total = 0
    for value in fields.values():
        if isinstance(value, torch.Tensor):
            plain = value.values() if value.is_nested else value
            total += plain.numel() * plain.element_size()
        else:
            total += sum(len(str(one)) for one in value.tolist())
    return total


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def is_equal(found: TensorDict, fields: Fields) -> bool:
    for name, expected in fields.items():
        if not isinstance(expected, torch.Tensor):
            if [*found[name]] != expected.tolist():
                return False
            continue
        rows = found[name].unbind()
        if not all(map(torch.equal, rows, expected.unbind())):
            return False
    return True


def turn(client: Any, fields: Fields, number: int) -> dict[str, float]:
    """Put a batch, read it at once and in parts of 64, and clear it."""
    count = len(next(iter(fields.values())))
    data = TensorDict(fields, batch_size=count)
    partition = f"turn {number}"
    put, meta = seconds(lambda: client.put(data=data, partition_id=partition))
    get, found = seconds(lambda: client.get_data(meta))
    assert is_equal(found, fields)
    size = min(64, count)
    parts = [meta.select_samples([*range(at, at + size)]) for at in range(0, count, size)]
    in_parts, _ = seconds(lambda: [client.get_data(part) for part in parts])
    clear, _ = seconds(lambda: client.clear_samples(meta))
    return {"put": put, "get": get, "get by 64": in_parts, "clear": clear}


def main() -> None:
    quick = "--quick" in sys.argv
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    started = {name: start(name) for name in BACKENDS}
    for case, make in CASES.items():
        fields = make(quick)
        size = num_bytes(fields)
        times: dict[str, list[dict[str, float]]] = {name: [] for name in BACKENDS}
        for number in range(2 if quick else 14):
            names = [*BACKENDS] if number % 2 else [*BACKENDS][::-1]
            for name in names:
                times[name].append(turn(started[name][0], fields, number))
        for call in ("put", "get", "get by 64", "clear"):
            # The first turn warms up.
            each = {name: [one[call] for one in times[name][1:]] for name in BACKENDS}
            middle = {name: median(values) for name, values in each.items()}
            ratios = [t / o for t, o in zip(each[THEIRS], each[BACKEND], strict=True)]
            row = {
                "case": case,
                "call": call,
                "bytes": size,
                "theirs_ms": round(middle[THEIRS] * 1e3, 2),
                "ours_ms": round(middle[BACKEND] * 1e3, 2),
                "theirs_mb_s": round(size / middle[THEIRS] / 1e6, 1),
                "ours_mb_s": round(size / middle[BACKEND] / 1e6, 1),
                "ratio": round(median(ratios), 2),
            }
            print(json.dumps(row), flush=True)
    for client, controller, _ in started.values():
        client.close()
        ray.kill(controller)
    ray.shutdown()


if __name__ == "__main__":
    main()

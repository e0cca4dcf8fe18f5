"""Ranks that act and learn."""

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import prefix, shared_files
from process_support import call_on_ranks

import deepspeed_gear
from deepspeed_gear import Column, Schema
from deepspeed_gear.errors import NotReadyError

SECTION = {
    "tables": {"main": {"capacity_steps": 100, "rate_limiter": {"min_size": 8}}},
    "sampler": {"kind": "uniform", "unit": "step"},
    "fields": {"observation": {}},
    "timeout_s": 3600.0,  # no wait ends by it
}


def act(section: dict[str, Any]) -> list[list[int]]:
    """Act on one rank, which is told that it is not ready, as all others are; return the sample
    numbers.

    In the first turn no rank has a writer: one waits for items that the other adds, and both wait
    for none.
    """
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 1)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "gear": section}
    schemas = {"main": Schema([Column("observation", "float32", (2,), "observation")])}
    options = {
        "model": model,
        "model_parameters": model.parameters(),
        "config": config,
        "schemas": schemas,
    }
    engine, *_ = deepspeed_gear.initialize(**options)
    replay = engine.gear
    writer = None
    seen = []
    for turn in range(3):
        relayed = "" if rank == 1 or turn == 0 else r".* \[raised on rank 1\]$"
        with pytest.raises(NotReadyError, match=f"^table main must be filled first{relayed}"):
            engine.gear_sample()
        assert not replay.can_sample()
        if rank == 1:
            time.sleep(0 if turn else 0.5)
            for _ in range(2):
                add = replay.add if writer is None else writer.add
                add({"observation": np.full((4, 2), turn, np.float32)})
        if turn:
            dist.barrier()
            assert replay.can_sample()
        batch = engine.gear_sample()
        assert (batch["observation"] == turn).all()
        seen.append(batch.sample_number.tolist())
        engine.backward(engine(batch["observation"]).mean())
        engine.step()
        dist.barrier()
        if rank == 1:
            replay.clear()
            writer = writer or replay.writer()
        dist.barrier()
    replay.close()
    return seen


def test_a_rank_that_would_wait_for_itself_tells_all() -> None:
    """No process waits, no process takes it for a failure, and the batch comes when it can."""
    seen = call_on_ranks(2, act, {**SECTION, "shared_memory": {"prefix": prefix()}})
    for turn in range(3):
        numbers = sorted(number for of_rank in seen for number in of_rank[turn])
        assert numbers == list(range(8 * turn, 8 * turn + 8))
    assert shared_files(prefix()) == []

"""Ranks of which one acts in environments: it is told that it is not ready, and so are all others.

In the first turn no rank has a writer: one waits for items that the other adds, and both wait for none.

acting_ranks.py FOLDER SECTION
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch

import deepspeed_gear
from deepspeed_gear import Column, Schema
from deepspeed_gear.errors import NotReadyError

folder, section = Path(sys.argv[-2]), json.loads(sys.argv[-1])
schema = Schema([Column("observation", "float32", (2,), "observation")])
deepspeed.init_distributed()
rank = torch.distributed.get_rank()
model = torch.nn.Linear(2, 1)
optimizer = {"type": "SGD", "params": {"lr": 0.1}}
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "gear": section}
engine, *_ = deepspeed_gear.initialize(
    model=model, model_parameters=model.parameters(), config=config, schemas={"main": schema}
)
replay = engine.gear
writer, seen = None, []
for turn in range(3):
    begin = time.monotonic()
    relayed = "" if rank == 1 or turn == 0 else r".* \[raised on rank 1\]$"
    told = f"^table main must be filled first{relayed}"
    with pytest.raises(NotReadyError, match=told):
        engine.gear_sample()
    assert time.monotonic() - begin < 20
    assert not replay.can_sample()
    if rank == 1:
        time.sleep(0 if turn else 0.5)
        for _ in range(2):
            add = replay.add if writer is None else writer.add
            add({"observation": np.full((4, 2), turn, np.float32)})
    if turn:
        torch.distributed.barrier()
        assert replay.can_sample()
    batch = engine.gear_sample()
    assert (batch["observation"] == turn).all()
    seen.append(batch.sample_number.tolist())
    engine.backward(engine(batch["observation"]).mean())
    engine.step()
    torch.distributed.barrier()
    if rank == 1:
        replay.clear()
        writer = writer or replay.writer()
    torch.distributed.barrier()
(folder / f"{rank}.json").write_text(json.dumps(seen))
replay.close()

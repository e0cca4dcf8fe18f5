"""Train under torchrun, save after every second step, and go on from the latest checkpoint at each start.

Rank 1 kills itself once, before step 5. Every rank appends what it saw to FOLDER/seen-ATTEMPT.RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from engine_parts import Model, ds_config, rank

import deepspeed_gear

STEPS, DIES_AT = 8, 5
folder, section = Path(sys.argv[1]), json.loads(sys.argv[2])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
model = Model(12)
config = ds_config(section, zero_optimization={"stage": 1})
engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
if (folder / "checkpoints" / "latest").exists():
    engine.load_checkpoint(str(folder / "checkpoints"))
with (folder / f"seen-{attempt}.{rank()}").open("w") as seen:
    while engine.global_steps < STEPS:
        if engine.global_steps == DIES_AT and attempt == "0" and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = engine.gear_sample()
        samples = zip(
            batch.sample_number.tolist(), batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True
        )
        engine.backward(engine(batch))
        engine.step()
        engine.gear_update_priorities(batch, ((batch.trajectory_id * 31 + batch.anchor) % 17 + 1).float())
        seen.write(json.dumps([engine.global_steps - 1, list(samples)]) + "\n")
        seen.flush()
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(str(folder / "checkpoints"))
engine.destroy()

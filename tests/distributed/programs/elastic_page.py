"""Run train.py of change-ranks.md under torchrun: `elastic_page.py CONFIG FOLDER STEPS`.

A rank of the agent whose AGENT is "second" kills this agent and itself in the fourth step, as where a node is
lost. Every rank appends the samples of each micro batch to FOLDER/seen-ATTEMPT.RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from batch_records import priorities
from engine_parts import Model
from how_to_pages import run
from page_support import page_code

from deepspeed_gear import Batch

DIES_AT = 3
attempt, rank, folder = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], Path(sys.argv[2])


def loss_of(engine: Any, batch: Batch) -> Any:
    if engine.global_steps == DIES_AT and os.environ["AGENT"] == "second":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    known = batch.sample_number, batch.trajectory_id, batch.anchor
    samples = list(zip(*(tensor.tolist() for tensor in known), strict=True))
    loss = engine(batch)
    with (folder / f"seen-{attempt}.{rank}").open("a") as seen:
        seen.write(json.dumps([engine.global_steps, samples]) + "\n")
    engine.gear_update_priorities(batch, priorities(batch))
    return loss


if __name__ == "__main__":
    code = page_code("change-ranks.md", "load_universal")
    run(code, "train.py", sys.argv[1:], loss_of=loss_of, make_model=lambda: Model(12))

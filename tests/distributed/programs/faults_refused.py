"""Build a Replay on every rank from what only some ranks do right, many cases in one process group.

    faults_refused.py FOLDER

FOLDER/cases.json: a list of cases, each with the section and the working directory of every rank. A rank
prints a JSON line per case: the kind and text of the error, or the trajectories that it sampled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from deepspeed_gear import GearError, Replay

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
for case in json.loads((folder / "cases.json").read_text()):
    os.chdir(folder / case["folders"][rank])
    try:
        with Replay(case["sections"][rank]) as replay:
            found = {"kind": "none", "text": str(replay.sample().trajectory_id.tolist())}
    except GearError as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    print("FOUND", json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()

"""Train packed rollouts over nodes, one case after the other, and write what each rank sees.

The last argument names a JSON file: `cases` by name, `out`, and `saves`, which one process has made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from packed_node_cases import run_case

wanted = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
out, known = Path(wanted["out"]), wanted["saves"]
for name, case in wanted["cases"].items():
    folder, other = (out / "saves" / name, Path(known) / name) if case.get("resumes") else (None, None)
    found = run_case(case, rank, world, folder, other)
    (out / f"{name}.{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()

"""Sample from replays over all ranks, one case after the other, and write what each rank sees.

The last argument names a JSON file: `cases` (gear sections by name), `steps`, `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from replay_cases import run_case

wanted = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
for name, section in wanted["cases"].items():
    found = run_case(section, wanted["steps"], 1)
    at = Path(wanted["out"]) / f"{name}.{dist.get_rank()}.json"
    at.write_text(json.dumps(found))
dist.destroy_process_group()

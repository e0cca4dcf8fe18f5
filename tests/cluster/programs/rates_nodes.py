"""Take the batches of tables with rates and limits of draws, one case after the other.

The last argument names a JSON file: `cases` (section, folder and state by name), `out`. Each rank writes what
it sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from rate_cases import rest

wanted = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
found = {name: rest(section, Path(at), state) for name, (section, at, state) in wanted["cases"].items()}
(Path(wanted["out"]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()

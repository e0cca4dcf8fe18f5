"""Tables with rates and limits of draws: their batches, their writers, and waits for them.

The last argument names a JSON file: `cases` (section, folder and state by name), `phases` (`writers_nodes`,
by name; none: no waits either), `out`. Each rank writes what it sees.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gates_nodes
import torch.distributed as dist
import writers_nodes
from rate_cases import rest

wanted = json.loads(Path(sys.argv[-1]).read_text())
rank, out, phases = int(os.environ["RANK"]), Path(wanted["out"]), wanted["phases"]
actors = writers_nodes.start(phases, rank, out)
dist.init_process_group("gloo")
found: dict[str, Any] = {
    "cases": {name: rest(section, Path(at), state) for name, (section, at, state) in wanted["cases"].items()},
    "phases": {
        name: writers_nodes.learn(phase["section"], phase["batches"], phase["lose"], actors[name])
        for name, phase in phases.items()
    },
}
if phases:
    found["late"] = gates_nodes.late(rank)
    found["collecting"] = gates_nodes.collecting(rank)
    found["acting"] = gates_nodes.acting(rank, out)
    found["ended"] = gates_nodes.ended(rank)
(out / f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()

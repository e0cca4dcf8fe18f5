"""What the store costs in memory, what a second rank adds, and training on more data than memory.

python benchmarks/memory.py [--json F] [--limit-mb 512] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.report import Disturbance, document, print_table, write_json
from support.workloads import workload
from memory_limited import drop_from_cache, run_limited

from deepspeed_gear import Column, DatasetWriter, Replay, Schema

STORE_BOUND, RANKS_BOUND, DATA_FACTOR = 1.05, 0.05, 3
_STEPS, _WIDTH = 2000, 60  # of a trajectory of the large data set: 512 kB
_SCHEMA = Schema(
    [
        Column("observation", "float32", (_WIDTH,), "observation"),
        Column("action", "float32", (3,), "action"),
        Column("reward", "float32", (), "reward"),
    ]
)


@dataclass
class Row:
    """One measurement.

    Args:
        value: What has the bound.
        bound: What it must not exceed, or must reach in the case of `trains`.
        extra: More about it.
    """

    what: str
    value: float
    bound: float
    holds: bool
    extra: dict[str, Any]


# ---- the store -----------------------------------------------------------------------------------


def store(scale: float) -> Row:
    """Compare the bytes of the whole store of W1 with the bytes of its columns."""
    stored = workload("W1", scale)
    with stored.replay("20", 128) as replay:
        found = replay.statistics()
    ratio = found["store_bytes"] / found["payload_bytes"]
    kept = ("store_bytes", "payload_bytes", "huge_bytes")
    return Row(
        "store over payload, W1", ratio, STORE_BOUND, ratio <= STORE_BOUND, {k: found[k] for k in kept}
    )


def memory_of_rank(scale: float) -> dict[str, int]:
    """Hold W1, touch all of it by sampling, and read what the kernel counts for this process. Collective."""
    before = proportional_memory()
    stored = workload("W1", scale)
    with stored.replay("whole", 8 * dist.get_world_size()) as replay:
        for _ in range(3 * len(replay) // (8 * dist.get_world_size()) + 1):
            replay.sample()
        for column in stored.schema:  # each rank maps every page, whatever it has drawn
            replay.tables["main"].tensor(column.name).sum()
        dist.barrier()
        after = proportional_memory()
        dist.barrier()
    return {key: after[key] - before[key] for key in after}


def proportional_memory() -> dict[str, int]:
    """Return this process's share of memory in bytes: a page that n processes map counts 1/n in each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {key: found[key] for key in ("Pss", "Pss_Shmem", "Pss_Anon")}


def ranks(scale: float) -> Row:
    """Compare the shared memory of two ranks with that of one."""
    one, two = (run_ranks(n, memory_of_rank, scale) for n in (1, 2))
    total = {n: sum(of_rank["Pss_Shmem"] for of_rank in found) for n, found in ((1, one), (2, two))}
    added = total[2] / total[1] - 1
    private = max(of_rank["Pss_Anon"] for of_rank in two)
    extra = {"shared_bytes_1": total[1], "shared_bytes_2": total[2], "private_bytes_a_rank": private}
    return Row("added by a second rank, W1", added, RANKS_BOUND, added < RANKS_BOUND, extra)


# ---- more data than memory -----------------------------------------------------------------------


def larger_than_memory(limit_bytes: int, data_bytes: int, folder: Path) -> Row:
    """Train one epoch on a mapped data set in a process that may use `limit_bytes`."""
    path, report = folder / "large", folder / "report.json"
    random = np.random.default_rng(0)
    observation = random.standard_normal((_STEPS, _WIDTH), np.float32)
    action = observation[:, :3] @ random.standard_normal((3, 3)).astype(np.float32)
    count = -(-data_bytes // (_STEPS * _SCHEMA.row_bytes))
    with DatasetWriter(path, _SCHEMA) as writer:
        for number in range(count):
            reward = np.full(_STEPS, number, np.float32)
            writer.add({"observation": observation, "action": action, "reward": reward})
    drop_from_cache(path)
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--train", str(path), str(report)]
    used = run_limited(command, limit_bytes)
    extra = {
        "data_bytes": count * _STEPS * _SCHEMA.row_bytes,
        "limit_bytes": limit_bytes,
        **used,
        "seconds": round(time.monotonic() - begin, 1),
        **json.loads(report.read_text()),
    }
    factor = extra["data_bytes"] / limit_bytes
    seen = extra["trajectories_seen"] == count and extra["wrong_rows"] == 0
    return Row("data over memory, trained", factor, DATA_FACTOR, factor >= DATA_FACTOR and seen, extra)


def train(data: Path, report: Path) -> None:
    """Train one epoch over every trajectory, whole; runs in the limited process."""
    torch.manual_seed(0)
    fields = {column.name: {"length": _STEPS} for column in _SCHEMA}
    replay = Replay(
        {
            "data": {"path": str(data), "load": "mmap"},
            "batch_size": 8,
            "fields": fields,
            "sampler": {"kind": "epoch", "unit": "trajectory", "anchors": "start"},
        }
    )
    model = torch.nn.Linear(_WIDTH, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, seen, wrong = [], set(), 0
    for _ in range(-(-len(replay) // 8)):
        batch = replay.sample()
        loss = (model(batch["observation"]) - batch["action"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.update(batch.trajectory_id.tolist())
        wrong += int((batch["reward"] != batch.trajectory_id[:, None]).sum())
    faults = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[9])  # major faults
    result = {
        "batches": len(losses),
        "loss_before": losses[0],
        "loss_after": losses[-1],
        "trajectories_seen": len(seen),
        "wrong_rows": wrong,
        "major_faults": faults,
    }
    replay.close()
    report.write_text(json.dumps(result))


def run(quick: bool = False, limit_bytes: int = 512 << 20) -> list[Row]:
    """Measure everything.

    Args:
        quick: Few trajectories; the data set is then smaller than the limit, whose row does not hold.
        limit_bytes: Memory of the limited process, all included: Python and torch take about half of 512 MB.
    """
    scale = 0.02 if quick else 1.0
    rows = [store(scale), ranks(scale)]
    with tempfile.TemporaryDirectory(prefix="gear-memory-") as folder:
        rows.append(
            larger_than_memory(limit_bytes, 24 << 20 if quick else DATA_FACTOR * limit_bytes, Path(folder))
        )
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--limit-mb", type=int, default=512, help="memory of the limited process, MiB")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--train", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(*options.train)
        return
    disturbance = Disturbance()
    rows = run(options.quick, options.limit_mb << 20)
    print_table(
        ("what", "value", "bound", "holds", "more"),
        [(r.what, r.value, r.bound, r.holds, " ".join(f"{k}={v}" for k, v in r.extra.items())) for r in rows],
    )
    if options.json is not None:
        lines = [{**{k: v for k, v in asdict(row).items() if k != "extra"}, **row.extra} for row in rows]
        write_json(options.json, document(disturbance, lines))


if __name__ == "__main__":
    main()

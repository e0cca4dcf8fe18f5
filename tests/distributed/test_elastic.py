"""torchrun --max-restarts: a rank that dies once costs only what came after the latest checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from gear_support import config_of
from process_support import PROGRAMS, environment, free_port

from deepspeed_gear import Replay

STEPS, SAVED, DIES_AT, BATCH = 8, 4, 5, 12


def test_after_a_restart_come_the_batches_of_an_uninterrupted_run(dataset: Path, tmp_path: Path) -> None:
    sampler = {"kind": "prioritized", "unit": "step"}
    gear = config_of(dataset, fields={"observation": {"length": 4}, "action": {}}, sampler=sampler, seed=3)
    gear = {**gear, "timeout_s": 20.0, "prefetch": 2}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [*command, str(PROGRAMS / "elastic.py"), str(tmp_path), json.dumps(gear)],
        env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = uninterrupted(gear)
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    assert sorted(first) == list(range(DIES_AT))
    assert sorted(second) == list(range(SAVED, STEPS))
    assert all(first[step] == wanted[step] for step in first)
    assert all(second[step] == wanted[step] for step in second)


def seen(folder: Path, attempt: int) -> dict[int, list[Any]]:
    """Return the global batch of each step that both ranks have ended."""
    batches, ranks = defaultdict(list), defaultdict(int)
    for rank in range(2):
        for line in (folder / f"seen-{attempt}.{rank}").read_text().splitlines():
            step, samples = json.loads(line)
            batches[step] += samples
            ranks[step] += 1
    return {step: sorted(batches[step]) for step in batches if ranks[step] == 2}


def uninterrupted(gear: dict[str, Any]) -> dict[int, list[Any]]:
    found = {}
    with Replay({**gear, "batch_size": BATCH}) as replay:
        for step in range(STEPS):
            batch = replay.sample()
            samples = zip(
                batch.sample_number.tolist(), batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True
            )
            found[step] = sorted(map(list, samples))
            replay.update_priorities(batch, ((batch.trajectory_id * 31 + batch.anchor) % 17 + 1).float())
    return found

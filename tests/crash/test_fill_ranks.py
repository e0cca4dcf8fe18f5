"""Two ranks fill a column; one is killed in the middle, and what is not filled is filled by the
next run.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from process_support import exit_status, in_child
from rollout_support import COLUMNS, responses, section

from deepspeed_gear import PeerError, Replay
from deepspeed_gear.sampling.batch_sizes import BatchInfo

COUNT = 30
KNOWN = 3
STORED = responses(COUNT)


def fill(folder: Path, rank: int, config: dict[str, Any], resumes: bool) -> None:
    """Fill what lacks the column; the first time rank 1 is killed before its second micro batch is
    filled.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{resumes}", rank=rank, world_size=2
    )
    with Replay(config, info=None if resumes else BatchInfo(1, 1, 2)) as replay:
        if resumes:
            replay.load(folder / "saved")
        elif rank == 0:
            for response in STORED:
                replay.add(response)
            replay.fill(KNOWN, ref=STORED[KNOWN]["logp"])
        if not resumes:
            replay.save(folder / "saved")
        filled: set[int] = set()
        try:
            for number, micro in enumerate(replay.forward("ref")):
                if not resumes and rank == number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                micro.fill(ref=micro["logp"])
                filled |= set(micro.trajectory_id.tolist())
                (folder / f"{resumes}-{rank}").write_text(" ".join(map(str, filled)))
        except PeerError:
            assert not resumes
        both = {
            int(number)
            for r in range(2)
            for number in (folder / f"{resumes}-{r}").read_text().split()
        }
        absent = replay.statistics()["late"]["responses"]["ref"]["absent"]
        assert absent == COUNT - len(both | {KNOWN})
        assert (absent > 0) == (not resumes)
        assert KNOWN not in both
        for number in both:
            expected = STORED[number]["logp"] * (np.arange(len(STORED[number]["logp"])) > 0)
            np.testing.assert_array_equal(replay.read([number])[0]["ref"], expected)
        if resumes:
            dist.barrier()


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_leaves_whole_columns(tmp_path: Path) -> None:
    config = section(COLUMNS | {"ref": {"dtype": "float32", "late": True}}, timeout_s=20.0)
    for resumes, ends in ((False, [0, -signal.SIGKILL]), (True, [0, 0])):
        ranks = [
            in_child(lambda r=rank, again=resumes: fill(tmp_path, r, config, again))
            for rank in range(2)
        ]
        assert [exit_status(rank) for rank in ranks] == ends

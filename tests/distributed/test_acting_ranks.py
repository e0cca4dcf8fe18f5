"""Ranks that act and learn."""

from __future__ import annotations

import json
from pathlib import Path

from gear_support import prefix, shared_files
from process_support import run_ranks


def test_a_rank_that_would_wait_for_itself_tells_all(tmp_path: Path) -> None:
    """No process waits, no process takes it for a failure, and the batch comes when it can."""
    section = {
        "tables": {"main": {"capacity_steps": 100, "rate_limiter": {"min_size": 8}}},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {}},
        "timeout_s": 30.0,
        "shared_memory": {"prefix": prefix()},
    }
    run_ranks("acting_ranks.py", 2, str(tmp_path), json.dumps(section))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for turn in range(3):
        numbers = sorted(number for of_rank in seen for number in of_rank[turn])
        assert numbers == list(range(8 * turn, 8 * turn + 8))
    assert shared_files(prefix()) == []

"""examples/ddp_prioritized.py: four DDP workers and one prioritized buffer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gear_support import ROOT
from process_support import run_ranks

pytest.importorskip("gymnasium", reason="the example plays CartPole")
EXAMPLE, WORKERS = ROOT / "examples" / "ddp_prioritized.py", 4


def test_the_example() -> None:
    output = run_ranks(EXAMPLE, WORKERS, "--steps", "24")[0]
    result = json.loads(output.splitlines()[-1])
    assert result["workers"] == WORKERS
    assert result["added"] == 6
    assert result["trajectories"] == 6 * WORKERS
    assert result["return"] >= 1


def test_what_it_promises() -> None:
    run_ranks(Path(__file__).parent / "programs" / "ddp_example.py", WORKERS, str(EXAMPLE), "24")

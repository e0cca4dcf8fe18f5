"""benchmarks/exchange.py runs: it reads private parts of the exchange, which no other
test imports.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_support import why_no_cluster


def test_the_exchange_benchmark_runs(checkout: Path, tmp_path: Path) -> None:
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    to = tmp_path / "exchange.json"
    command = [
        sys.executable,
        "benchmarks/exchange.py",
        "--quick",
        "--parts",
        "bandwidth",
        "prioritized",
    ]
    done = subprocess.run(
        [*command, "--json", str(to)], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["what"] for row in json.loads(to.read_text())["rows"]} == {
        "bandwidth",
        "prioritized",
    }

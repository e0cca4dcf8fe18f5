"""The examples and the benchmark on a GPU, in short: what is captured runs, and gives the table's
rows.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Inductor's cache is empty on a new machine, and kernels may have to be built.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
LONG_S = 1100.0
Run = Callable[..., subprocess.CompletedProcess[str]]
SHORT = ("--steps", "290", "--random-steps", "205")
PROGRAMS = {
    "td3": (*SHORT, "--buffer", "uniform"),
    "sac": (*SHORT, "--buffer", "prioritized"),
    "dqn": (*SHORT, "--buffer", "prioritized"),
    "c51": SHORT,
    "ppo": ("--steps", "768"),  # six roll-outs: a graph of three replays at least for each part
}


@pytest.mark.parametrize(
    "flags", [(), ("--cudagraphs",), ("--compile", "--cudagraphs")], ids=" ".join
)
@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_an_example(
    run_python: Run, checkout: Path, algorithm: str, flags: tuple[str, ...]
) -> None:
    pytest.importorskip("gymnasium", reason="the examples act in its environments")
    program = f"examples/{algorithm}_device.py"
    paths = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    options = ("--device", "cuda", *PROGRAMS[algorithm])
    environment = {"PYTHONPATH": paths}
    run = run_python(program, *options, *flags, env=environment, timeout_s=LONG_S)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    low, high = (-2000, 0) if algorithm in ("td3", "sac") else (0, 501)
    assert low < result["return"] < high
    assert result["held"] > 0
    assert (result["compile"], result["cudagraphs"]) == (
        "--compile" in flags,
        "--cudagraphs" in flags,
    )
    assert result["device"] != "cpu"


def test_the_benchmark(run_python: Run, tmp_path: Path) -> None:
    run = run_python(
        "benchmarks/gpu.py", "--smoke", "--json", str(tmp_path / "gpu.json"), timeout_s=LONG_S
    )
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["device"]["name"] != "cpu"
    assert document["device"]["driver"]
    for row in document["rows"]:
        assert "error" not in row
        assert row.get("rows_right", True), row

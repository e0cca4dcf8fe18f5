"""A wrong index ends the CUDA context of a process of its own; the errors name op and index."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_cases import FAULTS, fault_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "at once") for name in FAULTS), ("gather_ rows", "captured"), ("mass_", "captured")],
)
def test_the_errors_name_op_and_index(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    checkout: Path,
    name: str,
    way: str,
) -> None:
    program = str(checkout / "tests" / "support" / "fault_program.py")
    run = run_python(program, name, way, env={"PYTHONPATH": str(checkout)}, timeout_s=600.0)
    assert run.returncode == 0, run.stdout + run.stderr
    text = fault_case(name)[2]
    torch_error, next_op, named = run.stdout.splitlines()
    assert torch_error.startswith("torch: CUDA error")
    assert next_op.startswith(f"next op: gear: {text}")
    assert named.startswith(f"named: {text}")
    assert f"a kernel has ended the CUDA context of this process: {text}" in run.stderr

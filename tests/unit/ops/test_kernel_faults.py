"""Errors of faults that have ended a kernel."""

import atexit
import os
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from deepspeed_gear import KernelError
from deepspeed_gear.ops import jit, kernel_faults

PARTS = ("gather_: resolutions[17]", "must lead to rows", "pass other records")
TEXT = "gather_: resolutions[17] must lead to rows; pass other records"


def kernels(found: tuple[str, str, str] | None) -> ModuleType:
    """Return a module whose kernel has left a fault, or none."""
    return cast(ModuleType, SimpleNamespace(fault=lambda: found))


def test_without_kernels_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "loaded", lambda name: None)
    assert kernel_faults.found_fault() is None


def test_errors_of_cuda_are_raised_as_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "loaded", lambda name: kernels(PARTS))
    with pytest.raises(KernelError) as raised, kernel_faults.named():
        raise RuntimeError("CUDA error")
    assert str(raised.value) == TEXT
    assert str(raised.value.__cause__) == "CUDA error"
    with pytest.raises(ValueError, match="another"), kernel_faults.named():
        raise ValueError("another")
    monkeypatch.setattr(jit, "loaded", lambda name: kernels(None))
    with pytest.raises(RuntimeError, match="CUDA error") as other, kernel_faults.named():
        raise RuntimeError("CUDA error")
    assert not isinstance(other.value, KernelError)


@pytest.mark.parametrize(
    ("found", "process", "lines"),
    [(PARTS, os.getpid(), [TEXT]), (None, os.getpid(), []), (PARTS, os.getpid() + 1, [])],
)
def test_the_end_of_the_process_reports_a_fault(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found: Any,
    process: int,
    lines: list[str],
) -> None:
    monkeypatch.setattr(jit, "loaded", lambda name: kernels(found))
    at_exit = list[Any]()
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    kernel_faults.report_at_exit.__wrapped__()
    [(report, _)] = at_exit
    with caplog.at_level("ERROR", "deepspeed_gear"):
        report(process)
    start = "a kernel has ended the CUDA context of this process: "
    assert [record.getMessage() for record in caplog.records] == [start + line for line in lines]

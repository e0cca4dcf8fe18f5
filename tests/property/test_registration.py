"""Which pieces of shared memory are registered, in which calls; and what a failed call leaves."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.ops import toolchain
from deepspeed_gear.store.cuda_registration import (
    IS_FILE,
    NO_HOST_ADDRESSES,
    OVER_BUDGET,
    CudaRuntime,
    Registration,
    RegistrationPlan,
    Span,
    memory_span,
    plan,
    span_of,
)
from deepspeed_gear.store.shared_memory import SharedMemory

PAGE = 16  # small numbers find the same borders
LIBC = ctypes.CDLL(None, use_errno=True)


class LockedPages:
    """Registers memory as the kernel can without CUDA: locks it, and refuses what is not mapped."""

    def __init__(self, shares_addresses: bool = True) -> None:
        self.locked: list[tuple[int, int]] = []
        self.cleared = 0
        self._shares_addresses = shares_addresses

    def reads_host_addresses(self) -> bool:
        return self._shares_addresses

    def register(self, begin: int, num_bytes: int) -> int:
        if LIBC.mlock(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes)):
            return ctypes.get_errno()
        self.locked.append((begin, num_bytes))
        return 0

    def unregister(self, begin: int) -> int:
        place = next(i for i, (at, _) in enumerate(self.locked) if at == begin)
        LIBC.munlock(ctypes.c_void_p(begin), ctypes.c_size_t(self.locked.pop(place)[1]))
        return 0

    def clear_error(self) -> None:
        self.cleared += 1

    def text(self, error: int) -> str:
        return os.strerror(error)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(64 << 10)
    yield made
    made.close()


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Span]:
    """Neighbouring columns in some order, some of them empty, some elsewhere."""
    at = 1000
    found = []
    for _ in range(draw(st.integers(0, 8))):
        at += draw(st.integers(0, 40))
        size = draw(st.integers(0, 200))
        found.append(Span(at, at + size))
        at += size
    elsewhere = [Span(9000 + 50 * i, 9040 + 50 * i) for i in range(draw(st.integers(0, 2)))]
    order = draw(st.permutations([*found, *elsewhere]))
    return {f"column{i}": span for i, span in enumerate(order)}


@given(columns(), st.none() | st.integers(0, 1500), st.integers(1, 10))
def test_plan(wanted: dict[str, Span], budget: int | None, pages: int) -> None:
    memory = Span(992, 5000)
    found = plan(wanted, memory, budget, PAGE, pages * PAGE)
    calls = found.calls
    assert list(calls) == sorted(calls, key=lambda call: call.begin)
    assert all(a.end <= b.begin for a, b in pairwise(calls))  # no page twice
    assert all(0 < call.num_bytes <= pages * PAGE for call in calls)
    assert all(call.begin % PAGE == call.end % PAGE == 0 for call in calls)
    assert budget is None or sum(call.num_bytes for call in calls) <= budget
    covered = {byte for call in calls for byte in range(call.begin, call.end)}
    needed: set[int] = set()
    for name, span in found.columns.items():
        assert span == wanted[name]
        assert covered.issuperset(range(span.begin, span.end))
        if span.num_bytes:
            needed |= set(range(span.begin // PAGE * PAGE, -(-span.end // PAGE) * PAGE))
    assert covered == needed  # and nothing else
    assert found.columns.keys() | found.left_out.keys() == wanted.keys()
    for name, why in found.left_out.items():
        assert name not in found.columns
        assert why == (OVER_BUDGET if memory.holds(wanted[name]) else IS_FILE)
    if budget is None:
        assert all(why == IS_FILE for why in found.left_out.values())


@given(st.lists(st.integers(1, 120), min_size=1, max_size=6), st.integers(2, 9))
def test_calls_end_where_columns_do(sizes: list[int], pages: int) -> None:
    """A call is of one column: its neighbour's begins after the page that both have."""
    ends = np.cumsum([0, *sizes]).tolist()
    spans = {str(i): Span(begin, end) for i, (begin, end) in enumerate(pairwise(ends))}
    found = plan(spans, Span(0, 2000), None, PAGE, pages * PAGE)
    for call in found.calls[:-1]:
        border = min(-(-end // PAGE) * PAGE for end in ends if end > call.begin)
        assert call.end == min(border, call.begin + pages * PAGE)


def test_registered_columns(memory: SharedMemory) -> None:
    data = torch.from_numpy(np.frombuffer(memory.buffer, np.uint8))
    columns = {
        "a": data[100:9000],
        "b": data[9000:30000],
        "none": data[:0],
        "file": torch.zeros(10),
    }
    spans = {name: span_of(column) for name, column in columns.items()}
    runtime = LockedPages()
    found = Registration(memory, plan(spans, memory_span(memory), most=8192), runtime)
    assert set(found.columns) == {"a", "b", "none"}
    assert found.left_out == {"file": IS_FILE}
    assert len(runtime.locked) == len(found.calls) == 5
    assert found.num_bytes == 32768
    found.close()
    found.close()
    assert runtime.locked == []
    assert runtime.cleared == 0
    del data, columns


def test_a_failed_call_leaves_its_columns_out_and_no_error(memory: SharedMemory) -> None:
    base = memory_span(memory).begin
    columns = {
        name: Span(base + at, base + at + 5000)
        for name, at in (("a", 0), ("b", 8192), ("c", 16384))
    }
    calls = tuple(Span(base + at, base + at + 8192) for at in (0, 8192, 16384))
    runtime = LockedPages()
    pages = ctypes.c_void_p(base + 8192)
    assert LIBC.mprotect(pages, ctypes.c_size_t(8192), 0) == 0  # unreadable: they cannot be locked
    try:
        found = Registration(memory, RegistrationPlan(calls, columns, {"file": IS_FILE}), runtime)
    finally:
        LIBC.mprotect(pages, ctypes.c_size_t(8192), mmap.PROT_READ | mmap.PROT_WRITE)
    assert list(found.columns) == ["a"]
    assert found.left_out["file"] == IS_FILE
    assert (
        found.left_out["b"]
        == found.left_out["c"]
        == "registering 8 KiB failed: Cannot allocate memory"
    )
    assert runtime.cleared == 1
    assert runtime.locked == [(base, 8192)]
    found.close()
    assert runtime.locked == []


def test_nothing_is_registered_for_a_device_with_other_addresses(memory: SharedMemory) -> None:
    """A kernel that reads the host's address there would end the process's CUDA context."""
    base = memory_span(memory).begin
    columns = {"a": Span(base, base + 5000), "none": Span(0, 0), "file": Span(1, 9)}
    runtime = LockedPages(shares_addresses=False)
    found = Registration(memory, plan(columns, memory_span(memory)), runtime)
    assert found.left_out == {"a": NO_HOST_ADDRESSES, "file": IS_FILE}
    assert list(found.columns) == ["none"]
    assert runtime.locked == []
    assert found.num_bytes == 0
    found.close()


def test_the_driver_is_asked_whether_addresses_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the attribute that CUDA's header has: of devices 0 to 2 only 1 shares the addresses of the
    host.
    """
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs the header of a CUDA toolkit")
    name = "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
    (number,) = re.findall(rf"{name}\s*=\s*(\d+)", (Path(home) / "include" / "cuda.h").read_text())

    def get(device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 40
        return 0 if ordinal < 3 else 101

    def get_attribute(found: Any, attribute: int, device: ctypes.c_int) -> int:
        found._obj.value = device.value == 41 and attribute == int(number)
        return 999 if device.value == 42 else 0

    driver = SimpleNamespace(cuDeviceGet=get, cuDeviceGetAttribute=get_attribute)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    found = [CudaRuntime(torch.device("cuda", i)).reads_host_addresses() for i in range(4)]
    assert found == [False, True, False, False]

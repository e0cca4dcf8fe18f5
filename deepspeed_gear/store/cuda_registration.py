"""Registration of shared memory with CUDA: which columns, in which calls, and why not the others.
CUDA registers whole pages, none twice, so a column is registered if all its pages are. It refuses
read-only file maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import show_bytes
from deepspeed_gear.store.native_rows import address
from deepspeed_gear.store.shared_memory import MADV_POPULATE_WRITE, SharedMemory

# One call of 512 GiB fails on some drivers, and each holds the driver's lock.
MOST_CALL_BYTES = 1 << 30
PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
SUCCESS = 0
NO_HOST_ADDRESSES = "the device does not read registered memory at the host's address"
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
IS_FILE = "it lies in a mapped file, which CUDA cannot register"
OVER_BUDGET = "gear.transfer.register_bytes is used up"


@dataclass(frozen=True)
class Span:
    """The bytes [begin, end) of this process's address space."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def holds(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class RegistrationPlan:
    """The columns to register with CUDA, and the calls that do it."""

    calls: tuple[Span, ...]  # whole pages, ascending, none of them overlapping
    columns: Mapping[str, Span]  # those that the calls cover, by name
    left_out: Mapping[str, str]  # why each other column is not registered, by name


def plan(
    columns: Mapping[str, Span],
    memory: Span,
    budget: int | None = None,
    page: int = mmap.PAGESIZE,
    most: int = MOST_CALL_BYTES,
) -> RegistrationPlan:
    """Choose columns to register: whole ones in order, while their pages fit `budget` bytes."""
    taken: dict[str, Span] = {}
    left_out: dict[str, str] = {}
    calls: list[Span] = []
    for name, column in columns.items():
        if column.num_bytes and not memory.holds(column):
            left_out[name] = IS_FILE
            continue
        wanted = _calls([*taken.values(), column], page, most)
        if budget is not None and sum(call.num_bytes for call in wanted) > budget:
            left_out[name] = OVER_BUDGET
        else:
            calls = wanted
            taken[name] = column
    return RegistrationPlan(tuple(calls), taken, left_out)


def _calls(columns: Sequence[Span], page: int, most: int) -> list[Span]:
    """Return the calls that register columns: whole pages, none twice, in pieces of `most`."""
    calls = list[Span]()
    end = 0
    for column in sorted(columns, key=lambda column: column.begin):
        if column.num_bytes:
            begin = max(column.begin // page * page, end)  # its first page may be a neighbour's too
            end = -(-column.end // page) * page
            calls += [Span(at, min(at + most, end)) for at in range(begin, end, most)]
    return calls


def span_of(column: torch.Tensor) -> Span:
    """Return the addresses of a contiguous tensor of the host."""
    begin = column.data_ptr() if column.numel() else 0
    return Span(begin, begin + column.nbytes)


def memory_span(memory: SharedMemory) -> Span:
    begin = address(np.frombuffer(memory.buffer, np.uint8, 1))
    return Span(begin, begin + memory.num_bytes)


class CudaRuntime:
    """CUDA's calls, for memory of all devices; they return its error codes.

    The reading device is current during registration, so torch takes the memory for a tensor of
    this device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def reads_host_addresses(self) -> bool:
        """Return whether the device reads registered memory at its address on the host."""
        driver = ctypes.CDLL("libcuda.so.1")  # torch's runtime has no call for attributes
        device = ctypes.c_int()
        found = ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(device), self._device.index)
        failed = failed or driver.cuDeviceGetAttribute(
            ctypes.byref(found), _CAN_USE_HOST_POINTER, device
        )
        return failed == SUCCESS and found.value != 0

    def register(self, begin: int, num_bytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(self._calls.cudaHostRegister(begin, num_bytes, PORTABLE_MAPPED))

    def unregister(self, begin: int) -> int:
        return int(self._calls.cudaHostUnregister(begin))

    def clear_error(self) -> None:
        """Clear the error of a failed call, which torch would else raise at the next launch."""
        with contextlib.suppress(RuntimeError):
            torch.ones((), device=self._device)

    def text(self, error: int) -> str:
        return str(self._calls.cudaGetErrorString(self._calls.cudaError(error)))


class Registration:
    """The registered columns of one table in this process, which stays mapped until `close`.

    Main thread only.

    Nothing is registered for a device that would read it at another address than the host's, which
    columns are addressed by: that would end the process's CUDA context.
    """

    @classmethod
    def of(
        cls,
        memory: SharedMemory,
        columns: Mapping[str, torch.Tensor],
        runtime: CudaRuntime,
        budget: int | None = None,
    ) -> Registration:
        """Register the memory of columns, as far as a budget of bytes goes."""
        spans = {name: span_of(column) for name, column in columns.items()}
        return cls(memory, plan(spans, memory_span(memory), budget), runtime)

    def __init__(
        self, memory: SharedMemory, wanted: RegistrationPlan, runtime: CudaRuntime
    ) -> None:
        self._runtime = runtime
        self.calls = list[Span]()
        self.left_out = dict(wanted.left_out)
        failed = "" if runtime.reads_host_addresses() else NO_HOST_ADDRESSES
        # The driver has one lock: ranks that wait for it stall others.
        fcntl.flock(memory.fd, fcntl.LOCK_EX)
        try:
            for call in wanted.calls if not failed else ():
                failed = self._register(memory, call)
                if failed:
                    break
        finally:
            fcntl.flock(memory.fd, fcntl.LOCK_UN)
        self.columns: dict[str, Span] = {}
        end = self.calls[-1].end if self.calls else 0  # the pages before it are registered
        for name, column in wanted.columns.items():
            if column.num_bytes == 0 or column.end <= end:
                self.columns[name] = column
            else:
                self.left_out[name] = failed

    def _register(self, memory: SharedMemory, call: Span) -> str:
        """Register one span; return the failure, or ""."""
        base = memory_span(memory).begin
        first = max(call.begin - base, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = min(call.end - base, memory.num_bytes) - first
        # On older kernels CUDA touches the pages itself, more slowly.
        with contextlib.suppress(OSError):
            memory.advise(MADV_POPULATE_WRITE, first, num_bytes)
        error = self._runtime.register(call.begin, call.num_bytes)
        if error == SUCCESS:
            self.calls.append(call)
            return ""
        self._runtime.clear_error()
        return f"registering {show_bytes(call.num_bytes)} failed: {self._runtime.text(error)}"

    @property
    def num_bytes(self) -> int:
        return sum(call.num_bytes for call in self.calls)

    def close(self) -> None:
        """Unregister everything; safe to call twice."""
        while self.calls:
            if self._runtime.unregister(self.calls.pop().begin) != SUCCESS:
                self._runtime.clear_error()


def why_impossible() -> str:
    """Return why this process cannot register memory, by registering a page; empty if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    current = torch.device("cuda", torch.cuda.current_device())
    memory = SharedMemory.create(mmap.PAGESIZE, huge_pages=False)
    try:
        page = memory_span(memory)
        registration = Registration(memory, plan({"page": page}, page), CudaRuntime(current))
        registration.close()
        return registration.left_out.get("page", "")
    finally:
        memory.close()


class _Alias:
    """Registered memory in the form that torch reads without a copy; keeps the memory alive."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address(array), False),
            "strides": None,
            "version": 3,
        }


def as_device_tensor(column: torch.Tensor, device: torch.device) -> torch.Tensor:
    """View a registered contiguous column as a device tensor at its address; never write to it."""
    if column.numel() == 0:
        return torch.empty_like(column, device=device)
    is_bfloat = column.dtype == torch.bfloat16  # which NumPy does not have
    stored = column.view(torch.int16) if is_bfloat else column
    there = torch.as_tensor(_Alias(stored.numpy()), device=device)
    return there.view(torch.bfloat16) if is_bfloat else there

"""Transfer streams (lanes): CUDA streams of gathers, and selections released after their reads.

Nothing here waits for a device, except `Event.synchronize`, before host memory is overwritten.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops import kernel_faults

ALIGNMENT = 128  # alignment of tensors in one allocation: a cache line of a GPU


class Event(Protocol):
    """An event in the work of a transfer stream, or of the user of its batches."""

    def query(self) -> bool:
        """Whether all work before it is done; does not wait."""
        ...

    def synchronize(self) -> object:
        """Wait, in this thread, for all work before it."""
        ...


class HostEvent(threading.Event):
    """An event in the work of threads of the host. Thread safe."""

    finish = threading.Event.set
    query = threading.Event.is_set
    synchronize = threading.Event.wait


class HostStream:
    """Queue of work in order: in the calling thread here, done on return. Thread safe."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def running(self) -> AbstractContextManager[Any]:
        """Return a context whose work is enqueued on this stream."""
        return nullcontext()

    def record(self) -> Event:
        """Return an event after all work enqueued so far."""
        event = HostEvent()
        event.finish()
        return event

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for an event."""
        event.synchronize()

    def consumer(self) -> tuple[Any, Event]:
        """Return this thread's current stream, and an event after all its work so far."""
        return None, self.record()

    def wait_for(self, consumer: Any) -> None:
        """Make later work of this stream wait for all work of a consumer's stream so far."""

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Make this thread's current stream wait for an event, and mark it as a user of tensors."""
        event.synchronize()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return (pinned) host memory for asynchronous copies to the device. [n], uint8."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def bring(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy small host tensors to the device by one asynchronous copy, within `running`.

        Torch's allocator of pinned memory reuses a block only when the copies from it are done.
        """
        packing = Packing([(tensor.shape, tensor.dtype) for tensor in tensors])
        pinned = torch.empty(
            packing.num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        for view, tensor in zip(packing.views(pinned), tensors, strict=True):
            view.copy_(tensor)
        there = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self.device)
        there.copy_(pinned, non_blocking=True)
        return packing.views(there)


class CudaStream(HostStream):
    """CUDA stream of its own for the gathers and copies of batches."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._known = threading.local()

    def running(self) -> AbstractContextManager[Any]:
        is_background = threading.current_thread() is not threading.main_thread()
        if is_background and not hasattr(self._known, "relaxed"):
            allow_captures_elsewhere()
            self._known.relaxed = True
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]

    def consumer(self) -> tuple[Any, Event]:
        stream = torch.cuda.current_stream(self.device)
        return stream, stream.record_event()

    def wait_for(self, consumer: Any) -> None:
        self._stream.wait_stream(consumer)

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            if tensor.is_cuda:  # a program's own transform may add others
                tensor.record_stream(stream)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def allow_captures_elsewhere() -> None:
    """Relax this thread's capture mode: else its allocations break captures of other threads."""
    if not torch.cuda.is_available():
        return
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def refuse_capture(name: str, rule: str, remedy: str) -> None:
    """Raise a StoreError while a CUDA graph is captured, for a call that cannot be in one."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise StoreError(name, rule, None, remedy)


def lane_of(device: torch.device) -> HostStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


class Packing:
    """Packing of tensors into one allocation, each at an aligned offset.

    Tensors of 4 and 200 bytes begin at 0 and 128; the allocation has 384 bytes.
    """

    def __init__(self, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._shapes = list(shapes)
        self._begins = []
        at = 0
        for shape, dtype in self._shapes:
            self._begins.append(at)
            at += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = at

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of an allocation; each has its own version counter."""
        views = []
        for (shape, dtype), begin in zip(self._shapes, self._begins, strict=True):
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            views.append(flat[begin:end].view(dtype).view(torch.Size(shape)).data)
        return views


Release = Callable[[int], None]


class DeferredRelease:
    """Selections that wait for release, in the order of their gathers. Thread safe.

    A selection pins its rows and its ring entry until the device has read them. `settle` checks
    that, without waiting, at each sample and add.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Event, Release, int]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, event: Event, release: Release, number: int) -> None:
        """Release a selection after the event that follows its last kernel.

        Events of later calls come later in the stream.
        """
        with self._lock:
            self._waiting.append((event, release, number))

    def settle(self) -> None:
        if not self._waiting:
            return
        with self._lock, kernel_faults.named():
            while self._waiting and self._waiting[0][0].query():
                _, release, number = self._waiting.popleft()
                release(number)

    def drain(self) -> bool:
        """Wait for all events and release their selections; return whether there were any."""
        with self._lock, kernel_faults.named():
            had_some = bool(self._waiting)
            while self._waiting:
                event, release, number = self._waiting.popleft()
                event.synchronize()
                release(number)
        return had_some

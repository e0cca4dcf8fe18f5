"""Where collection runs beside the training step: a CUDA stream of its own, or the calling thread.

Nothing here waits for a device, except `Event.synchronize`, which is called where memory of the host must not
be overwritten yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from deepspeed_gear.errors import StoreError

ALIGNMENT = 128  # of what lies in one allocation: a line of a GPU's caches


class Event(Protocol):
    """A moment in the work of a lane, or of the user of its batches."""

    def query(self) -> bool:
        """Whether all work before it is done; does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait, in this thread, for all work before it."""
        ...


class HostEvent:
    """A moment in the work of threads of the host. Thread safe."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish(self) -> None:
        """Say that the work before it is done."""
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


class TransferStream(Protocol):
    """Work in the order in which it is given. Thread safe."""

    device: torch.device

    def running(self) -> AbstractContextManager[Any]:
        """Give what this thread does inside to the lane."""
        ...

    def record(self) -> Event:
        """Return the moment after everything that the lane was given."""
        ...

    def wait(self, event: Event) -> None:
        """Let later work of the lane wait for an event."""
        ...

    def consumer(self) -> tuple[Any, Event]:
        """Return the stream that this thread gives work to, and the moment after all that it was given."""
        ...

    def wait_for(self, consumer: Any) -> None:
        """Let later work of the lane wait for all that a consumer was given until now."""
        ...

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Let what this thread gives work to wait for an event; it uses tensors that the lane has made."""
        ...

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the host that copies to the device can read beside other work. [n], uint8."""
        ...

    def bring(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of small tensors of the host on the device. Inside `running`."""
        ...


class HostStream:
    """The calling thread: its work is done when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event:
        event = HostEvent()
        event.finish()
        return event

    def wait(self, event: Event) -> None:
        event.synchronize()

    def consumer(self) -> tuple[Any, Event]:
        return None, self.record()

    def wait_for(self, consumer: Any) -> None:
        pass

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        event.synchronize()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def bring(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _brought(tensors, self)


class CudaStream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._known = threading.local()

    def running(self) -> AbstractContextManager[Any]:
        if threading.current_thread() is not threading.main_thread() and not hasattr(self._known, "relaxed"):
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

    def bring(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _brought(tensors, self)


def allow_captures_elsewhere() -> None:
    """Let this thread allocate and look at events while another one captures a CUDA graph.

    A capture of the usual mode fails if any thread does, unless that one says that it is not concerned.
    """
    if not torch.cuda.is_available():
        return
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def refuse_capture(name: str, rule: str, remedy: str = "") -> None:
    """Refuse what cannot be in a CUDA graph while one is captured.

    Args:
        name: What is refused.
        rule: As of an error.
        remedy: Likewise.
    Raises:
        StoreError: The current stream is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise StoreError(name, rule, None, remedy)


def lane_of(device: torch.device) -> TransferStream:
    """Return a lane of a device."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


class Packing:
    """Where tensors lie in one allocation, each aligned.

    Args:
        shapes: Shape and dtype of each.
    """

    def __init__(self, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self._shapes, self._begins, at = list(shapes), [], 0
        for shape, dtype in self._shapes:
            self._begins.append(at)
            at += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = at

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in an allocation. [num_bytes], uint8.

        Each counts its own changes, as tensors of their own do: autograd names the tensor that was changed in
            place.
        """
        found = []
        for (shape, dtype), begin in zip(self._shapes, self._begins, strict=True):
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            found.append(flat[begin:end].view(dtype).view(torch.Size(shape)).data)
        return found


def _brought(tensors: Sequence[torch.Tensor], lane: TransferStream) -> list[torch.Tensor]:
    """Copy tensors to the lane's device by one copy, which waits for nothing.

    Torch's allocator of pinned memory gives a block away again only when the copies from it are done.
    """
    packing = Packing([(tensor.shape, tensor.dtype) for tensor in tensors])
    pinned = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=lane.device.type == "cuda")
    for view, tensor in zip(packing.views(pinned), tensors, strict=True):
        view.copy_(tensor)
    there = torch.empty(packing.num_bytes, dtype=torch.uint8, device=lane.device)
    there.copy_(pinned, non_blocking=True)
    return packing.views(there)

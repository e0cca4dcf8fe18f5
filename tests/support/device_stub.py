"""A device that notes where the host would wait for it, on machines without any.

Its tensors lie in host memory and call themselves tensors of `meta`, the one device that torch
accepts without a driver. Ops run on the host. Noted are those for which a CUDA device would be
waited for: values that the host reads (`item`, `tolist`, `equal`, results whose size depends on
values), copies of pageable memory, and host indices. A list as an index is a copy inside torch, and
raises when it is used.

Also noted are tensors used on another stream than the one that was current when they were
allocated. Torch's allocator keeps a pool of memory for each stream: what one stream has freed it
may still be using when another writes to it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from deepspeed_gear.batching.transfer.cuda_streams import Event, HostStream

DEVICE = torch.device("meta")
aten = torch.ops.aten
#: Ops whose results have a size, or are a number, that the host must know.
_READ = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.repeat_interleave,
}
_COPIES = {aten._to_copy, aten.copy_}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `held` has its values. `streams` may use its memory, all its views
    included; none: any may, as for memory that the tests bring.
    """

    held: Tensor
    streams: set[str]
    # it has values, and they are not the host's
    is_meta = False
    is_cuda = True

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        made.streams = set()
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise AssertionError(f"{func} outside of the stub")


class _Numbers(TorchFunctionMode):
    """Makes tensors of Python's numbers on the device, of which a dispatch mode sees nothing."""

    def __init__(self, wait: Callable[[Any], None]) -> None:
        super().__init__()
        self._wait = wait

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.tensor or kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)
        self._wait(func)
        return DeviceTensor(func(*args, **{**kwargs, "device": "cpu"}))


class DeviceStub(TorchDispatchMode):
    """Runs what is called inside as a device would.

    `waits` has where the host would wait for it, `elements` the most elements that each op has read
    there, `crossings` where a stream uses memory of another one's pool. `stream` is the current
    stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.crossings: list[str] = []
        self.stream = "training"
        self.elements: dict[str, int] = {}
        self._numbers = _Numbers(self.wait)

    def __enter__(self) -> DeviceStub:
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        op = func.overloadpacket
        every = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        there = [tensor for tensor in every if isinstance(tensor, DeviceTensor)]
        for tensor in there:
            name = op.__name__
            self.elements[name] = max(self.elements.get(name, 0), tensor.numel())
            if tensor.streams and self.stream not in tensor.streams and not _makes_views(func):
                used = f"{func} on {self.stream} uses memory of {', '.join(sorted(tensor.streams))}"
                self.crossings.append(f"{used}: {_place()}")
        if any(
            tensor.device == DEVICE and not isinstance(tensor, DeviceTensor) for tensor in every
        ):
            raise AssertionError(
                f"{func} uses a list or numbers as a tensor of the device: {_place()}"
            )
        is_made_there = kwargs.get("device") == DEVICE
        if op in _COPIES:
            is_crossing = op is aten.copy_ and len({tensor.device for tensor in every}) > 1
            to = torch.device(kwargs.get("device") or every[0].device)
            is_async = kwargs.get("non_blocking") or (
                op is aten.copy_ and len(args) > 2 and args[2]
            )
            if (is_crossing or to != every[0].device) and not is_async:
                self.wait(func)
            is_made_there = is_made_there or (op is aten._to_copy and to == DEVICE)
            kwargs.pop("non_blocking", None)
        elif there:
            if op in _READ and not (
                op is aten.repeat_interleave and kwargs.get("output_size") is not None
            ):
                self.wait(func)
            self._check_operands(func, args, every)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if not there and not is_made_there:
            return func(*args, **kwargs)
        known = {id(tensor.held): tensor for tensor in there}
        given = tree_map(
            lambda value: value.held if isinstance(value, DeviceTensor) else value, (args, kwargs)
        )
        found = func(*given[0], **given[1])
        if op is aten._to_copy and not is_made_there and args[0].device != to:
            return found
        return tree_map(lambda value: self._wrapped(value, known), found)

    def _wrapped(self, value: Any, known: dict[int, DeviceTensor]) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return value
        if id(value) in known:
            return known[id(value)]
        made = DeviceTensor(value)
        memory = value.untyped_storage().data_ptr()
        views = (one for one in known.values() if one.held.untyped_storage().data_ptr() == memory)
        base = next(views, None)
        made.streams = {self.stream} if base is None else base.streams
        return made

    def _check_operands(self, func: Any, args: tuple[Any, ...], every: list[Tensor]) -> None:
        op = func.overloadpacket
        indices = [i for i in args[1] if i is not None] if op in _INDEXED else []
        if any(i.device != DEVICE or i.dtype in (torch.bool, torch.uint8) for i in indices):
            self.wait(func)
            return
        here = [tensor for tensor in every if tensor.device != DEVICE and tensor.dim() > 0]
        if here:
            raise AssertionError(f"{func} mixes tensors of the host and the device: {_place()}")

    def wait(self, func: Any) -> None:
        """Note a wait."""
        self.waits.append(f"{func} at {_place()}")


def on_device(tensor: Tensor) -> Tensor:
    """Put a tensor on the device, as what a program has there before the code under test runs."""
    return DeviceTensor(tensor.clone())


def held(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of the device."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.held


class StubStream(HostStream):
    """A transfer stream of the device, in the place of a `CudaStream`."""

    def __init__(self, stub: DeviceStub) -> None:
        super().__init__()
        self.device = DEVICE
        self._stub = stub

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self._stub.stream = self._stub.stream, "transfer"
        try:
            yield
        finally:
            self._stub.stream = before

    def hand_over(self, event: Event, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DeviceTensor) and tensor.streams:
                tensor.streams.add(self._stub.stream)


def _makes_views(func: Any) -> bool:
    """Return whether an op only describes memory: a stream runs nothing for it."""
    aliases = [part.alias_info for part in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _place() -> str:
    """Return the line of the package that called torch."""
    frames = [frame for frame in traceback.extract_stack() if "/deepspeed_gear/" in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "a test"

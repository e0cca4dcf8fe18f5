"""Runs an op on two backends: what they write must have the same bits.

The C++ is compared with the reference, and kernels with the C++, which is fast.
"""

from typing import Any

import pytest
import torch
from op_cases import tensors_of
from reference_ops import WITHOUT_REFERENCE, reference_ops
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops, load_backend

REFERENCE = reference_ops()
CPU = load_backend("cpu")
REFUSED = (ShapeError, RuntimeError)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare every bit: NaNs by their payload, and 0.0 differs from -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def at_offset(values: Tensor, offset: int) -> Tensor:
    """Copy a tensor to an address that is `offset` bytes behind a multiple of 16."""
    room = torch.empty(values.nbytes + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + offset
    there = room[start : start + values.nbytes].view(values.dtype).view(values.shape)
    assert there.copy_(values).data_ptr() % 16 == offset
    return there


def outputs(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that an op writes, by its schema."""
    words = getattr(torch.ops.gear, name).default._schema.arguments
    is_written = [word.alias_info is not None and word.alias_info.is_write for word in words]
    return [t for a, w in zip(arguments, is_written, strict=False) if w for t in tensors_of(a)]


def model_of(native: Ops) -> Ops:
    """Return the backend that another one must equal."""
    return REFERENCE if native.name == "cpu" else CPU


def compare(native: Ops, name: str, *arguments: Any) -> list[Tensor]:
    """Run an op on copies of what it writes, also on the backend's model where the op has one;
    return what both have written.
    """
    backends = (native,) if name in WITHOUT_REFERENCE else (model_of(native), native)
    found = []
    for ops in backends:
        own = copied(name, arguments)
        getattr(ops, name)(*own)
        found.append(outputs(name, own))
    assert all(map(same_bits, found[0], found[-1])), name
    return found[0]


def copied(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with copies of what the op writes, at addresses of the same alignment."""
    written = {id(t) for t in outputs(name, arguments)}

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [copy(v) for v in value]
        return at_offset(value, value.data_ptr() % 16) if id(value) in written else value

    return tuple(map(copy, arguments))


def refuse(ops: Ops, name: str, arguments: tuple[Any, ...], match: str) -> None:
    """Check that a call is refused and writes nothing; a kernel can only end, wherever it is.

    The sizes of rows that travel are given all the same.
    """
    is_kernel = ops.name.startswith("kernels")
    own = copied(name, arguments)
    with pytest.raises(REFUSED, match=f"{match}|leads outside" if is_kernel else match):
        getattr(ops, name)(*own)
    count = 1 if name in ("encode_rows_", "decode_rows_") else None
    assert is_kernel or all(map(same_bits, outputs(name, own)[:count], outputs(name, arguments)))

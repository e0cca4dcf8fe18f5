"""Values of a batch as bytes and back: tensors, nested tensors, and any object that can be pickled.

A field whose values are tensors of one dtype and number of dimensions is stored as their bytes.
Everything else is pickled value by value, so that each can be read alone.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import DataError
from deepspeed_gear.integrations.segment_index import MOST_DIMS, FieldBlock, Form
from deepspeed_gear.integrations.segment_store import StoredField

TENSOR = "tensor"
OBJECT = "object"


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def field_block(name: str, values: Any, dumps: Callable[[Any], bytes] = _pickled) -> FieldBlock:
    """Return the values of a field as bytes, without a copy where they lie together on the host.

    Args:
        name: The field, for errors.
        values: A tensor [n, ...], a nested tensor of n, or a list of n values.
        dumps: How objects are pickled.
    Raises:
        DataError: An object cannot be pickled.
    """
    if isinstance(values, torch.Tensor):
        if _is_plain(values) and values.dim() - 1 <= MOST_DIMS:
            return _dense_block(values)
        if _is_whole_jagged(values):
            return _jagged_block(values)
        values = values.unbind()
    if _are_like_tensors(values):
        return _tensors_block(values)
    contents = []
    for value in values:
        # A view is pickled with the whole memory that it is a view of.
        own = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        with DataError.on(
            f"field {name}",
            "must have values that can be pickled",
            pickle.PicklingError,
            TypeError,
            AttributeError,
            remedy="put tensors or plain data",
        ):
            contents.append(dumps(own))
    sizes = np.array([len(content) for content in contents], np.int64)
    shapes = np.empty((len(contents), 0), np.int64)
    return FieldBlock(Form(OBJECT, "", 0), sizes, shapes, contents)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are the bytes of its elements."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _are_like_tensors(values: Sequence[Any]) -> bool:
    first = values[0] if len(values) else None
    if not isinstance(first, torch.Tensor) or first.dim() > MOST_DIMS:
        return False
    return all(
        type(one) is type(first)
        and _is_plain(one)
        and one.dtype == first.dtype
        and one.dim() == first.dim()
        for one in values
    )


def _host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor, a view of it where they lie together. [bytes], uint8."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: np.ndarray = plain.reshape(-1).view(torch.uint8).numpy()
    return array


def _form(dtype: torch.dtype, num_dims: int) -> Form:
    return Form(TENSOR, str(dtype).removeprefix("torch."), num_dims)


def _dense_block(values: torch.Tensor) -> FieldBlock:
    shape = values.shape[1:]
    sizes = np.full(len(values), math.prod(shape) * values.element_size(), np.int64)
    shapes = np.broadcast_to(np.array(shape, np.int64), (len(values), len(shape)))
    return FieldBlock(_form(values.dtype, len(shape)), sizes, shapes, [_host_bytes(values)])


def _is_whole_jagged(nested: torch.Tensor) -> bool:
    """Whether a nested tensor's values lie one after another, with nothing between or after."""
    if nested.layout != torch.jagged:
        return False
    jagged: Any = nested
    offsets = jagged.offsets()
    ragged = getattr(jagged, "_ragged_idx", None)
    if ragged != 1 or jagged.lengths() is not None or nested.dim() - 1 > MOST_DIMS:
        return False
    return int(offsets[0]) == 0 and int(offsets[-1]) == len(jagged.values())


def _jagged_block(nested: torch.Tensor) -> FieldBlock:
    jagged: Any = nested
    values: torch.Tensor = jagged.values()
    lengths = jagged.offsets().cpu().diff().numpy().astype(np.int64)
    rest = values.shape[1:]
    shapes = np.empty((len(lengths), 1 + len(rest)), np.int64)
    shapes[:, 0] = lengths
    shapes[:, 1:] = rest
    sizes = lengths * (math.prod(rest) * values.element_size())
    return FieldBlock(_form(values.dtype, 1 + len(rest)), sizes, shapes, [_host_bytes(values)])


def _tensors_block(values: Sequence[torch.Tensor]) -> FieldBlock:
    form = _form(values[0].dtype, values[0].dim())
    shapes = np.array([tuple(one.shape) for one in values], np.int64).reshape(len(values), -1)
    buffers = [_host_bytes(one) for one in values]
    sizes = np.array([len(one) for one in buffers], np.int64)
    return FieldBlock(form, sizes, shapes, buffers)


def batch_of(stored: StoredField) -> torch.Tensor | list[Any]:
    """Return values as one tensor, or as a list where they cannot be one.

    The rules are those of TransferQueue: values without dimensions are stacked; all others become
    a nested tensor, jagged if only the first dimension differs, else strided; objects and tensors
    of several dtypes are a list.
    """
    if len(stored.forms) == 1 and stored.forms[0].kind == TENSOR:
        form = stored.forms[0]
        shapes = stored.shapes[:, : form.num_dims]
        dtype = getattr(torch, form.dtype)
        if form.num_dims == 0:
            return _typed(stored.content, dtype)
        if (shapes[:, 1:] == shapes[:1, 1:]).all():
            lengths = shapes[:, 0]
            values = _typed(stored.content, dtype).view(int(lengths.sum()), *shapes[0, 1:].tolist())
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            return torch.nested.nested_tensor_from_jagged(
                values,
                torch.from_numpy(offsets),
                min_seqlen=int(lengths.min()),
                max_seqlen=int(lengths.max()),
            )
    return packed(values_of(stored))


def values_of(stored: StoredField) -> list[Any]:
    """Return each value, tensors in memory of their own."""
    values = []
    start = 0
    for index, size, shape in zip(
        stored.form_indexes.tolist(), stored.sizes.tolist(), stored.shapes.tolist(), strict=True
    ):
        form = stored.forms[index]
        content = stored.content[start : start + size]
        start += size
        if form.kind == OBJECT:
            values.append(pickle.loads(content.data))
            continue
        value = torch.empty(shape[: form.num_dims], dtype=getattr(torch, form.dtype))
        value.view(-1).view(torch.uint8).numpy()[:] = content
        values.append(value)
    return values


def packed(values: list[Any]) -> torch.Tensor | list[Any]:
    """Return values as one tensor by the rules of `batch_of`, or as they are."""
    if not values or not all(isinstance(one, torch.Tensor) for one in values):
        return values
    if len({one.dtype for one in values}) > 1:  # torch would cast them to the first one's
        return values
    if all(one.dim() == 0 for one in values):
        return torch.stack(values)
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(values, layout=layout)
        except (RuntimeError, TypeError):
            continue  # the shapes do not fit this layout
    return values


def _typed(content: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # An empty array of NumPy has a stride that torch cannot reinterpret.
    return torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)

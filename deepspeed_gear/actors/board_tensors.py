"""Tensors of a policy board: their names, shapes and dtypes, and their places in a version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError

_ALIGNMENT = 16  # of the first byte of a tensor
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and one.is_floating_point
}
_SAME_VERSION = "use the same version of deepspeed_gear on both sides"


class BoardTensor(NamedTuple):
    """A floating-point parameter or buffer of a board's module."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BoardTensors:
    """All tensors of a board, one after the other in the bytes of a version."""

    def __init__(self, tensors: Iterable[BoardTensor]) -> None:
        self._tensors = list(tensors)
        self._begins = list[int]()
        self.num_bytes = 0  # of a version
        for one in self._tensors:
            self._begins.append(self.num_bytes)
            self.num_bytes += -(-one.num_bytes // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def of_module(cls, module: nn.Module) -> BoardTensors:
        """Return the tensors of a module, in its own dtypes.

        Raises:
            DataError: A parameter is partitioned.
        """
        state = _state_of(module)
        return cls(BoardTensor(name, tuple(one.shape), one.dtype) for name, one in state)

    @classmethod
    def of_json(cls, entries: Any) -> BoardTensors:
        """Return the tensors of `to_json`, which another process may have sent.

        Raises:
            DataError: It is no such list.
        """
        kinds = (TypeError, ValueError, KeyError)
        rule = "must be a list of names, shapes and floating-point dtypes"
        with DataError.on("the tensors of a board", rule, *kinds, remedy=_SAME_VERSION):
            return cls(
                BoardTensor(str(name), tuple(int(size) for size in shape), _DTYPES[dtype])
                for name, shape, dtype in entries
            )

    def to_json(self) -> list[Any]:
        """Return names, shapes and dtypes as JSON values."""
        return [
            [one.name, list(one.shape), str(one.dtype).removeprefix("torch.")]
            for one in self._tensors
        ]

    def views(self, values: np.ndarray) -> list[Tensor]:
        """Return the tensors over the bytes of a version, without a copy.

        Args:
            values: Bytes of a version. [num_bytes], uint8.
        """
        whole = torch.from_numpy(values)
        return [
            whole[begin : begin + one.num_bytes].view(one.dtype).view(one.shape)
            for one, begin in zip(self._tensors, self._begins, strict=True)
        ]

    def check(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors of a module that are in the board, in the board's order.

        Raises:
            DataError: The module has other names or shapes, or a parameter is partitioned.
        """
        state = _state_of(module)
        own = [(one.name, one.shape) for one in self._tensors]
        given = [(name, tuple(tensor.shape)) for name, tensor in state]
        if given != own:
            odd = next((one for one in given if one not in own), None)
            missing = next((one for one in own if one not in given), None)
            shown = f"without {missing}" if odd is None and missing is not None else odd
            raise DataError(
                "module",
                "must have the parameters that the board was made for",
                shown,
                "load into a module of the same architecture",
            )
        return [tensor for _, tensor in state]

    def check_exact(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors of a module, each of which the board's dtype must hold exactly.

        Raises:
            DataError: As `check`; or a tensor would be rounded.
        """
        state = self.check(module)
        for one, tensor in zip(self._tensors, state, strict=True):
            if not _holds(one.dtype, tensor.dtype):
                remedy = "create the board with a module of this dtype"
                rule = f"must fit into {one.dtype}, the board's dtype, without rounding"
                raise DataError(f"parameter {one.name}", rule, str(tensor.dtype), remedy)
        return state


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a dtype has every value of another one."""
    if wide == narrow:
        return True
    outer = torch.finfo(wide)
    inner = torch.finfo(narrow)
    has_range = outer.max >= inner.max and outer.tiny <= inner.tiny
    return has_range and outer.eps <= inner.eps


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the floating-point parameters and buffers of a module by name."""
    arguments.one_of("module", module, nn.Module, "a torch.nn.Module")
    for name, parameter in module.named_parameters():
        status: Any = getattr(parameter, "ds_status", None)
        if status is not None and parameter.numel() == 0:
            remedy = "publish inside deepspeed.zero.GatheredParameters"
            raise DataError(f"parameter {name}", "must be whole", None, remedy)
    return [
        (name, tensor) for name, tensor in module.state_dict().items() if tensor.is_floating_point()
    ]


@torch.no_grad()
def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, converting each to the dtype and device of its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)

"""Pickles of arrays: an unpickler that builds NumPy arrays and builtins only."""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from deepspeed_gear.errors import DataError

PICKLED = "--allow-pickle reads the arrays in it, and runs no code of it"
_BUILDERS = {  # methods that take the place of globals
    "numpy.dtype": "_dtype",
    "numpy.core.multiarray._reconstruct": "_array",
    "numpy.core.multiarray.scalar": "_scalar",
    "numpy.core.numeric._frombuffer": "_from_buffer",
    "_codecs.encode": "_encode",
    "collections.OrderedDict": "_dict",
    "collections.defaultdict": "_dict",
}
_ARGUMENTS = ("numpy.ndarray", "builtins.list", "builtins.dict")  # of those; not used
_IMITATION = ("imitation.data.types", "imitation.data.old_types", "imitation.util.rollout")


class _Dtype:
    """A NumPy dtype of numbers or text in a pickle."""

    def __init__(self, spec: Any) -> None:
        if not re.fullmatch(r"[?OSUbiufc]\d{0,6}", spec):
            raise pickle.UnpicklingError(f"dtype {spec!r}")
        self.dtype = np.dtype(spec)

    def set_state(self, state: Any) -> None:
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a dtype with fields")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray):
    """A NumPy array in a pickle, until its state is known."""

    def set_state(self, state: Any) -> None:
        shape, kind, is_fortran, content = state[-4:]
        content = content.encode("latin1") if isinstance(content, str) else content
        size = math.prod(shape) * (1 if kind.dtype.hasobject else kind.dtype.itemsize)
        if min(shape, default=0) < 0 or len(content) != size:
            raise pickle.UnpicklingError(f"an array of shape {shape} with {len(content)} values or bytes")
        super().__setstate__((1, shape, kind.dtype, bool(is_fortran), content))  # type: ignore[arg-type]


class Record:
    """A trajectory of imitation: a dataclass, or the earlier tuple of these fields."""

    def __new__(cls, *values: Any) -> Record:
        self = super().__new__(cls)
        self.__dict__.update(zip(("acts", "obs", "rews", "infos"), values, strict=False))
        return self

    def set_state(self, state: Any) -> None:
        self.__dict__.update(state)


class ArrayUnpickler(pickle._Unpickler):
    """Unpickles arrays, scalars and builtins; every other global is refused by name.

    It is the Python one: the compiled one allocates what an opcode declares before it is there.
    """

    def find_class(self, module: str, name: str) -> Any:
        key = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if key in _BUILDERS:
            return getattr(self, _BUILDERS[key])
        if module in _IMITATION and name in ("Trajectory", "TrajectoryWithRew"):
            return Record
        if key in _ARGUMENTS:
            return None
        raise pickle.UnpicklingError(key)

    def _dtype(self, spec: Any, *_: Any) -> _Dtype:
        return _Dtype(spec)

    def _array(self, *_: Any) -> _Array:
        return _Array((0,))  # type: ignore[no-any-return]

    def _scalar(self, kind: _Dtype, content: Any) -> Any:
        content = content.encode("latin1") if isinstance(content, str) else content
        (value,) = np.frombuffer(content, kind.dtype)
        return value

    def _from_buffer(self, content: Any, kind: _Dtype, shape: Any, order: str, axes: Any = None) -> Any:
        array = np.frombuffer(content, kind.dtype)
        return array.reshape(shape).transpose(axes) if axes is not None else array.reshape(shape, order=order)  # type: ignore[call-overload]

    def _encode(self, text: str, encoding: str) -> bytes:
        return text.encode("latin1")

    def _dict(self, *_: Any) -> dict[Any, Any]:
        return {}

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(made, (_Dtype, _Array, Record)):
            raise pickle.UnpicklingError(f"a state of {type(made).__name__}")
        made.set_state(state)

    def _load_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]
        self.append(bytearray(self.read(size)))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        pickle.BYTEARRAY8[0]: _load_bytearray,
    }


def load_pickle(where: str, content: bytes) -> Any:
    """Return what a pickle holds: arrays, scalars, text, lists, tuples, dicts.

    Raises:
        DataError: It needs anything else, or is malformed.
    Cost: memory for the content, once more. A pickle cannot make it take more.
    """
    try:
        return ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a malformed pickle can raise any
        rule = "must be a pickle of NumPy arrays, numbers, text, lists and dicts only"
        raise DataError(where, rule, f"{error}"[:200] or type(error).__name__) from error

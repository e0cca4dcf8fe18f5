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
_FRAMES = "read it in a program that trusts it: Dataset.from_iterable takes pandas frames"
_ARGUMENTS = ("numpy.ndarray", "builtins.list", "builtins.dict")  # of those; not used
_IMITATION = ("imitation.data.types", "imitation.data.old_types", "imitation.util.rollout")


class _Dtype:
    """A NumPy dtype of numbers or text in a pickle."""

    def __init__(self, spec: Any, *_: Any) -> None:
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
        content = _content(content)
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


def _content(content: Any) -> Any:
    return content.encode("latin1") if isinstance(content, str) else content


def _from_buffer(content: Any, kind: _Dtype, shape: Any, order: Any, axes: Any = None) -> Any:
    array = np.frombuffer(content, kind.dtype)
    return array.reshape(shape, order=order) if axes is None else array.reshape(shape).transpose(axes)


_BUILDERS: dict[str, Callable[..., Any]] = {  # what takes the place of globals
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray._reconstruct": lambda *_: _Array((0,)),
    "numpy.core.multiarray.scalar": lambda kind, content: _from_buffer(_content(content), kind, (), "C")[()],
    "numpy.core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": lambda text, _: text.encode("latin1"),
    "collections.OrderedDict": lambda *_: {},
    "collections.defaultdict": lambda *_: {},
}


class ArrayUnpickler(pickle._Unpickler):
    """Unpickles arrays, scalars and builtins; every other global is refused by name.

    It is the Python one: the compiled one allocates what an opcode declares before it is there.
    """

    def find_class(self, module: str, name: str) -> Any:
        key = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if key in _BUILDERS:
            return _BUILDERS[key]
        if module in _IMITATION and name in ("Trajectory", "TrajectoryWithRew"):
            return Record
        if key in _ARGUMENTS:
            return None
        raise pickle.UnpicklingError(key)

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
    """Return what a pickle holds: arrays, scalars, text, lists, tuples, dicts; a DataError if anything else.

    Cost: memory for the content, once more. A pickle cannot make it take more.
    """
    try:
        return ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a malformed pickle can raise any
        rule = "must be a pickle of NumPy arrays, numbers, text, lists and dicts only"
        remedy = _FRAMES if f"{error}".startswith("pandas.") else ""
        raise DataError(where, rule, f"{error}"[:200] or type(error).__name__, remedy) from error

"""Unpickler that runs no code: it builds only NumPy arrays, scalars and builtins.

It is a stack machine of its own for the opcodes that such pickles contain; any other opcode is
refused. Nothing in a pickle is ever called: a global is a name on the stack, and REDUCE builds the
value that the name stands for. An array is built once, by copying its bytes when its state is
known: no view of it exists before, and no later opcode changes it.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import DataError

PICKLED = "--allow-pickle reads the arrays in it, and runs no code of it"
_FRAMES = "read it in a program that trusts it: Dataset.from_iterable takes pandas frames"
# Globals that are only arguments of those that build a value, such as the factory of a defaultdict.
_ARGUMENTS = ("numpy.ndarray", "builtins.list", "builtins.dict")
_TRAJECTORIES = ("imitation.data.types", "imitation.data.old_types", "imitation.util.rollout")
_FIELDS = ("acts", "obs", "rews", "infos")  # of imitation's Trajectory, where it was a tuple
_OBJECT_BYTES = 80  # about what a dict or a list takes, the largest object that an opcode builds
_SET_BYTES = 256  # an empty set
_OPCODES_AT_ONCE = 4096  # opcodes between two checks of the memory that their objects take
_MOST_SHOWN = 200
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MAX_CODE_POINT = 0x10FFFF


class _Global:
    """The name of a global in a pickle; `make` builds the value of a call of it."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.make = make


class _Dtype:
    """A NumPy dtype of numbers, text or objects; its state, the byte order, is set once."""

    __slots__ = ("_has_state", "dtype")

    def __init__(self, spec: Any, *_: Any) -> None:
        if type(spec) is not str or not re.fullmatch(r"[?OSUbiufc]\d{0,6}", spec):
            raise pickle.UnpicklingError(f"dtype {_shown(spec)}")
        self.dtype = np.dtype(spec)
        self._has_state = False

    def set_state(self, state: Any) -> None:
        is_known = type(state) is tuple and len(state) >= 5 and state[1] in ("<", ">", "=", "|")
        if self._has_state or not is_known:
            raise pickle.UnpicklingError(f"a state of a dtype, {_shown(state)}")
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a dtype with fields")
        self.dtype = self.dtype.newbyteorder(state[1])
        self._has_state = True


class _Pending:
    """A value whose state follows: an array, or imitation's Trajectory, which becomes a dict."""

    __slots__ = ("is_array", "value")

    def __init__(self, is_array: bool) -> None:
        self.is_array = is_array
        self.value: Any = None


class _ArrayMachine:
    """Stack machine that runs the opcodes of a pickle.

    Args:
        spend: Called with the bytes of each value before it is built; raises if all are too many.
    """

    def __init__(self, spend: Callable[[int], None]) -> None:
        self._spend = spend
        self._stack: list[Any] = []  # above the last mark
        self._stacks: list[list[Any]] = []  # below each mark
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Callable[..., Any] | None] = {
            "numpy.dtype": _Dtype,
            "numpy.core.multiarray._reconstruct": self._reconstruct,
            "numpy.core.multiarray.scalar": self._scalar,
            "numpy.core.numeric._frombuffer": self._from_buffer,
            "_codecs.encode": self._encode,
            "collections.OrderedDict": self._ordered_dict,
            "collections.defaultdict": self._default_dict,
            **dict.fromkeys(_ARGUMENTS),
        }

    def run(self, content: bytes) -> Any:
        """Return the value of a pickle."""
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number % _OPCODES_AT_ONCE == 0:
                self._spend(_OPCODES_AT_ONCE * _OBJECT_BYTES)
            if opcode.name in _LITERALS:
                self._push(argument)
            elif opcode.name in _CONSTANTS:
                self._push(_CONSTANTS[opcode.name])
            else:
                self._run(opcode.name, argument)
        value = self._pop()
        _check_plain(value)
        return value

    def _run(self, opcode: str, argument: Any) -> None:
        """Run an opcode on the stack.

        PERSID, BINPERSID, EXT1 to EXT4, INST, OBJ and NEWOBJ_EX are refused because they build
        objects of any class; NEXT_BUFFER and READONLY_BUFFER because they build views.
        """
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self._memo[argument] = self._top()
            case "BINGET" | "LONG_BINGET" | "GET":
                self._get(argument)
            case "MARK":
                self._stacks.append(self._stack)
                self._stack = []
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [self._pop() for _ in range(int(opcode[-1]))]
                self._push(tuple(reversed(items)))
            case "TUPLE":
                self._push(tuple(self._pop_mark()))
            case "EMPTY_LIST":
                self._push([])
            case "LIST":
                self._push(self._pop_mark())
            case "APPEND":
                value = self._pop()
                self._container(list).append(value)
            case "APPENDS":
                values = self._pop_mark()
                self._container(list).extend(values)
            case "EMPTY_DICT":
                self._push({})
            case "DICT":
                self._push(_dict(self._pop_mark()))
            case "SETITEM":
                value = self._pop()
                key = self._pop()
                self._container(dict)[_hashable(key)] = value
            case "SETITEMS":
                values = self._pop_mark()
                self._container(dict).update(_dict(values))
            case "EMPTY_SET":
                self._spend(_SET_BYTES)
                self._push(set())
            case "ADDITEMS":
                values = self._pop_mark()
                self._container(set).update(map(_hashable, values))
            case "FROZENSET":
                self._spend(_SET_BYTES)
                self._push(frozenset(map(_hashable, self._pop_mark())))
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                self._push_global(module, name)
            case "STACK_GLOBAL":
                name = self._pop()
                module = self._pop()
                self._push_global(module, name)
            case "REDUCE" | "NEWOBJ":
                arguments = self._pop()
                made = self._pop()
                self._push(self._call(made, arguments, is_new=opcode == "NEWOBJ"))
            case "BUILD":
                state = self._pop()
                made = self._pop()
                self._push(self._build(made, state))
            case "POP":
                if self._stack:
                    self._pop()
                else:
                    self._pop_mark()
            case "POP_MARK":
                self._pop_mark()
            case "DUP":
                self._push(self._top())
            case _:
                raise pickle.UnpicklingError(f"the opcode {opcode}")

    # The stack. A mark divides it; values below the last mark cannot be reached.

    def _push(self, value: Any) -> None:
        # Its argument is evaluated first: `_pop_mark` replaces the stack.
        self._stack.append(value)

    def _top(self) -> Any:
        if not self._stack:
            raise pickle.UnpicklingError("an empty stack")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        del self._stack[-1]
        return value

    def _pop_mark(self) -> list[Any]:
        if not self._stacks:
            raise pickle.UnpicklingError("a stack without a mark")
        items = self._stack
        self._stack = self._stacks.pop()
        return items

    def _get(self, place: int) -> None:
        # The memo keeps the pending object of an array; the array itself exists since its BUILD.
        if place not in self._memo:
            raise pickle.UnpicklingError(f"no value at {place} in the memo")
        value = self._memo[place]
        is_known = isinstance(value, _Pending) and value.value is not None
        self._push(value.value if is_known else value)

    def _container(self, kind: type) -> Any:
        """Return the value at the top, which must be a list, dict or set that the pickle built."""
        value = self._top()
        if type(value) is not kind:
            raise pickle.UnpicklingError(f"an item of a {type(value).__name__}")
        return value

    # Globals and what they make.

    def _push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise pickle.UnpicklingError("a global without a name")
        key = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        key = key.replace("__builtin__.", "builtins.")  # of protocols before 3
        if module in _TRAJECTORIES and name in ("Trajectory", "TrajectoryWithRew"):
            self._push(_Global(key, self._trajectory))
        elif key in self._globals:
            self._push(_Global(key, self._globals[key]))
        else:
            raise pickle.UnpicklingError(key)

    def _call(self, made: Any, arguments: Any, is_new: bool) -> Any:
        """Build the value of a call of a global; `is_new`: a call of the class's `__new__`."""
        if not isinstance(made, _Global) or made.make is None or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"a call of {_name(made)}")
        if is_new and made.make != self._trajectory:
            raise pickle.UnpicklingError(f"an object of {made.name}")
        try:
            return made.make(*arguments)
        except TypeError as error:  # such as another number of arguments
            raise pickle.UnpicklingError(f"a call of {made.name} with these arguments") from error

    def _build(self, made: Any, state: Any) -> Any:
        """Set the state of an object that has none yet, and return it."""
        if isinstance(made, _Dtype):
            made.set_state(state)
            return made
        if not isinstance(made, _Pending) or made.value is not None:
            raise pickle.UnpicklingError(f"a state of {_name(made)}")
        made.value = self._array_of_state(state) if made.is_array else _dict_of_state(state)
        return made.value

    def _trajectory(self, *values: Any) -> Any:
        return dict(zip(_FIELDS, values, strict=False)) if values else _Pending(is_array=False)

    def _reconstruct(self, kind: Any, *_: Any) -> _Pending:
        if not isinstance(kind, _Global) or kind.name != "numpy.ndarray":
            raise pickle.UnpicklingError(f"an array of the class {_name(kind)}")
        return _Pending(is_array=True)

    def _array_of_state(self, state: Any) -> np.ndarray:
        is_known = type(state) is tuple and len(state) in (4, 5) and isinstance(state[-3], _Dtype)
        if not is_known:
            raise pickle.UnpicklingError(f"a state of an array {_shown(state)}")
        shape, kind, is_fortran, content = state[-4:]  # of five, the first is a version
        if kind.dtype.hasobject:
            return self._objects(content, shape, "F" if is_fortran else "C")
        return self._array(_bytes(content), kind, shape, "F" if is_fortran else "C")

    def _from_buffer(
        self, content: Any, kind: Any, shape: Any, order: Any, axes: Any = None
    ) -> np.ndarray:
        if order not in ("C", "F", "K") or (axes is not None and not _is_shape(axes)):
            raise pickle.UnpicklingError(f"an array in the order {_shown(order)} of {_shown(axes)}")
        array = self._array(content, kind, shape, "F" if order == "F" else "C")
        return array if axes is None else array.transpose(axes)

    def _scalar(self, kind: Any, content: Any) -> Any:
        return self._array(_bytes(content), kind, (), "C")[()]

    def _array(self, content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
        """Copy bytes into an array."""
        if (
            not isinstance(kind, _Dtype)
            or kind.dtype.hasobject
            or type(content) not in (bytes, bytearray)
        ):
            held = kind.dtype.name if isinstance(kind, _Dtype) else _name(kind)
            raise pickle.UnpicklingError(f"an array of {held} made of {_name(content)}")
        dtype = kind.dtype
        if not _is_shape(shape) or math.prod(shape) * dtype.itemsize != len(content):
            raise pickle.UnpicklingError(
                f"an array of shape {_shown(shape)} with {len(content)} bytes"
            )
        self._spend_array(len(content), shape)
        array = np.empty(len(content) // max(1, dtype.itemsize), dtype)
        array.view(np.uint8)[:] = np.frombuffer(content, np.uint8)
        # Bytes other than 0 and 1 would be bools, and code points beyond Unicode texts, whose use
        # is undefined.
        if dtype.kind == "b":
            array = array.view(np.uint8) != 0
        if dtype.kind == "U":
            code_points = array.view(np.dtype("u4").newbyteorder(dtype.byteorder))
            if np.any(code_points > _MAX_CODE_POINT):
                raise pickle.UnpicklingError("a text that is not Unicode")
        shaped: np.ndarray = array.reshape(shape, order=order)
        return shaped

    def _objects(self, content: Any, shape: Any, order: Any) -> np.ndarray:
        if type(content) is not list or not _is_shape(shape) or math.prod(shape) != len(content):
            raise pickle.UnpicklingError(f"an array of shape {_shown(shape)} of objects")
        self._spend_array(8 * len(content), shape)
        array = np.empty(len(content), object)
        for place, value in enumerate(content):
            array[place] = value
        shaped: np.ndarray = array.reshape(shape, order=order)
        return shaped

    def _spend_array(self, num_bytes: int, shape: tuple[int, ...]) -> None:
        # Rows without values take no bytes, so a shape such as [10**9, 0] could state any number.
        rows = 0 if num_bytes else math.prod(max(1, size) for size in shape)
        self._spend(num_bytes + rows * _OBJECT_BYTES)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"bytes in the encoding {_shown(encoding)}")
        self._spend(len(text))
        return text.encode("latin1")

    def _ordered_dict(self, pairs: Any = ()) -> dict[Any, Any]:
        kinds = (list, tuple)
        if type(pairs) not in kinds or not all(
            type(pair) in kinds and len(pair) == 2 for pair in pairs
        ):
            raise pickle.UnpicklingError("an OrderedDict of other than pairs")
        return _dict([part for pair in pairs for part in pair])

    def _default_dict(self, factory: Any = None) -> dict[Any, Any]:
        if factory is not None and not isinstance(factory, _Global):
            raise pickle.UnpicklingError(f"a defaultdict of {_name(factory)}")
        return {}


_LITERALS = frozenset(  # opcodes whose argument is the value
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
    "SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def load_pickle(where: str, content: bytes, expansion: Expansion, file_bytes: int) -> Any:
    """Return the value of a pickle of arrays, scalars, text, lists, tuples, sets and dicts.

    Args:
        where: Name of the pickle, for errors.
        expansion: Bound of the memory that the values take, about.
        file_bytes: Bytes of the file that the pickle is from, which the bound is relative to.
    Raises:
        DataError: It is malformed, holds objects of other types, or exceeds the bound.
    """
    num_bytes = 0

    def spend(count: int) -> None:
        nonlocal num_bytes
        num_bytes += count
        expansion.check(where, num_bytes, file_bytes)

    try:
        return _ArrayMachine(spend).run(content)
    except DataError:
        raise
    except Exception as error:  # a malformed pickle can raise any
        remedy = _FRAMES if f"{error}".startswith("pandas.") else "save the arrays with np.savez"
        raise DataError(
            where,
            "must be a pickle of NumPy arrays, numbers, text, lists and dicts only",
            f"{error}"[:_MOST_SHOWN] or type(error).__name__,
            remedy,
        ) from error


def _bytes(content: Any) -> Any:
    """Return bytes; Python 2 wrote them as a str."""
    return content.encode("latin1") if type(content) is str else content


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)


def _dict(values: list[Any]) -> dict[Any, Any]:
    """Return the dict of alternating keys and values."""
    return {_hashable(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def _dict_of_state(state: Any) -> dict[str, Any]:
    values = state[0] if type(state) is tuple and len(state) == 2 and state[1] is None else state
    if type(values) is not dict or not all(type(key) is str for key in values):
        raise pickle.UnpicklingError(f"a state of a Trajectory, {_shown(state)}")
    return dict(values)


def _hashable(key: Any) -> Any:
    """Return a key that is a plain value or a flat tuple of them.

    Python's hash of nested tuples recurses without a limit, and would overflow the stack.
    """
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _PLAIN or isinstance(part, np.generic) for part in parts):
        raise pickle.UnpicklingError(f"a key {_shown(key)}")
    return key


def _check_plain(value: Any) -> None:
    """Raise unless a value holds only arrays and builtins, at any depth; cycles are admitted."""
    known: set[int] = set()
    remaining = [value]
    while remaining:
        one = remaining.pop()
        if type(one) in (*_PLAIN, bytearray) or isinstance(one, np.generic) or id(one) in known:
            continue
        known.add(id(one))
        if type(one) is dict:
            remaining += one.values()  # keys are plain
        elif type(one) in (list, tuple):
            remaining += one
        elif type(one) is np.ndarray:
            remaining += one.ravel().tolist() if one.dtype.hasobject else ()
        elif type(one) not in (set, frozenset):  # whose items are plain
            raise pickle.UnpicklingError(f"a value {_name(one)}")


def _name(value: Any) -> str:
    return value.name if isinstance(value, _Global) else type(value).__name__


def _shown(value: Any) -> str:
    """Return a short text for a value of any size and depth."""
    if type(value) in (str, bytes):
        return repr(value[:_MOST_SHOWN])
    if type(value) is int and value.bit_length() < _MOST_SHOWN:
        return str(value)
    if type(value) is tuple and all(type(part) is int for part in value[:_MOST_SHOWN]):
        return f"({', '.join(map(_shown, value[:8]))}{',' if len(value) == 1 else ''})"
    return type(value).__name__

"""The stub of the native module tells what the built one has."""

import ast
import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from op_kit import REFERENCE, WITHOUT_REFERENCE

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.backends import OP_NAMES

STUB = Path(__file__).resolve().parents[3] / "deepspeed_gear" / "ops" / "_native.pyi"


def test_stub_lists_what_is_built() -> None:
    native = load_backend("cpu").native
    others = (name for name in dir(native) if not name.startswith("_") and name not in OP_NAMES)
    built = {name: getattr(native, name) for name in others}
    body = ast.parse(STUB.read_text()).body
    stub = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert stub.keys() == built.keys()
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
            assert methods - {"__init__"} == {
                one for one in vars(built[name]) if not one.startswith("_")
            }
            continue
        arguments = [argument.arg for argument in node.args.posonlyargs]
        if "arg0" in (built[name].__doc__ or ""):
            continue  # of pybind11, which checks and describes its arguments itself
        signature = (inspect.getdoc(built[name]) or "").split(" ->")[0]
        assert signature == f"{name}({', '.join(arguments)})"


def test_bells_as_the_stub_says() -> None:
    native = load_backend("cpu").native
    word = torch.zeros(1, dtype=torch.int32)
    event = word.data_ptr()
    assert native.futex_wait(event, 1, 3600.0) == 0  # not what was seen: at once
    assert native.futex_wait(event, 0, 0.05) == 0  # after that time
    native.futex_notify(event)
    assert native.futex_wait(event, 0, 3600.0) == 1
    ringer = threading.Timer(0.05, native.futex_notify, [event])
    ringer.start()
    assert native.futex_wait(event, 1, 3600.0) == 2  # woken; the GIL was free meanwhile
    word[0] = -1
    native.futex_notify(event)
    assert native.futex_wait(event, (1 << 32) - 1, 3600.0) == 0  # counts modulo 2 ** 32
    assert native.fence() is None


def test_every_op_follows_from_the_op_table() -> None:
    """The names and arguments of the schemas are those of `Ops`, the plain functions and the
    reference.
    """
    native = load_backend("cpu").native
    registered = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gear::")
    }
    assert registered == {f"gear::{name}" for name in OP_NAMES}
    for name in OP_NAMES:
        schema = getattr(torch.ops.gear, name).default._schema
        arguments = [argument.name for argument in schema.arguments]
        if name not in WITHOUT_REFERENCE:
            assert arguments == [*inspect.signature(getattr(REFERENCE, name)).parameters]
        plain = getattr(native, name, None)
        if plain is None:
            assert name.startswith("ring_") or name == "scatter_"
        else:
            assert f"gear::{(plain.__doc__ or '').replace('=None', '')}" == str(schema).replace(
                "=None", ""
            )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((1, 0, 0, 0, 1), TypeError, "expected a tensor, got int"),
        ((1, 0), TypeError, "expected 5 arguments, got 2"),
        ((torch.zeros(1).long(), 0, 0, 0, "1"), TypeError, "str"),
        ((torch.zeros(1).long(), 0, 0, 0, 1 << 70), OverflowError, "too big"),
        ((torch.zeros(1).long(), 0, 0, 0, 0), RuntimeError, "total must be positive, got 0$"),
        ((torch.zeros(1), 0, 0, 0, 1), RuntimeError, "coordinates must be Long, got Float$"),
    ],
)
def test_a_plain_function_refuses(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load_backend("cpu").on_host().draw_(*arguments)


def test_lists_of_a_plain_function() -> None:
    none = torch.empty(0)
    counters = torch.zeros(3, dtype=torch.int64)
    records = torch.tensor([[0, 0, 0, 1, 2, 1, 0, 0]])
    spec = [0, 0, 1, 0, 0, 0, 2, 0, 0, 1]
    column = torch.arange(8.0).view(4, 2)
    out = torch.zeros(1, 2)
    mask = torch.zeros(1, dtype=torch.bool)
    gather = load_backend("cpu").on_host().gather_
    gather((out,), [mask], counters, [column], [none], [none], records, None, spec, [0.0], 1)
    assert out.tolist() == [[4, 5]]
    assert mask.all()
    for bad in (out, None, [None], [spec]):
        with pytest.raises(TypeError, match=r"gear: expected a (list or a tuple|tensor), got"):
            gather(bad, [mask], counters, [column], [none], [none], records, None, spec, [0.0], 1)


def test_a_plain_function_keeps_no_reference() -> None:
    tensors = [torch.zeros(1).long(), torch.zeros(1, 8).long(), torch.ones(3)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    draw = load_backend("cpu").on_host().draw_
    for _ in range(10):
        draw(tensors[0], 0, 0, 0, 5)
        with pytest.raises(RuntimeError):
            draw(tensors[2], 0, 0, 0, 5)
    assert [sys.getrefcount(tensor) for tensor in tensors] == before

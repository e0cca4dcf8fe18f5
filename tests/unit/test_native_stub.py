"""The stub of the native module tells what the built one has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch

from deepspeed_gear.ops import fake, load_backend

STUB = Path(__file__).resolve().parents[2] / "deepspeed_gear" / "ops" / "_native.pyi"


def test_stub_lists_what_is_built() -> None:
    native = load_backend("cpu").native
    assert native is not None
    built = {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}
    stub = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert stub.keys() == built.keys()
    for name, node in stub.items():
        arguments = [argument.arg for argument in node.args.posonlyargs]
        signature = (inspect.getdoc(built[name]) or "").split(" ->")[0]
        assert signature == f"{name}({', '.join(arguments)})"


def test_mutex_as_the_stub_says() -> None:
    native = load_backend("cpu").native
    assert native is not None
    memory = torch.zeros(128, dtype=torch.uint8)
    address = memory.data_ptr()
    native.mutex_init(address)
    assert native.mutex_owner(address) == 0
    assert native.mutex_lock(address, 0.0) == 0
    assert native.mutex_owner(address) > 0
    assert native.mutex_lock(address, 0.01) == 2
    native.mutex_unlock(address)
    assert native.mutex_owner(address) == 0


def test_every_op_is_registered() -> None:
    load_backend("cpu")
    assert all(hasattr(torch.ops.gear, name) for name in fake.OP_NAMES)

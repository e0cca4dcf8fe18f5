"""A layer imports only from layers to its left."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_gear.ops import load_backend

PACKAGE = "deepspeed_gear"
LAYERS = (
    "errors outcome timeouts public_names arguments liveness schema context config ops data store sampling "
    "batching distributed checkpoint writer device replay actors remote engine cli __main__"
).split()
RANK = {layer: rank for rank, layer in enumerate(LAYERS)}


def gear_imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Name every module of ours that a module imports, at any depth: in functions and for types only, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            # `from .. import errors` names a module; `from ..errors import GearError` names what is in one.
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == PACKAGE else [whole]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == PACKAGE)


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """List the imports of a module that do not go to the left."""
    own = module.split(".")[1]
    if own not in RANK:
        return [f"{module}: {own} is in no layer; add it to the order in this test and in the design"]
    wrong = []
    for target in gear_imports(source, module, is_package):
        parts = target.split(".")
        rank = RANK.get(parts[1]) if len(parts) > 1 else None
        if rank is None:
            # The package's own __init__ imports everything: only the outermost layer may use it.
            if own != "cli":
                wrong.append(f"{module} imports {target}, which is the whole package")
        elif rank > RANK[own]:
            wrong.append(f"{module} imports {target}, to its right")
    return wrong


def test_every_import_goes_to_the_left(checkout: Path) -> None:
    root = checkout / PACKAGE
    files = [file for file in sorted(root.rglob("*.py")) if file != root / "__init__.py"]
    assert len(files) > 10
    wrong = []
    for file in files:
        parts = [PACKAGE, *file.relative_to(root).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        wrong += wrong_arrows(file.read_text(), module, is_package)
    assert wrong == []


# What resolves a config, or takes one from a program.
READS_CONFIG = {
    "config",
    "distributed/resolved_plan",
    "distributed/table_resolution",
    "distributed/stream_resolution",
    "distributed/shard_placement",
    "distributed/row_exchange/exchange_plan",
    "replay/replay",
    "replay/device_replay",
    "replay/normalizer",
    "replay/preview",
    "engine",
    "cli",
}


def test_below_the_resolved_plan_nothing_reads_a_config(checkout: Path) -> None:
    files = sorted((checkout / PACKAGE).rglob("*.py"))
    found = {
        str(f.relative_to(checkout / PACKAGE).with_suffix("")) for f in files if "GearConfig" in f.read_text()
    }
    others = {name for name in found if name not in READS_CONFIG and name.split("/")[0] not in READS_CONFIG}
    assert others == set()


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from deepspeed_gear.replay import Replay", "deepspeed_gear.store.table", False),
        ("from ..replay import Replay", "deepspeed_gear.store.table", False),
        ("from ..replay import Replay", "deepspeed_gear.store", True),
        ("from .engine import attach", "deepspeed_gear.errors", False),
        ("from .. import engine", "deepspeed_gear.ops.load", False),
        ("def f():\n    import deepspeed_gear.cli.main", "deepspeed_gear.engine", False),
        ("if TYPE_CHECKING:\n    from ..config import GearConfig", "deepspeed_gear.schema.column", False),
        ("from deepspeed_gear import Replay", "deepspeed_gear.batching.batch", False),
        ("x = 1", "deepspeed_gear.utils", False),
    ],
)
def test_a_wrong_arrow_is_found(source: str, module: str, is_package: bool) -> None:
    assert wrong_arrows(source, module, is_package) != []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..errors import GearError", "deepspeed_gear.store.table"),
        ("from .layout import size", "deepspeed_gear.store.table"),
        ("import deepspeed\nimport torch", "deepspeed_gear.errors"),
        ("from ..writer.inserter import Inserter", "deepspeed_gear.replay.tables"),
        ("from deepspeed_gear import Replay", "deepspeed_gear.cli.inspect"),
    ],
)
def test_a_right_arrow_passes(source: str, module: str) -> None:
    assert wrong_arrows(source, module) == []


# Takes no engine: every public name but those of the engine, and a batch.
WITHOUT_ENGINE = """
import sys
import deepspeed_gear
names = [n for n in deepspeed_gear.__all__ if n not in ("attach", "disable", "enable", "initialize")]
for name in names:
    getattr(deepspeed_gear, name)
assert set(deepspeed_gear.__all__) <= set(dir(deepspeed_gear))
table = {"capacity_steps": 9, "schema": {"columns": {"x": {"dtype": "float32"}}}}
with deepspeed_gear.Replay({"batch_size": 2, "tables": {"main": table}}) as replay:
    replay.add({"x": [1.0]})
    replay.sample()
for name in ("deepspeed", "torch._dynamo"):
    assert name not in sys.modules, name
"""


def test_without_an_engine_neither_deepspeed_nor_torchs_compiler_is_imported(
    run_python: Callable[..., subprocess.CompletedProcess[str]], checkout: Path
) -> None:
    """Either takes seconds of each process; DeepSpeed also warns where it finds no GPU."""
    load_backend()  # builds the op if that is still to be done, which needs DeepSpeed
    found = run_python("-c", WITHOUT_ENGINE, env={"PYTHONPATH": str(checkout), "DS_ACCELERATOR": None})
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_build_does_not_print_the_warning_of_deepspeed(
    run_python: Callable[..., subprocess.CompletedProcess[str]], checkout: Path
) -> None:
    program = """
import logging
from deepspeed_gear.ops.load import _without_accelerator_warning
with _without_accelerator_warning():
    from deepspeed_gear.ops.builder import GearBuilder
assert logging.getLogger("DeepSpeed").filters == []
logging.getLogger("DeepSpeed").warning("another warning")
"""
    found = run_python("-c", program, env={"PYTHONPATH": str(checkout), "DS_ACCELERATOR": None})
    assert found.returncode == 0, found.stderr
    assert "accelerator" not in found.stdout + found.stderr
    assert "another warning" in found.stdout + found.stderr

"""A layer imports only from layers to its left, and no two modules import each other."""

import ast
import subprocess
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from deepspeed_gear.ops import load_backend

PACKAGE = "deepspeed_gear"
LAYERS = (
    "errors outcome log timeouts public_names notebook_views arguments liveness file_system schema config "
    "ops data store distributed sampling batching row_exchange plan frameworks checkpoint writer "
    "device replay actors remote engine integrations cli __main__"
).split()
RANK = {layer: rank for rank, layer in enumerate(LAYERS)}


class Module(NamedTuple):
    """A module, by its whole name."""

    name: str
    tree: ast.Module
    is_package: bool = False


@pytest.fixture(scope="module")
def modules(trees: dict[str, ast.Module]) -> list[Module]:
    assert len(trees) > 10
    init = ".__init__"
    return [
        Module(name.removesuffix(init), tree, name.endswith(init)) for name, tree in trees.items()
    ]


def gear_imports(module: Module) -> Iterator[tuple[str, list[str]]]:
    """Yield what a module imports of ours, at any depth: in functions and for types only, too.

    Yields:
        The module that an import names, and what it takes from there, which may be modules.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, list[str]()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.name.split(".")
            base = parts[: len(parts) - node.level + module.is_package] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            found = [(whole, [alias.name for alias in node.names])]
        else:
            continue
        yield from (one for one in found if one[0].split(".")[0] == PACKAGE)


def wrong_arrows(module: Module) -> list[str]:
    """List the imports of a module that do not go to the left."""
    own = module.name.split(".")[1]
    if own not in RANK:
        return [
            f"{module.name}: {own} is in no layer; add it to the order in this test and in the "
            f"design"
        ]
    wrong = []
    for whole, names in gear_imports(module):
        # `from .. import errors` names a module; `from ..errors import GearError` names what is in
        # one.
        for target in [f"{whole}.{name}" for name in names] if whole == PACKAGE else [whole]:
            rank = RANK.get(target.split(".")[1]) if "." in target else None
            if rank is None and own != "cli":
                # The package's own __init__ imports everything: only the outermost layer may use
                # it.
                wrong.append(f"{module.name} imports {target}, which is the whole package")
            elif rank is not None and rank > RANK[own]:
                wrong.append(f"{module.name} imports {target}, to its right")
    return wrong


def test_every_import_goes_to_the_left(modules: list[Module]) -> None:
    assert [
        arrow for module in modules if module.name != PACKAGE for arrow in wrong_arrows(module)
    ] == []


# What resolves a config, or takes one from a program.
READS_CONFIG = {
    "config",
    "plan",
    "distributed/shard_placement",
    "row_exchange/exchange_plan",
    "replay/replay",
    "replay/device_replay",
    "replay/normalizer",
    "replay/preview",
    "replay/packed/pack_preview",
    "engine",
    "cli",
}


def test_below_the_resolved_plan_nothing_reads_a_config(checkout: Path) -> None:
    files = sorted((checkout / PACKAGE).rglob("*.py"))
    found = {
        str(f.relative_to(checkout / PACKAGE).with_suffix(""))
        for f in files
        if "GearConfig" in f.read_text()
    }
    others = {
        name
        for name in found
        if name not in READS_CONFIG and name.split("/")[0] not in READS_CONFIG
    }
    assert others == set()


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from deepspeed_gear.replay.replay import Replay", "store.table", False),
        ("from ..replay import Replay", "store.table", False),
        ("from ..replay import Replay", "store", True),
        ("from .engine import attach", "errors", False),
        ("from .. import engine", "ops.jit", False),
        ("def f():\n    import deepspeed_gear.cli.main", "engine", False),
        ("if TYPE_CHECKING:\n    from ..config import GearConfig", "schema.column", False),
        ("from deepspeed_gear import Replay", "batching.batch", False),
        ("x = 1", "utils", False),
    ],
)
def test_a_wrong_arrow_is_found(source: str, module: str, is_package: bool) -> None:
    assert wrong_arrows(Module(f"{PACKAGE}.{module}", ast.parse(source), is_package)) != []


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Return which modules each one imports, at any depth: a circle through a function is one, too.

    A package stands for its `__init__.py`, and is a target where what is taken from it is no
    module.
    """
    known = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        targets: set[str] = set()
        for whole, names in gear_imports(module):
            from_modules = {f"{whole}.{name}" for name in names} & known
            targets |= from_modules
            if len(from_modules) < len(names) or not names:
                targets.add(whole)
        graph[module.name] = (targets & known) - {module.name}
    return graph


def circle(modules: list[Module]) -> list[str]:
    """Return a circle of modules that import each other; empty: there is none."""
    try:
        TopologicalSorter(import_graph(modules)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other(modules: list[Module]) -> None:
    assert circle(modules) == []
    assert sum(map(len, import_graph(modules).values())) > len(modules)


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "from deepspeed_gear.b import x", "b": "from . import a"},
        {"a": "def f():\n    from deepspeed_gear.b import x", "b": "import deepspeed_gear.a"},
        {
            "a": "def f():\n    from deepspeed_gear.p import x",
            "p.__init__": "from deepspeed_gear.a import y",
        },
        {
            "p.a": "from . import x",
            "p.__init__": "from .b import x",
            "p.b": "def f():\n    from .a import y",
        },
    ],
    ids=["modules", "in-a-function", "through-a-package", "of-the-own-package"],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    modules = [
        Module(
            f"{PACKAGE}.{name.removesuffix('.__init__')}",
            ast.parse(source),
            name.endswith("__init__"),
        )
        for name, source in sources.items()
    ]
    assert len(circle(modules)) > 2
    assert circle(modules[:1]) == []


# What a first batch does without: a process that only samples would import it for nothing. torch's
# extension builder imports setuptools.
NOT_FOR_A_BATCH = (
    "deepspeed torch._dynamo torch.utils.cpp_extension setuptools h5py rich pyarrow pandas grpc "
    "matplotlib gymnasium transformers deepspeed_gear.device.device_table deepspeed_gear.ops.op_builders "
    "deepspeed_gear.replay.device_replay deepspeed_gear.actors.start_actors deepspeed_gear.data.ingest "
    "deepspeed_gear.remote.remote_writer deepspeed_gear.engine.attach deepspeed_gear.cli.main"
).split()
# Takes a first batch, then no engine: every public name but those of the engine, and a batch.
WITHOUT_ENGINE = """
import gc
import sys
import deepspeed_gear
table = {"capacity_steps": 9, "schema": {"columns": {"x": {"dtype": "float32"}}}}
with deepspeed_gear.Replay({"batch_size": 2, "tables": {"main": table}}) as replay:
    replay.add({"x": [1.0]})
    replay.sample()
assert gc.isenabled()
print(*sorted(set(BEFORE_A_BATCH) & set(sys.modules)))
names = [n for n in deepspeed_gear.__all__ if n not in ("attach", "disable", "enable", "initialize")]
for name in names:
    getattr(deepspeed_gear, name)
assert set(deepspeed_gear.__all__) <= set(dir(deepspeed_gear))
for name in ("deepspeed", "torch._dynamo"):
    assert name not in sys.modules, name
"""


def test_a_batch_without_an_engine_imports_neither_deepspeed_nor_torchs_compiler(
    run_python: Callable[..., subprocess.CompletedProcess[str]], checkout: Path
) -> None:
    """Either takes seconds of each process; DeepSpeed also warns where it finds no GPU."""
    load_backend()  # builds the op if that is still to be done, which needs DeepSpeed
    program = WITHOUT_ENGINE.replace("BEFORE_A_BATCH", repr(NOT_FOR_A_BATCH))
    found = run_python("-c", program, env={"PYTHONPATH": str(checkout), "DS_ACCELERATOR": None})
    assert (found.returncode, found.stdout, found.stderr) == (0, "\n", "")


def test_a_build_does_not_print_the_warning_of_deepspeed(
    run_python: Callable[..., subprocess.CompletedProcess[str]], checkout: Path
) -> None:
    program = """
import logging
from deepspeed_gear.ops.backends import _builder
assert _builder("GearBuilder").NAME == "gear"
assert logging.getLogger("DeepSpeed").filters == []
logging.getLogger("DeepSpeed").warning("another warning")
"""
    found = run_python("-c", program, env={"PYTHONPATH": str(checkout), "DS_ACCELERATOR": None})
    assert found.returncode == 0, found.stderr
    assert "accelerator" not in found.stdout + found.stderr
    assert "another warning" in found.stdout + found.stderr

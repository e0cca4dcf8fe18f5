"""Rules that keep the package readable: whole classes, short signatures, no import circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "deepspeed_gear"
MOST_PARAMETERS = 8
RECORD_BASES = {"NamedTuple", "Protocol", "BaseModel", "GearModel", "TypedDict", "Sampler"}


def modules(root: Path) -> dict[str, tuple[ast.Module, bool]]:
    """Return the syntax tree of each module, and whether it is a package's own."""
    found = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        is_package = name.endswith(".__init__")
        found[name.removesuffix(".__init__")] = (ast.parse(file.read_text(encoding="utf-8")), is_package)
    return found


@pytest.fixture(scope="module")
def trees(checkout: Path) -> dict[str, tuple[ast.Module, bool]]:
    return modules(checkout)


# ---- import circles --------------------------------------------------------------------------------


def imports(name: str, tree: ast.Module, is_package: bool, known: set[str]) -> set[str]:
    """Return the modules that a module imports, at any depth, for types only too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            found.update({whole, *(f"{whole}.{alias.name}" for alias in node.names)})
    return {one for one in found if one in known and one != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected, by Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_modules_import_each_other(trees: dict[str, tuple[ast.Module, bool]]) -> None:
    known = {name for name, (_, is_package) in trees.items() if not is_package}
    graph = {name: imports(name, trees[name][0], False, known) for name in sorted(known)}
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


# ---- signatures ------------------------------------------------------------------------------------


def long_signatures(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Return the functions with more than `MOST_PARAMETERS` parameters. Constructors of records have none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([name for name in names if name.arg not in ("self", "cls")])
            if count > MOST_PARAMETERS:
                yield node.name, count


def test_no_function_takes_more_than_eight_parameters(trees: dict[str, tuple[ast.Module, bool]]) -> None:
    found = [
        f"{name}: {function} takes {count}"
        for name, (tree, _) in trees.items()
        if not name.startswith(f"{PACKAGE}.ops.reference")
        for function, count in long_signatures(tree)
    ]
    assert sorted(found) == []


# ---- whole classes ---------------------------------------------------------------------------------


def _is_record(node: ast.ClassDef) -> bool:
    words = {ast.unparse(base).split(".")[-1] for base in node.bases}
    decorators = {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}
    return bool(words & RECORD_BASES) or "dataclass" in decorators


def defined(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class defines: methods, class variables, what methods assign to self."""
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.Assign):
            found.update(name.id for name in ast.walk(child) if isinstance(name, ast.Name))
        elif isinstance(child, ast.AnnAssign):
            is_value = (
                child.value is not None or _is_record(node) or "ClassVar" in ast.unparse(child.annotation)
            )
            if is_value and isinstance(child.target, ast.Name):
                found.add(child.target.id)
    for child in ast.walk(node):
        is_stored = isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        if is_stored and isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
            found.add(child.attr)
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.add(child.value)  # __slots__ and object.__setattr__(self, "name", ...)
    return found


def used(node: ast.ClassDef) -> set[str]:
    """Return the attributes of self that a class reads."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self"
    }


def partial_classes(trees: dict[str, tuple[ast.Module, bool]]) -> list[str]:
    """Return the classes that read attributes which neither they nor their bases define."""
    classes = {
        node.name: node
        for tree, _ in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = []
    for name, (tree, _) in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            known, open_bases, left = {*dir(object), "__dict__"}, False, [node]
            while left:
                one = left.pop()
                known |= defined(one)
                for base in one.bases:
                    base_name = ast.unparse(base).split("[")[0].split(".")[-1]
                    if base_name in classes:
                        left.append(classes[base_name])
                    elif base_name not in ("Generic", "object"):
                        open_bases = True  # of another package: what it defines is not known here
            missing = used(node) - known
            if missing and not open_bases:
                found.append(f"{name}.{node.name} reads {', '.join(sorted(missing))}")
    return found


def test_classes_define_what_they_use(trees: dict[str, tuple[ast.Module, bool]]) -> None:
    assert partial_classes(trees) == []


def assigned_from_outside(tree: ast.Module) -> Iterator[str]:
    """Return the assignments to attributes of other objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            holder = node.value
            if isinstance(holder, ast.Name) and holder.id in ("self", "cls"):
                continue
            yield ast.unparse(node)


def own_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes of the classes that a module defines: it may fill its own records."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in defined(node)}


# Attributes of other projects' objects: their interface is that they are set.
OF_OTHERS = set(
    "parser.description env_report.accelerator_name engine.gear engine.gear_sample engine.gear_iterator "
    "engine.gear_update_priorities engine.gear_batches engine.train_batch engine.eval_batch LOG.propagate "
    "engine.gear_step engine.gear_rollout engine.step self._engine.global_samples "
    "deepspeed.initialize sys.excepthook accelerator.get_op_builder accelerator.create_op_builder "
    "extension.CUDA_HOME wrapped._gear_wrapped self._broken.__cause__".split()
) | {"weakref.finalize(memory, native.map_guard_remove, entry).atexit"}


def test_objects_are_whole_after_construction(trees: dict[str, tuple[ast.Module, bool]]) -> None:
    found = [
        f"{name}: {target}"
        for name, (tree, _) in trees.items()
        for target in assigned_from_outside(tree)
        if target not in OF_OTHERS and target.rsplit(".", 1)[-1] not in own_attributes(tree)
    ]
    assert sorted(found) == []

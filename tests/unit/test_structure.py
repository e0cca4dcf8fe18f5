"""Rules that keep the package readable: whole classes, short signatures, private names, one
assignment per statement.
"""

import ast
from collections.abc import Iterator

import pytest

from deepspeed_gear import errors

PACKAGE = "deepspeed_gear"
MOST_PARAMETERS = 8
RECORD_BASES = {"NamedTuple", "Protocol", "BaseModel", "GearModel", "TypedDict", "Sampler"}


def test_no_function_takes_more_than_eight_parameters(trees: dict[str, ast.Module]) -> None:
    """Constructors of records have none."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not name.startswith(
                f"{PACKAGE}.ops.reference"
            ):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([one for one in arguments if one.arg not in ("self", "cls")])
                if count > MOST_PARAMETERS:
                    found.append(f"{name}: {node.name} takes {count}")
    assert found == []


def _is_record(node: ast.ClassDef) -> bool:
    words = {ast.unparse(base).split(".")[-1] for base in node.bases}
    decorators = {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}
    return bool(words & RECORD_BASES) or "dataclass" in decorators


def defined(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class defines: methods, class variables, what methods assign to
    self.
    """
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.Assign):
            found.update(name.id for name in ast.walk(child) if isinstance(name, ast.Name))
        elif isinstance(child, ast.AnnAssign):
            is_value = (
                child.value is not None
                or _is_record(node)
                or "ClassVar" in ast.unparse(child.annotation)
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
        if isinstance(child, ast.Attribute)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def test_classes_define_what_they_use(trees: dict[str, ast.Module]) -> None:
    """No class reads attributes of self which neither it nor its bases define."""
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            known = {*dir(object), "__dict__"}
            open_bases = False
            left = [node]
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
    assert found == []


def assigned_from_outside(tree: ast.Module) -> Iterator[str]:
    """Return the assignments to attributes of objects of other modules: one may fill its own
    records.
    """
    own = {
        name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in defined(node)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr not in own
        ):
            holder = node.value
            if not isinstance(holder, ast.Name) or holder.id not in ("self", "cls"):
                yield ast.unparse(node)


# Attributes of other projects' objects: their interface is that they are set.
OF_OTHERS = set(
    "parser.description env_report.accelerator_name engine.gear engine.gear_sample "
    "engine.gear_iterator engine.gear_update_priorities engine.gear_batches engine.train_batch "
    "engine.eval_batch LOG.propagate engine.gear_step engine.gear_rollout engine.step "
    "context.ranks self._engine.global_samples deepspeed.initialize sys.excepthook "
    "accelerator.get_op_builder accelerator.create_op_builder extension.CUDA_HOME "
    "stream.thread_type stream.codec_context.options wrapped._gear_wrapped self._broken.__cause__ "
    "sys.unraisablehook args.ignore_data_skip trainer.replay_buffer "
    "trainer.dataloader_pin_memory".split()
) | {"weakref.finalize(memory, remove, entry).atexit"}


def test_objects_are_whole_after_construction(trees: dict[str, ast.Module]) -> None:
    targets = (
        (name, target) for name, tree in trees.items() for target in assigned_from_outside(tree)
    )
    assert [f"{name}: {target}" for name, target in targets if target not in OF_OTHERS] == []


def is_private(name: str) -> bool:
    """Return whether a name is private; `_repr_html_` and the like are protocols of notebooks."""
    return name.startswith("_") and not name.endswith("_")


def is_own(node: ast.Attribute) -> bool:
    """Return whether an attribute is one of the object or class whose method names it."""
    return ast.unparse(node.value) in ("self", "cls", "super()")


def own_private_names(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines: functions, classes, variables, attributes of
    self.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def private_names_of_others(trees: dict[str, ast.Module]) -> list[str]:
    """Return where a module imports, reads or sets a private name of another module of the package.

    An attribute is another module's if its name is defined in one, and not in the module that uses
    it.
    """
    own = {name: own_private_names(tree) for name, tree in trees.items()}
    of_package = set[str]().union(*own.values())
    found = []
    for name, tree in trees.items():
        others = of_package - own[name]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (
                node.level or str(node.module).startswith(PACKAGE)
            ):
                private = [alias.name for alias in node.names if is_private(alias.name)]
                found += [f"{name} imports {each}" for each in private]
            elif isinstance(node, ast.Attribute) and node.attr in others and not is_own(node):
                found.append(f"{name}: {ast.unparse(node)}")
    return found


# Names of other projects that a module of the package has, too.
PRIVATE_OF_OTHERS = {
    "deepspeed_gear.cli.main: subparser._actions",  # argparse's list of options
    "deepspeed_gear.cli.report: get_accelerator()._name",
    "deepspeed_gear.writer.vector_writer: CompletedTrajectory._fields",  # of a named tuple
    "deepspeed_gear.writer.vector_writer: CompletedTrajectory._make",
}


def test_private_names_are_used_in_their_module_only(trees: dict[str, ast.Module]) -> None:
    assert set(private_names_of_others(trees)) - PRIVATE_OF_OTHERS == set()


@pytest.mark.parametrize(
    "source",
    [
        "from deepspeed_gear.owner import _helper",
        "from .owner import _helper",
        "from deepspeed_gear import owner\nowner._helper()",
        "def f(thing):\n    return thing._state",
        "def f(thing):\n    thing.part._state = 1",
    ],
)
def test_a_private_name_of_another_module_is_found(source: str) -> None:
    owner = "def _helper(): ...\nclass Thing:\n    def __init__(self):\n        self._state = 0"
    trees = {"deepspeed_gear.owner": ast.parse(owner), "deepspeed_gear.user": ast.parse(source)}
    assert len(private_names_of_others(trees)) == 1


def paired_assignments(tree: ast.Module) -> Iterator[str]:
    """Yield assignments of several values to several names that are no swap."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if not isinstance(node.targets[0], ast.Tuple):
            continue
        assigned = {ast.unparse(target) for target in node.targets[0].elts}
        if not assigned & {ast.unparse(value) for value in node.value.elts}:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_a_statement_assigns_one_value(trees: dict[str, ast.Module]) -> None:
    """`a, b = b, a` and the unpacking of one value stay; `a, b = x, y` is two statements."""
    assert {
        module: found for module, tree in trees.items() if (found := [*paired_assignments(tree)])
    } == {}
    swap, unpacking, pair, updates = (
        [*paired_assignments(ast.parse(source))]
        for source in ("a, b = b, a + b", "a, b = f()", "a, b = x, y", "a, b = a + x, b + y")
    )
    assert (len(swap), len(unpacking), len(pair), len(updates)) == (0, 0, 1, 1)


# ---- errors --------------------------------------------------------------------------------------

ERRORS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.GearError)
}


def without_remedy(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each GearError that is made without a remedy (its fourth argument)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        kind, _, called = ast.unparse(node.func).rpartition(".")
        is_block = called == "on" and kind in ERRORS  # with DataError.on(name, rule, OSError):
        if called not in ERRORS and not is_block:
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        remedy = given.get("remedy")
        if len(node.args) > 3 and not is_block:
            remedy = node.args[3]
        is_empty = isinstance(remedy, ast.Constant) and not remedy.value
        if (remedy is None or is_empty) and not any(isinstance(a, ast.Starred) for a in node.args):
            yield node.lineno


def test_errors_have_a_remedy(trees: dict[str, ast.Module]) -> None:
    """The ops of ops/reference have none: they are the tests' oracle, which no program calls."""
    found = [
        f"{name}:{line}"
        for name, tree in trees.items()
        for line in without_remedy(tree)
        if name != f"{PACKAGE}.errors" and not name.startswith(f"{PACKAGE}.ops.reference")
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'DataError("x", "must be y")',
        'DataError("x", "must be y", 3)',
        'DataError("x", "must be y", 3, "")',
        'errors.ShapeError("x", "must be y", value=3)',
        'DataError.on("x", "must be y", OSError)',
    ],
)
def test_an_error_without_a_remedy_is_found(source: str) -> None:
    assert [*without_remedy(ast.parse(source))] == [1]
    assert [*without_remedy(ast.parse('DataError("x", "must be y", 3, "use z")'))] == []

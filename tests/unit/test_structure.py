"""Rules that keep the package readable: whole classes, short signatures."""

import ast
from collections.abc import Iterator

PACKAGE = "deepspeed_gear"
MOST_PARAMETERS = 8
RECORD_BASES = {"NamedTuple", "Protocol", "BaseModel", "GearModel", "TypedDict", "Sampler"}


def test_no_function_takes_more_than_eight_parameters(trees: dict[str, ast.Module]) -> None:
    """Constructors of records have none."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not name.startswith(f"{PACKAGE}.ops.reference"):
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


def test_classes_define_what_they_use(trees: dict[str, ast.Module]) -> None:
    """No class reads attributes of self which neither it nor its bases define."""
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found = []
    for name, tree in trees.items():
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
    assert found == []


def assigned_from_outside(tree: ast.Module) -> Iterator[str]:
    """Return the assignments to attributes of objects of other modules: one may fill its own records."""
    own = {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in defined(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in own:
            holder = node.value
            if not isinstance(holder, ast.Name) or holder.id not in ("self", "cls"):
                yield ast.unparse(node)


# Attributes of other projects' objects: their interface is that they are set.
OF_OTHERS = set(
    "parser.description env_report.accelerator_name engine.gear engine.gear_sample engine.gear_iterator "
    "engine.gear_update_priorities engine.gear_batches engine.train_batch engine.eval_batch LOG.propagate "
    "engine.gear_step engine.gear_rollout engine.step context.ranks self._engine.global_samples "
    "deepspeed.initialize sys.excepthook accelerator.get_op_builder accelerator.create_op_builder "
    "extension.CUDA_HOME stream.thread_type stream.codec_context.options "
    "wrapped._gear_wrapped self._broken.__cause__ sys.unraisablehook".split()
) | {"weakref.finalize(memory, native.map_guard_remove, entry).atexit"}


def test_objects_are_whole_after_construction(trees: dict[str, ast.Module]) -> None:
    targets = ((name, target) for name, tree in trees.items() for target in assigned_from_outside(tree))
    assert [f"{name}: {target}" for name, target in targets if target not in OF_OTHERS] == []

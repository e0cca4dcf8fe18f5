"""Rename classes and functions of modules, wherever they are imported: `python tools/rename_symbols.py FILE`.

FILE has a line for each: module (under deepspeed_gear, dotted), old name, new name. Names are followed by the
syntax tree, so two modules may use one name for two things. In comments and docstrings a name in backticks is
renamed in the files that use it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "deepspeed_gear"


def _files() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "-z", "*.py", "*.pyi"], cwd=ROOT, text=True)
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _module(file: Path) -> str | None:
    if not file.is_relative_to(ROOT / PACKAGE):
        return None
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _origin(node: ast.ImportFrom, module: str | None, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = (module or "").split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *filter(None, [node.module])])


def rename(file: Path, renames: dict[str, dict[str, str]], homes: dict[str, str]) -> None:
    """Rename in one file.

    Args:
        file: A Python file of the checkout.
        renames: Module -> old name -> new name.
        homes: `package.name` of a name that a package exports -> module that defines it.
    """
    source, module = file.read_text(encoding="utf-8"), _module(file)
    tree = ast.parse(source)
    local: dict[str, str] = dict(renames.get(module or "", {}))
    modules: dict[str, dict[str, str]] = {}
    edits: set[tuple[int, int, int, str]] = set()
    lines = source.splitlines(keepends=True)

    def replace(line: int, column: int, old: str, new: str) -> None:
        assert lines[line - 1].encode()[column:].decode().startswith(old), (file, line, old)
        edits.add((line, column, len(old.encode()), new))

    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        origin = _origin(node, module, file.name == "__init__.py")
        for alias in node.names:
            new = renames.get(homes.get(f"{origin}.{alias.name}", origin), {}).get(alias.name)
            if new:
                replace(alias.lineno, alias.col_offset, alias.name, new)
                if not alias.asname:
                    local[alias.name] = new
            elif f"{origin}.{alias.name}" in renames:
                modules[alias.asname or alias.name] = renames[f"{origin}.{alias.name}"]
    if not local and not modules:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in local:
            replace(node.lineno, node.col_offset, node.id, local[node.id])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in local and node in tree.body:
            word = "class " if isinstance(node, ast.ClassDef) else "def "
            column = lines[node.lineno - 1].encode().index(word.encode(), node.col_offset) + len(word)
            replace(node.lineno, column, node.name, local[node.name])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            new = modules.get(node.value.id, {}).get(node.attr)
            if new and node.end_lineno is not None and node.end_col_offset is not None:
                replace(node.end_lineno, node.end_col_offset - len(node.attr.encode()), node.attr, new)
    for line, column, length, new in sorted(edits, reverse=True):
        text = lines[line - 1].encode()
        lines[line - 1] = (text[:column] + new.encode() + text[column + length :]).decode()
    result = "".join(lines)
    for old, new in local.items():
        result = re.sub(rf"(?<=`){old}(?=[`.(])", new, result)
        result = re.sub(rf"(?<=[\"\[ ]){old}(?=\"\))", new, result)  # cast("Name", ...) and the like
    file.write_text(result, encoding="utf-8")


def main(path: str) -> None:
    """Rename in the whole checkout."""
    renames: dict[str, dict[str, str]] = defaultdict(dict)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            module, old, new = line.split()
            renames[f"{PACKAGE}.{module}"][old] = new
    homes = {}
    for file in _files():
        if file.name == "__init__.py" and _module(file):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    origin = _origin(node, _module(file), True)
                    homes.update({f"{_module(file)}.{alias.name}": origin for alias in node.names})
    for file in _files():
        rename(file, renames, homes)


if __name__ == "__main__":
    main(sys.argv[1])

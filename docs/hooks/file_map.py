"""The map of the source files, generated from the first sentence of each file.

python docs/hooks/file_map.py docs/reference
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = _ROOT / "deepspeed_gear"
_NATIVE = _ROOT / "ops" / "csrc"
_HEAD = """# Files

<!-- Generated: python docs/hooks/file_map.py docs/reference -->

The source files by package, each with the first sentence of its docstring or comment: search this
page for the noun of a behaviour to find the file that decides it. Words are those of the
[glossary](../glossary.md); [architecture](../design/0001-architecture.md) has the order of the
packages and the walks through them.
"""


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or comment, on one line.

    Args:
        text: Paragraphs; the first one may have several sentences or none that ends with a stop.
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    # A stop followed by a capital ends a sentence; those in `ops/csrc/store.h` and "e.g. x" do not.
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]


def python_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring; empty if it has none."""
    return first_sentence(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")


def native_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the head of a C++ or CUDA file."""
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return first_sentence("\n".join(lines))


def _rows(files: list[Path], folder: Path) -> Iterator[str]:
    """Yield a table row for each file of one folder."""
    for file in files:
        sentence = python_sentence(file) if file.suffix == ".py" else native_sentence(file)
        yield f"| `{file.relative_to(folder)}` | {sentence.replace('|', chr(92) + '|')} |"


def _sections() -> Iterator[str]:
    """Yield the lines of all packages: Python first, then C++ and CUDA."""
    for root, suffixes in ((_PYTHON, {".py"}), (_NATIVE, {".h", ".cpp", ".cu"})):
        files = sorted(file for file in root.rglob("*") if file.suffix in suffixes)
        for folder in sorted({file.parent for file in files}):
            inside = [file for file in files if file.parent == folder]
            yield f"## `{folder.relative_to(_ROOT)}/`"
            yield ""
            package = folder / "__init__.py"
            if package in inside and folder != _PYTHON:
                yield python_sentence(package)
                yield ""
                # The package's own file is a row only where it has code of its own.
                if len(ast.parse(package.read_text(encoding="utf-8")).body) == 1:
                    inside.remove(package)
            if inside:
                yield "| file | contents |"
                yield "|---|---|"
                yield from _rows(inside, folder)
                yield ""


def render() -> dict[str, str]:
    """Return the map as Markdown, by the name of its file."""
    return {"files.md": "\n".join([_HEAD, *_sections()])}


if __name__ == "__main__":
    for name, page in render().items():
        (Path(sys.argv[1]) / name).write_text(page, encoding="utf-8")

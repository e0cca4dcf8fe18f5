"""Run the notebooks of docs/notebooks, and make pages of them.

python docs/hooks/notebooks.py docs/notebooks/*.ipynb    # run them, and store what they show

A notebook runs in IPython, which shows what Jupyter shows, in an empty folder. The site has the
stored outputs, so that building it runs nothing (`site_pages.py`). A test runs each notebook and
compares the outline of its outputs. Cells may have shorter forms for the test in their metadata:

    "gear": {"quick": {"STEPS = 3000": "STEPS = 100"}}
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]
# Forms of an output, the richest first.
_FORMS = ("text/html", "image/png", "text/plain")
_NUMBER = re.compile(r"\[[\d, ]*\]|(?<!\w)[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")


def read(file: Path) -> Notebook:
    """Return a notebook."""
    notebook: Notebook = json.loads(file.read_text(encoding="utf-8"))
    return notebook


def source_of(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


@functools.cache
def _shell() -> Any:
    """Return the IPython of this process, which shows pictures inline."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.interactiveshell import InteractiveShell

    class Results(DisplayHook):
        """Shows the last expression of a cell in all its forms, as Jupyter does."""

        def write_output_prompt(self) -> None:
            """Print no "Out[1]:"."""

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            self.shell.display_pub.publish(format_dict)

        def finish_displayhook(self) -> None:
            self._is_active = False

    class Shell(InteractiveShell):
        def enable_gui(self, gui: str | None = None) -> None:
            """Start no event loop of windows: pictures are inline."""

    shell = Shell.instance(displayhook_class=Results)
    shell.enable_matplotlib("inline")
    return shell


def run(notebook: Notebook, quick: bool = False) -> None:
    """Run the cells in this process and folder, and replace their outputs.

    Args:
        quick: Whether to run the short forms of cells.
    Raises:
        RuntimeError: A cell raised an error, or printed to standard error.
    """
    from IPython.utils.capture import capture_output

    shell = _shell()
    shell.reset()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        with capture_output() as captured:
            result = shell.run_cell(_to_run(cell, number, quick), store_history=True)
        result.raise_error()
        if captured.stderr:
            raise RuntimeError(f"cell {number} printed to standard error: {captured.stderr}")
        cell["execution_count"] = number
        cell["outputs"] = [*_printed(captured.stdout)]
        cell["outputs"] += [_shown(output.data) for output in captured.outputs]


def _to_run(cell: dict[str, Any], number: int, quick: bool) -> str:
    """Return the text of a cell, or its short form."""
    text = source_of(cell)
    for old, new in cell["metadata"].get("gear", {}).get("quick", {}).items():
        if old not in text:
            raise RuntimeError(f"cell {number} must have {old!r}, which its metadata replaces")
        text = text.replace(old, new) if quick else text
    return text


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _printed(text: str) -> Iterator[dict[str, Any]]:
    if text:
        yield {"output_type": "stream", "name": "stdout", "text": _lines(text)}


def _compact(picture: bytes) -> bytes:
    """Return a PNG with a palette of 128 colours, which takes a third of the bytes."""
    from PIL import Image

    content = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return content.getvalue()


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    """Return an object's output in its richest form, and as text."""
    kept: dict[str, Any] = {}
    for form in _FORMS:
        if form not in data or (kept and form != "text/plain"):
            continue
        value = data[form]
        if form == "image/png":
            picture = value if isinstance(value, bytes) else base64.b64decode(value)
            value = base64.b64encode(_compact(picture)).decode()
        kept[form] = value if form == "image/png" else _lines(value)
    return {"output_type": "display_data", "data": kept, "metadata": {}}


def outline(notebook: Notebook) -> list[str]:
    """Return the outputs without what differs between machines and runs.

    Numbers become "#", but not those of shapes; of drawings only the titles stay, and of PNG
    pictures only that there is one.
    """
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            form = next(one for one in _FORMS if one in data)
            text = "a picture" if form == "image/png" else "".join(data[form])
            text = re.sub(r"<svg.*?<title>(.*?)</title>.*?</svg>", r"\1", text, flags=re.DOTALL)
            text = re.sub(r"<[^>]*>", " ", text)
            text = _NUMBER.sub(lambda one: one[0] if one[0].startswith("[") else "#", text)
            found.append(" ".join(text.split()))
    return found


def page(notebook: Notebook, name: str, write: Callable[[str, bytes], object]) -> str:
    """Return a notebook as Markdown.

    Args:
        name: Name of the page, with which the names of its pictures begin.
        write: Writes a picture beside the page, by its name.
    """
    parts = []
    num_pictures = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell))
            continue
        parts.append(f"```python\n{source_of(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "text/html" in data:
                # A blank line would end the block of HTML.
                html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]).strip())
                parts.append(f'<div class="gear-output">\n{html}\n</div>')
            elif "image/png" in data:
                num_pictures += 1
                picture = f"{name}-{num_pictures}.png"
                write(picture, base64.b64decode(data["image/png"]))
                parts.append(f"![Picture {num_pictures} of the notebook]({picture})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main(files: list[str], quick: bool = False) -> int:
    """Run notebooks in empty folders; with `quick`, print their outlines and store nothing."""
    outlines = {}
    for file in map(Path, files):
        file = file.resolve()
        notebook = read(file)
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                run(notebook, quick)
            finally:
                os.chdir(before)
        outlines[file.name] = outline(notebook)
        if not quick:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
            print(f"{file}: {len(text) / 1000:.0f} kB")
    if quick:
        print(json.dumps(outlines))
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main([one for one in arguments if one != "--quick"], "--quick" in arguments))

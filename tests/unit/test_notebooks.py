"""The notebooks of the docs run, show what is stored in them, and become pages."""

import importlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import ROOT

FILES = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 150_000


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    return importlib.import_module("notebooks")


@pytest.mark.timeout(900)
def test_notebooks_show_what_is_stored(
    notebooks: Any, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """In short forms of their long cells; numbers and drawings are not compared."""
    pytest.importorskip("IPython")
    assert len(FILES) == 3
    program = str(ROOT / "docs" / "hooks" / "notebooks.py")
    ran = run_python(program, "--quick", *map(str, FILES), timeout_s=800)
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout.splitlines()[-1])
    for file in FILES:
        assert notebooks.outline(notebooks.read(file)) == shown[file.name], file.name


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_notebook_is_a_page_with_its_outputs(file: Path, notebooks: Any) -> None:
    notebook = notebooks.read(file)
    assert file.stat().st_size < MOST_BYTES
    assert "/tmp" not in file.read_text(encoding="utf-8")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    pictures: dict[str, bytes] = {}
    text = notebooks.page(notebook, file.stem, pictures.__setitem__)
    assert text.startswith("# ")
    assert text.count("```python\n") == len(code)
    assert len(pictures) >= 2
    for name, picture in pictures.items():
        assert picture.startswith(b"\x89PNG")
        assert f"]({name})" in text
    assert '<div class="gear-output">' in text  # a view of this package
    for view in re.findall(r'<div class="gear-output">\n(.*?)\n</div>\n', text, re.DOTALL):
        assert "\n\n" not in view  # Markdown would go on in it
    assert f"notebooks/{file.stem}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_an_outline_keeps_shapes_and_words(notebooks: Any) -> None:
    def cell(text: str, form: str = "text/html") -> dict[str, Any]:
        return {"outputs": [{"data": {form: [text]}}]}

    def outline(*cells: dict[str, Any]) -> list[str]:
        found: list[str] = notebooks.outline({"cells": [*cells]})
        return found

    one = outline(cell("<b>x</b> float32 [64, 3] 0.25 to 1,000, 12.5%"), cell("", "image/png"))
    assert one == ["x float32 [64, 3] # to #, #", "a picture"]
    assert outline(cell("y [64, 3]")) != outline(cell("y [64, 4]"))
    svg = "<svg a='1'><title>lengths</title><path d='M0 1'/></svg>"
    assert outline(cell(svg)) == ["lengths"]


def test_a_cell_that_fails_or_warns_is_an_error(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    pytest.importorskip("IPython")
    program = str(ROOT / "docs" / "hooks" / "notebooks.py")
    for source, error in (
        ("raise KeyError('odd')", "KeyError: 'odd'"),
        ("import warnings; warnings.warn('odd')", "cell 1 printed to standard error"),
    ):
        cell = {"cell_type": "code", "metadata": {}, "source": [source], "outputs": []}
        file = tmp_path / "odd.ipynb"
        file.write_text(json.dumps({"cells": [cell]}))
        ran = run_python(program, str(file))
        assert ran.returncode != 0
        assert error in ran.stderr
        assert json.loads(file.read_text())["cells"] == [cell]

"""Pictures of the docs are what their programs draw."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gear_support import ROOT

FIGURES = ROOT / "docs" / "figures"


@pytest.fixture(autouse=True)
def _beside_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIGURES))


@pytest.mark.parametrize(
    "program", [path for path in FIGURES.glob("*.py") if path.with_suffix(".svg").exists()]
)
def test_a_picture_is_what_its_program_draws(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(program), run_name="__main__")
    drawn = capsys.readouterr().out
    assert program.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    picture = ElementTree.fromstring(drawn)
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = [path.name for path in FIGURES.iterdir() if path.suffix in (".svg", ".png")]
    assert [name for name in pictures if f"figures/{name})" not in text] == []

"""The lines that load public data sets, over their miniatures: benchmarks/public_data."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gear_support import ROOT

pytest.importorskip("pyarrow", reason="pyarrow reads the independent copies of tables")
RESULT = ROOT / "benchmarks" / "results" / "datasets.json"
ROWS = {row["set"]: row for row in json.loads(RESULT.read_text())["rows"]}
LARGEST = 100_000  # bytes of a miniature's file
LARGEST_SUM = 1_500_000


@pytest.fixture
def run(load: Any) -> ModuleType:
    """The module that runs the lines; `byte_tokens` of the miniatures leaves sys.path after it."""
    return load("public_data.run")


@pytest.mark.parametrize("name", ROWS)
def test_a_line_gives_the_recorded_numbers(run: ModuleType, tmp_path: Path, name: str) -> None:
    """`run` compares every value with the independent read."""
    (one,) = [one for one in run.SETS if one.name == name]
    for module in one.needs:
        pytest.importorskip(module)
    assert run.run(one, tmp_path / "out") == ROWS[name]


def test_another_value_is_found(run: ModuleType, tmp_path: Path) -> None:
    (one,) = [one for one in run.SETS if one.name == "ExORL"]
    dataset = run.ingested(one, tmp_path / "out")
    expected = one.read([run.MINIATURES / source for source in one.sources])
    expected[1]["action"] = np.roll(expected[1]["action"], 1, axis=0)  # as without --last-step
    with pytest.raises(AssertionError, match="ExORL: action of trajectory 1"):
        run.compare(one, dataset, expected)
    with pytest.raises(AssertionError, match="ExORL: 2 of 1"):
        run.compare(one, dataset, expected[:1])


def test_every_set_has_a_row_and_every_miniature_a_set(run: ModuleType) -> None:
    assert [one.name for one in run.SETS] == list(ROWS)
    used = [(run.MINIATURES / source).resolve() for one in run.SETS for source in one.sources]
    files = [path for path in run.MINIATURES.rglob("*") if path.is_file() and path.suffix != ".py"]
    files = [path for path in files if path.suffix != ".pyc"]
    for path in files:
        assert path.stat().st_size < LARGEST, path
        assert any(path == source or source in path.parents for source in used), path
    assert sum(path.stat().st_size for path in files) < LARGEST_SUM


def test_the_page_has_the_tables_of_the_results(run: ModuleType, checkout: Path) -> None:
    """`bash benchmarks/datasets.sh --page` writes them anew."""
    page: Any = importlib.import_module("public_data.page")
    text = (checkout / page.PAGE).read_text(encoding="utf-8")
    for name, table in page.tables(list(ROWS.values())).items():
        assert page.BEGIN.format(name) + table + page.END in text

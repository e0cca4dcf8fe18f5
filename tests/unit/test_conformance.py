"""The conformance cases: they run against this project as a user's code, and can fail."""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SHOWN = [
    "proportional",
    "nan is refused",
    "n step at a truncation",
    "only windows that fit",
    "hindsight stays in the episode",
    "advantages by group",
    "the step that resets is left out",
    "many environments in a full buffer",
]


@pytest.fixture
def cases(load: Callable[[str], ModuleType]) -> ModuleType:
    load("conformance.run")
    return load("conformance.check")


@pytest.mark.usefixtures("cases")
def test_this_project_is_right() -> None:
    child = importlib.import_module("peers.orders").Child("conformance.run", "gear", sys.executable)
    try:
        found = {case: child.order("case", case=case) for case in SHOWN}
    finally:
        child.end()
    assert {case: one.get("kind") for case, one in found.items()} == dict.fromkeys(
        SHOWN, "right"
    ), found


def test_every_case_has_a_report_and_a_right_answer(cases: ModuleType) -> None:
    assert len(cases.CASES) >= 60
    for one in cases.CASES.values():
        assert one.report
        assert one.right


@pytest.mark.usefixtures("cases")
def test_the_page_has_the_tables_of_the_results(checkout: Path) -> None:
    """`PYTHONPATH=benchmarks python benchmarks/conformance/table.py --page` writes them anew."""
    table = importlib.import_module("conformance.table")
    rows = json.loads(table.RESULT.read_text())["rows"]
    page = (checkout / table.PAGE).read_text()
    assert table.COUNTS + table.counts(rows) + table.COUNTS_END in page
    assert table.BEGIN + table.tables(rows) + table.END in page


@pytest.mark.usefixtures("cases")
def test_counts_are_of_the_kinds_that_occur() -> None:
    table = importlib.import_module("conformance.table")
    rows = [
        {"system": "A", "case": "one", "kind": "right"},
        {"system": "A", "case": "two", "kind": "late"},
        {"system": "B", "case": "one", "kind": "not offered"},
    ]
    assert table.counts(rows).splitlines()[::2] == [
        f"| system | cases it supports | right | {table.LATE} |",
        "| A | 2 | 1 | 1 |",
    ]
    assert "| B | 0 | 0 | 0 |" in table.counts(rows)


@pytest.mark.usefixtures("cases")
def test_reports_are_links() -> None:
    linked = importlib.import_module("conformance.table").linked
    assert linked("a/b-c#12, d/e.f#3") == (
        "[a/b-c#12](https://github.com/a/b-c/issues/12), [d/e.f#3](https://github.com/d/e.f/issues/3)"
    )
    assert linked("Schaul et al. 2016") == "Schaul et al. 2016"


def test_counts_of_other_draws_fail(cases: ModuleType) -> None:
    cases.fits(np.array([260, 510, 230]), np.array([1, 2, 1]), "draws")
    with pytest.raises(AssertionError, match="draws: drew"):
        cases.fits(np.array([400, 400, 200]), np.array([1, 2, 1]), "draws")
    with pytest.raises(AssertionError, match="probability 0"):
        cases.fits(np.array([5, 1]), np.array([1, 0]), "draws")


def test_a_refusal_needs_a_text(cases: ModuleType) -> None:
    cases.refuses("an item", lambda: json.loads("{"))
    with pytest.raises(AssertionError, match="an item: accepted"):
        cases.refuses("an item", lambda: None)

    def silent() -> None:
        raise ValueError

    with pytest.raises(AssertionError, match="without a text"):
        cases.refuses("an item", silent)


def test_a_case_without_an_answer_is_late(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("conformance.run")

    def slow(_: object) -> None:
        cases.refusal(lambda: time.sleep(20))

    monkeypatch.setitem(cases.CASES, "slow", cases.Case("slow", "a report", "an answer", slow))
    monkeypatch.setattr(run, "CASE_S", 1)
    assert run.verdict(None, "slow") == ("late", run.LATE)


def test_sequences_that_are_not_apart_in_a_pack_fail(cases: ModuleType) -> None:
    language = importlib.import_module("conformance.language")
    made = importlib.import_module("peers.interface").Pack
    number = np.repeat([1, 6], [3, 5])
    position = np.r_[0:3, 0:5]
    bounds = np.array([0, 3, 8])
    assert language.check_packs([made(number, position, bounds)]) == [1, 6]
    with pytest.raises(AssertionError, match="attend to each other"):
        language.check_packs([made(number, position, np.array([0, 8]))])
    with pytest.raises(AssertionError, match="positions"):
        language.check_packs([made(number, np.arange(8), bounds)])


def test_adapters_stay_small(checkout: Path) -> None:
    for path in (checkout / "benchmarks" / "peers").glob("*.py"):
        if path.name != "interface.py":
            assert len(path.read_text().splitlines()) <= 360, path

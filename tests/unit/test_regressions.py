"""benchmarks/regressions.sh: what it calls slower, and what it refuses. No test takes a time."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

EVEN = [(10.0, 10.1), (10.0, 9.9), (10.0, 10.0)]
SLOW = [(10.0, 10.9), (10.0, 11.0), (10.0, 11.1)]


@pytest.fixture
def regressions(load: Any) -> ModuleType:
    return load("speed.regressions")


@pytest.mark.parametrize(
    ("rounds", "ratio", "slower"),
    [
        ([EVEN, EVEN, EVEN], 1.0, False),
        ([SLOW, SLOW, SLOW], 1.1, True),
        ([SLOW, SLOW, [(10.0, 9.9)]], 1.1, False),  # not in every round: noise
        ([[(10.0, 10.4)], [(10.0, 10.4)]], 1.04, False),  # in every round, within the limit
        ([[(10.0, 8.0)], [(20.0, 16.0)]], 0.8, False),
    ],
)
def test_a_row_is_slower_beyond_the_limit_in_every_round(
    regressions: ModuleType, rounds: list[Any], ratio: float, slower: bool
) -> None:
    row = regressions.ratio(rounds)
    assert row["ratio"] == pytest.approx(ratio)
    assert row["slower"] is slower
    assert row["range"][0] <= row["ratio"] <= row["range"][1]


def test_the_median_is_that_of_neighbouring_turns(regressions: ModuleType) -> None:
    """The machine was twice as slow in the second half: both sides were."""
    row = regressions.ratio([[(10.0, 10.0), (20.0, 20.0), (21.0, 21.0)]])
    assert (row["other_us"], row["us"], row["ratio"]) == (20.0, 20.0, 1.0)


def test_a_row_above_the_limit_is_measured_again(
    regressions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measure(only: str) -> Iterator[tuple[str, Any]]:
        asked.append(only)
        rows = {
            "add": SLOW,
            "sample": SLOW if len(asked) < 3 else EVEN,  # a disturbance of the first rounds
            "pack": EVEN,
        }
        yield from (row for row in rows.items() if only in ("", row[0]))

    figures = regressions.compared(measure, 2)
    assert asked == ["", "", "add", "add", "sample", "sample"]
    rows = [regressions.verdict(name, found) for name, found in figures.items()]
    assert {row["row"]: row["slower"] for row in rows} == {
        "add": True,
        "sample": False,
        "pack": False,
    }
    regressions.table(rows, "0123456789abcdef")
    printed = capsys.readouterr().out
    assert "| add | 10.0 | 11.0 | 1.1 | 1.10 to 1.10 | SLOWER |" in printed
    assert "01234567, us" in printed


def test_what_only_the_other_commit_can_do_is_a_regression(regressions: ModuleType) -> None:
    def measure(only: str) -> Iterator[tuple[str, Any]]:
        yield "lost", {"this checkout": "AttributeError: no add"}
        yield "new", {"the other commit": "not offered"}
        yield "neither", {"the other commit": "not offered", "this checkout": "not offered"}

    figures = regressions.compared(measure, 1)
    rows = {name: regressions.verdict(name, found) for name, found in figures.items()}
    assert {name: row["slower"] for name, row in rows.items()} == {
        "lost": True,
        "new": False,
        "neither": False,
    }


def test_an_unknown_commit_is_refused(
    regressions: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["regressions.sh", "no-such-commit"])
    with pytest.raises(SystemExit) as ended:
        regressions.main()
    assert ended.value.code == 2
    assert "must be a commit, branch or tag" in capsys.readouterr().err


def test_the_rows_are_those_of_jobs_that_this_project_offers(regressions: ModuleType) -> None:
    child = importlib.import_module("speed.child")
    gear = importlib.import_module("peers.interface").load("gear")
    for work in regressions.plan():
        assert gear.offers(child.KINDS[work.do].offered), work.name
    names = [title for work in regressions.plan() for title, _ in work.forms()]
    assert len(set(names)) == len(names)

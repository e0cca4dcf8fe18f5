"""Every measured number of README.md and docs has a source: a file of results, or a reason.

`docs_numbers.txt` is the register; what its lines mean stands at its head.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from gear_support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
REGISTER = ROOT / "tests" / "unit" / "docs_numbers.txt"

NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
UNITS = (
    "us ms s ns second seconds minute minutes min hours days MB/s GB/s TB/s GB MB KB kB TB KiB MiB "
    "GiB bytes byte % x times percent tokens/s Gbit/s gbit MHz GHz variants cases cycles cores"
).split()
RATE = r"(?:[A-Za-z]+ ){0,3}an? (?:CPU )?(?:second|minute|hour)"
#: A number with a unit, or several that share one: "45 to 48 GB/s", "4.0, 4.8 and 14.4 us".
MEASURED = re.compile(
    rf"(?<![\w.^#/`-])(?:{NUMBER})(?:(?:,? to |,? and | or |, |/)(?:{NUMBER}))*[ ]?"
    rf"(?:{'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))}|{RATE})(?![\w/^])"
)


# ---- pages ---------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Return a page without its code, comments and generated tables, on one line."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```", "", text)
    text = re.sub(r"(?s)<!-- the tables? .*?<!-- end of the tables? -->", "", text)
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    text = re.sub(r"`[^`\n]*`", "`", text)  # a name or an option: its numbers are not measured
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", text.replace("*", ""))


@cache
def pages() -> dict[str, str]:
    """Return the prose of each page by its name."""
    texts = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if "<!-- Generated:" not in text:
            lines = text.split("\n")
            inside = {number for _, number, _ in tables_of_results(text)}
            texts[str(path.relative_to(ROOT))] = prose(
                "\n".join(line for i, line in enumerate(lines) if i not in inside)
            )
    return texts


# ---- values of the files of results --------------------------------------------------------------


@cache
def results(name: str) -> Any:
    """Return the rows of a file of results; a tutorial's record is a list of rows itself."""
    path = RESULTS / f"{name}.json"
    path = path if path.exists() else ROOT / "docs" / "figures" / f"{name}.json"
    content = json.loads(path.read_text())
    return content.get("rows", content.get("runs")) if isinstance(content, dict) else content


def numbers_in(content: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value, those in texts as well."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from numbers_in(one)
    elif isinstance(content, str):
        yield from (float(number) for number in re.findall(r"\d+(?:\.\d+)?", content))
    elif isinstance(content, (int, float)) and not isinstance(content, bool):
        yield float(content)


def shows(text: str, value: float) -> bool:
    """Return whether a number on a page is this value, rounded and in any of its units.

    "2.84" is 2.8395, "0.143" ms may be 142.9 us, "63%" is 0.63 and "5,700" is 5683.
    """
    digits = text.rstrip("%").replace(",", "")
    decimals = len(digits.partition(".")[2])
    zeros = len(digits) - len(digits.rstrip("0")) if not decimals else 0
    width = 10.0 ** (-decimals if decimals else min(zeros, 3))
    factors = (100.0,) if text.endswith("%") else (1.0, 100.0, 1e3, 1e-3, 1e6, 1e-6)
    return any(abs(value * f - float(digits)) <= width / 2 * (1 + 1e-6) for f in factors)


# ---- the register --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line of the register.

    Attributes:
        phrase: Text of a page that contains the numbers, without the braces around them.
        measured: The numbers that `keys` are the values of: those in braces, else all.
        keys: A value of the results for each of `measured`, or one for all; empty for a reason.
        source: The file of results, or the reason.
    """

    phrase: str
    measured: tuple[str, ...]
    keys: tuple[str, ...]
    source: str


def entries(text: str) -> list[Entry]:
    """Read the register."""
    found = []
    source = ""
    for line in text.split("\n"):
        if line.startswith("["):
            source = line.strip("[]")
        elif line.strip() and not line.startswith("#"):
            phrase, _, keys = line.partition(" <- ")
            braces = re.findall(rf"\{{({NUMBER}%?)[^}}]*\}}", phrase)
            plain = re.sub(r"[{}]", "", phrase).strip()
            measured = tuple(braces) or tuple(
                number for one in MEASURED.findall(plain) for number in re.findall(NUMBER, one)
            )
            found.append(
                Entry(plain, measured, tuple(filter(None, keys.strip().split(" ; "))), source)
            )
    return found


def values(name: str, key: str) -> list[float]:
    """Return the values of a key: a column and the rows that it is taken from.

    ms what=op B=512          column `ms` of the rows with these values
    us case~"16 trans"        of the rows whose case begins so
    us what=a / us what=b     the quotient of two; "-" is their difference
    # what=op                 the number of these rows
    """
    for sign in (" / ", " - "):
        if sign in key:
            firsts, seconds = (values(name, part) for part in key.split(sign))
            return [a / b if sign == " / " else a - b for a in firsts for b in seconds]
    column, *conditions = shlex.split(key)
    rows = results(name)
    for condition in conditions:
        option, sign, wanted = re.split(r"([=~])", condition, maxsplit=1)
        rows = [
            row
            for row in rows
            if (str(row.get(option)) == wanted if sign == "=" else False)
            or (sign == "~" and str(row.get(option, "")).startswith(wanted))
        ]
    if column == "#":
        return [float(len(rows))]
    return [number for row in rows for number in numbers_in(row.get(column))]


@cache
def register() -> tuple[Entry, ...]:
    return tuple(entries(REGISTER.read_text(encoding="utf-8")))


def unsourced(text: str, phrases: list[str]) -> list[str]:
    """Return the measured numbers of a page that lie in none of the phrases, with their context."""
    covered = [
        (at.start(), at.end()) for phrase in phrases for at in re.finditer(re.escape(phrase), text)
    ]
    return [
        text[max(0, one.start() - 60) : one.end() + 10]
        for one in MEASURED.finditer(text)
        if not any(first <= one.start() and one.end() <= end for first, end in covered)
    ]


# ---- tables of results: each row is in the file that its section names --------------------------

#: Files of which a row of a table joins several rows, and what these have in common.
JOINED = {
    "gather": ("workload", "window", "B"),
    "adding": ("case",),
    "determinism": ("sampler",),
    "select": ("sampler", "B"),
}
NAMED = {"selection": "select"}  # scripts and their files


def tables_of_results(text: str) -> list[tuple[str, int, str]]:
    """Return the rows of the tables of each section with a command with `--json FILE`, which stands
    above or below them: file, line number, text.
    """
    found = []
    name = ""
    rows: list[tuple[int, str]] = []
    for number, line in enumerate([*text.split("\n"), "## "]):
        command = re.match(r"`[^`]* --json \S*?(\w+)\.json`", line)
        if command:
            name = NAMED.get(command[1], command[1])
        elif line.startswith("|"):
            rows.append((number, line))
        elif line.startswith("## "):
            found += [(name, at, row) for at, row in rows if name]
            name = ""
            rows = []
    return found


@cache
def joined_rows(name: str) -> list[tuple[list[float], set[str]]]:
    """Return numbers and short digests of each row of results, or of those that a table joins."""
    rows = results(name)
    groups: dict[Any, list[Any]] = {}
    for number, row in enumerate(rows):
        key = tuple(str(row.get(option)) for option in JOINED.get(name, ())) or number
        groups.setdefault(key, []).append(row)
    return [
        ([*numbers_in(group), len(group)], {str(row.get("digest"))[:8] for row in group})
        for group in groups.values()
    ]


def test_tables_of_results_show_the_files() -> None:
    wrong = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for name, _, line in tables_of_results(path.read_text(encoding="utf-8")):
            cells = line.strip("|").split("|")
            if re.search("[a-z]", cells[0]):
                cells[0] = ""  # the name of a case: its numbers are not measured
            shown = re.findall(rf"(?<![\w.]){NUMBER}(?![\w.])%?", "|".join(cells))
            if shown and not any(
                all(one in digests or any(shows(one, value) for value in row) for one in shown)
                for row, digests in joined_rows(name)
            ):
                wrong.append(f"{path.name}: {name}.json has no row {line}")
    assert wrong == []


# ---- prose ---------------------------------------------------------------------------------------


def test_measured_numbers_have_a_source() -> None:
    """If this fails for a number of yours: add it to docs_numbers.txt, whose head says how."""
    phrases = [entry.phrase for entry in register()]
    missing = {name: unsourced(text, phrases) for name, text in pages().items()}
    assert {name: found for name, found in missing.items() if found} == {}


def test_the_register_has_no_entry_without_a_page() -> None:
    stale = [e.phrase for e in register() if not any(e.phrase in text for text in pages().values())]
    assert stale == []


def test_numbers_are_those_of_the_results() -> None:
    wrong = []
    for entry in register():
        for number, text in enumerate(entry.measured if entry.keys else ()):
            key = entry.keys[number if len(entry.keys) > 1 else 0]
            found = values(entry.source, key)
            if not any(shows(text, value) for value in found):
                wrong.append(f"{entry.phrase}: {text} is not in {found[:5]} ({key})")
    assert wrong == []


def test_entries_of_results_have_keys() -> None:
    sources = {path.stem for path in (*RESULTS.glob("*.json"), *ROOT.glob("docs/figures/*.json"))}
    for entry in register():
        assert bool(entry.keys) == (entry.source in sources), entry.phrase
        assert len(entry.keys) in (0, 1, len(entry.measured)), entry.phrase


@pytest.mark.parametrize(
    ("text", "phrases", "missing"),
    [
        ("a batch takes 3.5 us here", [], 1),
        ("a batch takes 3.5 us here", ["takes 3.5 us"], 0),
        ("a batch takes 3.6 us here", ["takes 3.5 us"], 1),
        ("between 3 and 4 GB/s, or 5%", ["3 and 4 GB/s"], 1),
        ("version 2.13 of `timeout_s: 60 s`", [], 0),
        ("| 5,700 batches a second |", [], 1),
    ],
)
def test_a_number_without_a_source_is_found(text: str, phrases: list[str], missing: int) -> None:
    assert len(unsourced(prose(text), phrases)) == missing


def test_a_number_shows_a_value_of_its_precision_only() -> None:
    for text, value in (("2.84", 2.8395), ("0.143", 142.9), ("63%", 0.631), ("5,700", 5683.0)):
        assert shows(text, value)
        assert not shows(text, value * 1.05)

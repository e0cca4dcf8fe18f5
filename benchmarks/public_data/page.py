"""The tables of docs/how-to/public-data-sets.md, from results/datasets.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from support import ROOT, pages
from support.report import Row

from public_data.catalogue import CUT, MADE, STEPS, TEXTS, WHOLE, PublicSet

PAGE = "docs/how-to/public-data-sets.md"
RESULT = ROOT / "benchmarks" / "results" / "datasets.json"
BEGIN = "<!-- the table of {} of results/datasets.json -->\n"
END = "<!-- end of the table -->\n"
ORIGINS = {CUT: "cut from the real files", WHOLE: "the real file", MADE: "made"}


def _cells(row: Row, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        number = row[name]
        if number is None:
            yield "none"
        elif name == "return":
            yield f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"
        else:
            yield f"{number:,}"


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page by name: data of steps, texts, and where all are from."""
    by_name = {row["set"]: row for row in rows}

    def commands(sets: Sequence[PublicSet], names: Sequence[str]) -> Iterator[list[str]]:
        for one in sets:
            row = by_name[one.name]
            name = f"[{one.name}]({one.url})"
            yield [name, one.layout, f"`{row['line']}`", *_cells(row, names)]

    def origins() -> Iterator[list[str]]:
        for one in STEPS + TEXTS:
            row = by_name[one.name]
            columns = f"{row['compared_columns']}"
            yield [one.name, ORIGINS[row["origin"]], one.made, columns, f"{row['file_bytes']:,}"]

    steps = ["episodes", "steps", "return", "terminated", "truncated"]
    texts = ["episodes", "steps", "loss_mask", "return"]
    heads = {
        "steps": ["data set", "files", "command", "episodes", "steps", "mean return", *steps[3:]],
        "texts": ["data set", "files", "command", "rows", "tokens", "with loss", "mean reward"],
        "origins": ["data set", "miniature", "how", "columns compared", "bytes"],
    }
    bodies = {"steps": commands(STEPS, steps), "texts": commands(TEXTS, texts)}
    bodies["origins"] = origins()
    return {name: "".join(pages.table(heads[name], body)) for name, body in bodies.items()}


def write() -> None:
    """Write the tables into the page."""
    for name, table in tables(json.loads(RESULT.read_text())["rows"]).items():
        pages.replace(PAGE, BEGIN.format(name), END, table)

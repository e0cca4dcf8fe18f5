"""Markdown with tables, as a terminal of limited width shows it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

GAP = "  "
LEAST = 28  # columns for the names of rows


def fitted(markdown: str, width: int = 100) -> str:
    """Return a text whose lines have at most `width` characters.

    Paragraphs are wrapped. A table's columns are aligned; names of rows and heads are wrapped, and
    a table that is still too wide is shown as several, each with the names of the rows.
    """
    blocks: list[str] = []
    for block in re.split(r"\n{2,}", markdown.strip()):
        if block.startswith("|"):
            rows = [_cells(line) for line in block.split("\n")]
            blocks += _tables([rows[0], *rows[2:]], width)
        else:
            blocks.append("\n".join(_wrapped(line, width) for line in block.split("\n")))
    return "\n\n".join(blocks) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def _wrapped(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="  " * line.startswith("- "))


def _tables(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the parts of a table, each with as many columns as fit beside the names."""
    widths = [
        max(map(len, (*_words(head), *(row[at] for row in rows[1:]))))
        for at, head in enumerate(rows[0])
    ]
    columns: list[int] = []
    used = LEAST
    for at in range(1, len(widths)):
        used += len(GAP) + widths[at]
        if columns and used > width:
            yield _table(rows, columns, widths, width)
            columns = []
            used = LEAST + len(GAP) + widths[at]
        columns.append(at)
    yield _table(rows, columns, widths, width)


def _words(head: str) -> list[str]:
    """Return the words of a head, cut after hyphens and underscores as well."""
    return re.findall(r"[^\s_-]+[_-]?", head) or [""]


def _head(head: str, width: int) -> list[str]:
    """Return the lines of a head."""
    lines = [""]
    for word in _words(head):
        joined = f"{lines[-1]} {word}" if lines[-1][-1:].isalnum() or "," in lines[-1] else ""
        if joined and len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line for line in lines if line] or [""]


def _table(rows: Sequence[Sequence[str]], columns: list[int], widths: list[int], width: int) -> str:
    room = width - sum(len(GAP) + widths[at] for at in columns)
    names = min(max(room, LEAST), widths[0])
    lines: list[str] = []
    for number, row in enumerate(rows):
        if number and all(row[at] == "-" for at in columns):
            continue
        cells = {at: _head(row[at], widths[at]) if number == 0 else [row[at]] for at in columns}
        name = textwrap.wrap(row[0], names) or [""]
        height = max(len(name), *(len(cell) for cell in cells.values()))
        for line in range(height):
            parts = [(name[line] if line < len(name) else "").ljust(names)]
            for at, cell in cells.items():
                # heads stand on the rule below them, numbers beside the first line of the name
                place = line - (height - len(cell)) if number == 0 else line
                text = cell[place] if 0 <= place < len(cell) else ""
                parts.append(text.rjust(widths[at]))
            lines.append(GAP.join(parts).rstrip())
        if number == 0:
            lines.append("-" * (names + sum(len(GAP) + widths[at] for at in columns)))
    return "\n".join(lines)

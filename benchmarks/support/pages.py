"""Tables in Markdown, and pages that have them between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from support import ROOT


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(head) + " |\n"
    yield "|" + "---|" * len(head) + "\n"
    for row in rows:
        yield "| " + " | ".join(row) + " |\n"


def replace(page: str, begin: str, end: str, text: str) -> None:
    """Put a text between two comments of a page of the checkout."""
    path = ROOT / page
    head, rest = path.read_text().split(begin)
    path.write_text(head + begin + text + end + rest.split(end, 1)[1])

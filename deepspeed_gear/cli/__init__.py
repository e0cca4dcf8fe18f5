"""The `gear` command: one module a subcommand, each with `add_arguments` and `run`."""

from __future__ import annotations


def grid_of(heads: list[str], rows: list[list[str]], num_left: int = 1) -> list[str]:
    """Align a table: the first `num_left` columns to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, ["-" * width for width in widths], *rows]:
        cells = (
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines

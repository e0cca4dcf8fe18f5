"""Views of objects in notebooks: small HTML tables and inline SVG histograms.

They need no package beside NumPy, take the notebook's text colour, so that they read well on light
and on dark pages, and escape all text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 40
MOST_TABLE_ROWS = 100
_BAR = "#2f8fd6"  # readable on white and on black
_WIDTH = 240
_HEIGHT = 104
_PLOT_TOP = 22
_PLOT_BOTTOM = 84
_STYLE = "font-family:sans-serif;font-size:13px;line-height:1.45"
_TABLE = "border-collapse:collapse;margin:6px 0;font-size:12px;max-width:100%"
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;background:none;border:0"
_RULE = "border-bottom:1px solid rgba(127,127,127,.35)"


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width.

    Bin i is [edges[i], edges[i + 1]), and the last one includes its end. Integers of a small range
    have a bin each: for the values 2, 2 and 4, edges is [1.5, 2.5, 3.5, 4.5] and counts [2, 0, 1].
    """

    edges: NDArray[np.floating[Any]]  # [bins + 1], increasing
    counts: NDArray[np.int64]  # [bins]
    low: float  # least finite value
    high: float  # greatest finite value
    num_left_out: int  # NaN and infinite values
    is_whole: bool = False  # whether each bin is one integer


def histogram(values: Any, bins: int = BINS) -> Histogram | None:
    """Count values in at most `bins` bins; None if no value is finite.

    Args:
        values: Numbers of any shape and dtype that NumPy has.
        bins: Most bins.
    """
    with np.errstate(invalid="ignore"):  # converting a signalling NaN raises the flag
        numbers = np.asarray(values).astype(np.float64).reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return None
    low = float(finite.min())
    high = float(finite.max())
    num_left_out = len(numbers) - len(finite)
    is_whole = high - low < bins and bool((finite == np.floor(finite)).all())
    if is_whole and abs(low) < 1 << 52 and abs(high) < 1 << 52:
        counts = np.bincount((finite - low).astype(np.int64))
        edges = low - 0.5 + np.arange(len(counts) + 1)
        return Histogram(edges, counts, low, high, num_left_out, is_whole=True)
    half_width = high / 2 - low / 2  # halves, as the difference of float64 numbers may overflow
    center = low / 2 + high / 2
    if half_width <= 8 * bins * np.spacing(max(abs(low), abs(high)) / 2):
        # So narrow that float64 has no numbers for the edges: one bin.
        reach = max(abs(center) / 16, 1e-300)
        most = float(np.finfo(np.float64).max)
        edges = np.array([max(center - reach, -most), min(center + reach, most)])
        return Histogram(edges, np.array([len(finite)]), low, high, num_left_out)
    places = (finite / 2 - low / 2) / half_width * bins
    counts = np.bincount(places.astype(np.int64).clip(0, bins - 1), minlength=bins)
    edges = center + np.linspace(-1, 1, bins + 1) * half_width
    return Histogram(edges, counts, low, high, num_left_out)


def show_number(value: float | int) -> str:
    """Return a number with four significant digits, or with all digits of an integer."""
    if isinstance(value, (int, np.integer)) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def show_range(low: float | int, high: float | int) -> str:
    """Return a range, or the one value that it has."""
    return show_number(low) if low == high else f"{show_number(low)} to {show_number(high)}"


def histogram_svg(title: str, values: Any) -> str:
    """Draw a histogram of values as inline SVG; "" if no value is finite."""
    counted = histogram(values)
    if counted is None:
        return ""
    most = int(counted.counts.max())
    width = _WIDTH / len(counted.counts)
    # Few bars would fill the whole picture: they have the width of a tenth of it at most.
    bar = min(width * 0.9, _WIDTH / 10)
    bars = []
    for number, count in enumerate(counted.counts.tolist()):
        if count:
            height = max(1.0, (_PLOT_BOTTOM - _PLOT_TOP) * count / most)
            x = number * width + (width - bar) / 2
            bars.append(f"M{x:.1f} {_PLOT_BOTTOM}v-{height:.1f}h{bar:.1f}v{height:.1f}z")
    name = escape(title)
    text = 'fill="currentColor" font-size="11" font-family="sans-serif"'
    axis = f"M0 {_PLOT_BOTTOM + 0.5}H{_WIDTH}"
    y = _HEIGHT - 6
    low = show_number(counted.low)
    if counted.high > counted.low:
        high = show_number(counted.high)
        ends = f'<text x="0" y="{y}" {text}>{low}</text>'
        ends += f'<text x="{_WIDTH}" y="{y}" text-anchor="end" {text}>{high}</text>'
    else:
        ends = f'<text x="{_WIDTH / 2:g}" y="{y}" text-anchor="middle" {text}>{low}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{name}" '
        f'style="margin:4px 18px 4px 0;max-width:100%"><title>{name}</title>'
        f'<text x="0" y="13" {text}>{name}</text><path fill="{_BAR}" d="{"".join(bars)}"/>'
        f'<path stroke="currentColor" stroke-opacity=".4" d="{axis}"/>{ends}</svg>'
    )


def table_html(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; of more than `MOST_TABLE_ROWS` rows it has the first ones, and a count."""
    every = list(rows)
    head = "".join(
        f'<th style="{_CELL};{_RULE};font-weight:600">{escape(one)}</th>' for one in heads
    )
    body = []
    for row in every[:MOST_TABLE_ROWS]:
        cells = "".join(f'<td style="{_CELL}">{escape(str(cell))}</td>' for cell in row)
        body.append(f'<tr style="background:none">{cells}</tr>')
    if len(every) > MOST_TABLE_ROWS:
        more = f"and {len(every) - MOST_TABLE_ROWS:,} more"
        body.append(f'<tr><td style="{_CELL}" colspan="{len(heads)}">{more}</td></tr>')
    return (
        f'<table class="gear-view" style="{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def view_html(
    title: str, facts: Mapping[str, str], pictures: Iterable[str] = (), table: str = ""
) -> str:
    """Return a view: a title, facts in one line, pictures side by side, and a table.

    Args:
        title: Name of the object.
        facts: Values by what they are; both are escaped.
        pictures: SVGs of `histogram_svg`; empty ones are left out.
        table: HTML of `table_html`.
    """
    line = " &middot; ".join(
        f"{escape(name)} <b>{escape(text)}</b>" for name, text in facts.items()
    )
    drawn = "".join(pictures)
    return (
        f'<div class="gear-view" style="{_STYLE}"><div><b>{escape(title)}</b></div>'
        f"<div>{line}</div>"
        + (f'<div style="display:flex;flex-wrap:wrap">{drawn}</div>' if drawn else "")
        + f"{table}</div>"
    )


def safe_view(shown: object, build: Callable[[], str]) -> str:
    """Return what `build` returns; if it raises, the object's plain text and the error.

    A notebook that shows an object must not end in a traceback, for example because a file of the
    data set was deleted.
    """
    try:
        return build()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    try:
        text = repr(shown)
    except Exception:
        text = object.__repr__(shown)
    return f"<pre>{escape(text)}\n\nno table or picture: {escape(reason)}</pre>"


def evenly(total: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` indices below `total` at even distances, from the first to the last.

    `evenly(10, 4)` is [0, 3, 6, 9].
    """
    if total <= most:
        return np.arange(total, dtype=np.int64)
    return np.arange(most, dtype=np.int64) * (total - 1) // max(most - 1, 1)

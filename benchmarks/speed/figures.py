"""The figures of docs/comparison.md, from results/peers.json: SVG in the colours of light and dark
pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from speed import work

WIDTH = 860
LEFT = 220
NAMES_WIDTH = 290  # of the longest name of SHOWN
RIGHT = 130
TOP = 74
ROW = 30
HEIGHT = 300
STYLE = """<style>
text { font: 12px sans-serif; fill: #24292f } .page { fill: #ffffff } line { stroke: #d0d7de }
.gear { font-weight: bold }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } line { stroke: #30363d }
}
</style>"""
# A colour that is seen on both pages, and a shape around 0, 0, for each system in its order.
COLORS = (
    "#d1495b",
    "#7a7f87",
    "#3b82c4",
    "#d08b00",
    "#8a63d2",
    "#2a9d5c",
    "#c2569b",
    "#008b95",
    "#9a6b3f",
)
SHAPES = (
    "M0-7L7 0 0 7-7 0z|M-5-5H5V5H-5z|M0-6L6 5H-6z|M0 6L6-5H-6z|"
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z|M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2z"
).split("|")
# The kinds of work of the summary: they stand for what users call most.
SHOWN = (
    "uniform transitions, B = 256",
    "prioritized transitions, B = 256",
    "windows of 20, B = 128",
    "whole trajectories, B = 128",
    "4 stacked frames, B = 256",
    "a step of 64 environments",
    work.CALL,
    work.CALL + work.BETWEEN,
    "a whole trajectory of 1,000",
    work.COMMIT,
    "a step of 64 of 512 groups of 8 responses",
)
Row = dict[str, Any]
Names = dict[str, str]  # of systems, in their order


class Scale:
    """A logarithmic axis from a to b pixels; its ends are powers of ten."""

    def __init__(self, values: list[float], a: float, b: float) -> None:
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self._a = a
        self._b = b

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._a + share * (self._b - self._a), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield places and their texts."""
        for power in range(self._low, self._high + 1):
            yield self.at(10.0**power), f"{10.0**power:,.12g}"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def _line(a: float, b: float, c: float, d: float) -> str:
    return f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>'


def _mark(x: float, y: float, at: int) -> str:
    shape = SHAPES[at % len(SHAPES)]
    color = COLORS[at % len(COLORS)]
    return f'<path d="{shape}" transform="translate({x} {y})" fill="{color}"/>'


def _page(height: float, title: str, body: list[str]) -> str:
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">', STYLE]
    head += [
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        _text(16, 24, title, 'class="gear"'),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def multiples(rows: list[Row], names: Names) -> str:
    """Draw the time of a batch as a multiple of the C loop's: a line for each kind of work that it
    does.
    """
    batches = [row for row in rows if re.search(r", B = [\d,]+$", row["work"]) and "us" in row]
    limits = {row["work"]: row["us"] for row in batches if row["system"] == "limit"}
    shown = [row for row in batches if row["work"] in limits and row["system"] in names]
    scale = Scale([row["us"] / limits[row["work"]] for row in shown], LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(limits)
    body = [
        _text(
            WIDTH / 2,
            bottom + 36,
            "multiple of the C loop's time, log scale",
            'text-anchor="middle"',
        )
    ]
    for x, words in scale.ticks():
        body.append(_line(x, TOP - 6, x, bottom))
        body.append(_text(x, bottom + 16, words, 'text-anchor="middle"'))
    heights = {kind: TOP + ROW * number + ROW / 2 for number, kind in enumerate(limits)}
    body += [_text(LEFT - 14, y + 4, kind, 'text-anchor="end"') for kind, y in heights.items()]
    used = {row["system"]: list(names).index(row["system"]) for row in shown}
    x = 22.0
    for row in sorted(
        shown, key=lambda row: -used[row["system"]]
    ):  # this project's mark comes last, on top
        place = scale.at(row["us"] / limits[row["work"]])
        body.append(_mark(place, heights[row["work"]], used[row["system"]]))
    for system, at in sorted(used.items(), key=lambda one: one[1]):
        body += [_mark(round(x, 1), 46, at), _text(round(x + 9, 1), 50, names[system])]
        x += 28 + 6.4 * len(names[system])
    return _page(bottom + 50, "Time of a batch; further left is faster", body)


def steps(rows: list[Row], names: Names) -> str:
    """Draw the time of an added step over the number of environments: a line for each system."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        words = row["work"].split()
        if (
            row["work"].startswith("a step of")
            and words[-1].startswith("environment")
            and "us" in row
        ):
            lines.setdefault(row["system"], []).append((int(words[3]), row["us"]))
    shown = [(at, one) for at, one in enumerate(names) if one in lines]
    down = Scale([us for _, one in shown for _, us in lines[one]], TOP + HEIGHT, TOP)
    across = Scale([1, 64], 70, 70 + (WIDTH - RIGHT - 100) * 2 / math.log10(64))
    end = across.at(64)
    body = [
        _text((70 + end) / 2, TOP + HEIGHT + 38, "environments, log scale", 'text-anchor="middle"')
    ]
    body.append(_text(16, TOP - 14, "microseconds, log scale"))
    for y, words in down.ticks():
        body.append(_line(70, y, end, y))
        body.append(_text(62, y + 4, words, 'text-anchor="end"'))
    for count in sorted({count for one in lines.values() for count, _ in one}):
        body.append(_text(across.at(count), TOP + HEIGHT + 18, str(count), 'text-anchor="middle"'))
    below = math.inf
    for at, system in sorted(
        shown, key=lambda one: lines[one[1]][-1][1]
    ):  # from the lowest label up
        points = [(across.at(count), down.at(us)) for count, us in lines[system]]
        path = " ".join(f"{x},{y}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[at % len(COLORS)]}"/>')
        body += [_mark(x, y, at) for x, y in points]
        below = min(points[-1][1] + 4, below - 15)
        body.append(
            _text(end + 14, below, names[system], 'class="gear"' if system == "gear" else "")
        )
    return _page(TOP + HEIGHT + 52, "Time of a step that is added; lower is faster", body)


def fastest(rows: list[Row], names: Names) -> str:
    """Draw the time of the work that SHOWN names: the C loop, this project, the fastest other.

    Each kind has a scale of its own, with the slowest of the three as its end.
    """
    body = []
    y = TOP - 26
    for kind in SHOWN:
        us = {row["system"]: row["us"] for row in rows if row["work"] == kind and "us" in row}
        others = [one for one in names if one in us and one not in ("gear", "limit")]
        if "gear" not in us or not others:
            continue
        other = min(others, key=lambda one: us[one])
        shown = [("limit", "C loop", "#7a7f87")] if "limit" in us else []
        shown += [("gear", names["gear"], COLORS[0]), (other, names[other], COLORS[2])]
        longest = max(us[system] for system, _, _ in shown)
        body.append(_text(NAMES_WIDTH - 14, y + 9 + 8 * len(shown), kind, 'text-anchor="end"'))
        for system, name, color in shown:
            width = round((WIDTH - NAMES_WIDTH - RIGHT - 90) * us[system] / longest, 1)
            style = 'class="gear"' if system == "gear" else ""
            body.append(f'<path d="M{NAMES_WIDTH} {y}h{width}v12h-{width}z" fill="{color}"/>')
            body.append(
                _text(NAMES_WIDTH + width + 8, y + 10, f"{us[system]:,.0f} us, {name}", style)
            )
            y += 16
        y += 14
    title = "Time of a batch, or of an added step: the C loop, this project, the fastest other"
    return _page(y, title, body)


def figures(rows: list[Row], names: Names) -> Iterator[tuple[str, str]]:
    """Yield the files below docs/figures, by name."""
    yield "peers_fastest.svg", fastest(rows, names)
    yield "peers_batches.svg", multiples(rows, names)
    yield "peers_steps.svg", steps(rows, names)

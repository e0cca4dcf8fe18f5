"""Boxes, arrows and text of the SVG pictures in docs/figures, readable on light and on dark pages.

A picture is a program beside this file, which writes its SVG to stdout:

    python docs/figures/dataflow.py > docs/figures/dataflow.svg
"""

from __future__ import annotations

from html import escape

# Each colour has a form for light and one for dark pages; the reader's setting chooses.
_STYLE = """<style>
.page { fill: #ffffff } .text { fill: #1f2933 } .small { fill: #52606d; font-size: 12px }
.title { fill: #1f2933; font-weight: 600; font-size: 15px }
.group { fill: #f5f7fa; stroke: #cbd2d9 } .plain { fill: #ffffff; stroke: #9aa5b1 }
.blue { fill: #e3f2fd; stroke: #2680c2 } .green { fill: #e6f6ec; stroke: #2f8f5b }
.orange { fill: #fdeee2; stroke: #c65d21 }
.bar-blue { fill: #2680c2 } .bar-green { fill: #2f8f5b } .bar-orange { fill: #c65d21 }
.bar-gray { fill: #9aa5b1 }
.line-blue { stroke: #2680c2 } .line-green { stroke: #2f8f5b } .line-orange { stroke: #c65d21 }
.line-gray { stroke: #9aa5b1 }
.arrow { stroke: #52606d; fill: none; stroke-width: 1.6 } .tip { fill: #52606d }
.back { stroke: #c65d21; fill: none; stroke-width: 1.6; stroke-dasharray: 5 4 }
.back-tip { fill: #c65d21 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } .text, .title { fill: #e6edf3 } .small { fill: #9da7b3 }
  .group { fill: #161b22; stroke: #30363d } .plain { fill: #0d1117; stroke: #484f58 }
  .blue { fill: #10243b; stroke: #3b8eea } .green { fill: #10291b; stroke: #3fa66b }
  .orange { fill: #33200f; stroke: #e0823d }
  .bar-blue { fill: #3b8eea } .bar-green { fill: #3fa66b } .bar-orange { fill: #e0823d }
  .bar-gray { fill: #6e7681 }
  .arrow { stroke: #9da7b3 } .tip { fill: #9da7b3 } .back { stroke: #e0823d }
  .back-tip { fill: #e0823d }
}
</style>
<defs>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker>
<marker id="back-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path class="back-tip" d="M0 0L8 4L0 8z"/></marker>
</defs>"""


class Drawing:
    """An SVG picture that grows by its parts, each drawn over the earlier ones.

    Places and sizes are pixels of the picture's own width, from its upper left corner. Readers see
    it at the width of their page, and `label` where a screen reader reads it out.
    """

    def __init__(self, width: int, height: int, label: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(label)}" font-family="Inter, Helvetica, Arial, sans-serif" '
            'font-size="14">',
            _STYLE,
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain") -> None:
        """Draw a rounded box: plain, group, blue, green or orange."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            ' rx="7"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw a filled bar: blue, green, orange or gray."""
        self._parts.append(
            f'<rect class="bar-{color}" x="{x:g}" y="{y:g}" width="{width:g}"'
            f' height="{height:g}" rx="2"/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "text", anchor: str = "middle"
    ) -> None:
        """Write words whose baseline is at y: text, small or title; anchor start, middle or end."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def labelled_box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: tuple[str, ...],
        kind: str = "plain",
    ) -> None:
        """Draw a box with a line of text and smaller lines below it, all in its middle."""
        self.box(x, y, width, height, kind)
        first = y + height / 2 + 5 - 8.5 * (len(words) - 1)
        for number, line in enumerate(words):
            style = "small" if number else "text"
            self.text(x + width / 2, first + 17 * number, line, style)

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str) -> None:
        """Draw a thin line: blue, green, orange or gray."""
        self._parts.append(f'<path class="line-{color}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def curve(self, points: list[tuple[float, float]], color: str) -> None:
        """Draw a thin line through points: blue, green, orange or gray."""
        path = "L".join(f"{round(x, 1):g} {round(y, 1):g}" for x, y in points)
        self._parts.append(f'<path class="line-{color}" fill="none" d="M{path}"/>')

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        """Draw a filled circle: blue, green, orange or gray."""
        self._parts.append(f'<circle class="bar-{color}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def arrow(self, path: str) -> None:
        """Draw an arrow along an SVG path."""
        self._parts.append(f'<path class="arrow" marker-end="url(#tip)" d="{path}"/>')

    def back_arrow(self, path: str) -> None:
        """Draw a dashed arrow of what flows back."""
        self._parts.append(f'<path class="back" marker-end="url(#back-tip)" d="{path}"/>')

    def svg(self) -> str:
        """Return the picture's text."""
        return "\n".join([*self._parts, "</svg>"])

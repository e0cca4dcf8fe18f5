"""`gear watch`: lines and histograms of a running job: its tables, its ranks, their waits.

The job need not know: its shared memory is read, and nothing is written or locked. RUN is the name
or id of a run, or the id of one of its processes; without it, the only job that runs here.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

from deepspeed_gear.cli import Options, replace_file
from deepspeed_gear.errors import ConfigError, show_bytes
from deepspeed_gear.replay.run_reading import (
    LiveRun,
    RankReading,
    RunReading,
    TableReading,
    find_run,
)

OPTIONS: Options = {
    "RUN_NAME": (
        "name or id of the run, or id of one of its processes",
        {"nargs": "?", "metavar": "RUN"},
    ),
    "--once": "print one frame and exit; needs no terminal",
    "--every S": ("seconds between frames, 0.1 to 3600 (default: 1)", {"type": float}),
    "--html FILE": "write each frame to this page, for a browser",
}
_LEAST_S = 0.1
_MOST_S = 3600.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 12  # characters
_BINS = 16  # of a histogram
_HISTORY = 24  # readings in the sparklines of rates
_OF_RANK = 8  # readings in those of a rank
_LATE_S = 0.5  # a rank is shown as waited for after this time
_WIDTH = 100  # of frames that go to no terminal


def run(args: argparse.Namespace) -> int:
    """Show frames until the job ends, or one frame."""
    every_s = 1.0 if args.every is None else args.every
    if not _LEAST_S <= every_s <= _MOST_S:
        raise ConfigError(
            "--every",
            f"must be in [{_LEAST_S}, {_MOST_S:.0f}] seconds",
            every_s,
            "leave it out for 1 second",
        )
    page = None if args.html is None else Page(Path(args.html), None if args.once else every_s)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if not (args.once or page is not None or console.is_terminal):
        rule = "must be a terminal for a live view"
        raise ConfigError("the output of gear watch", rule, None, "give --once or --html FILE")
    watched = find_run(args.run_name)
    view = RunView(watched)
    if args.once:
        time.sleep(every_s)  # rates need two readings
        view.read()
        if page is not None:
            page.write(view.frame())
        console.print(view.frame())
        return 0
    try:
        _follow(view, every_s, console, page)
    except KeyboardInterrupt:
        return 0
    print(f"run {watched.run} has ended")
    return 0


def _follow(view: RunView, every_s: float, console: Console, page: Page | None) -> None:
    """Show a frame at every interval, and a last one when the run has ended."""
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while True:
            frame = view.frame()
            if page is not None:
                page.write(frame, is_last=not view.lives)
            if live is not None:
                live.update(frame, refresh=True)
            if not view.lives:
                return
            time.sleep(every_s)
            view.read()


class Page:
    """A page of the newest frame, without scripts, in the reader's light or dark colours.

    Args:
        path: Its file, which each frame replaces.
        every_s: Seconds after which a browser loads it again; None: never.
    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, every_s: float | None) -> None:
        self._path = path
        self._every_s = every_s
        remedy = "name a file in a folder that you may write to"
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError("--html", "must be a file that can be written", str(path), remedy)

    def write(self, frame: RenderableType, is_last: bool = False) -> None:
        """Replace the page at once, so that a browser never reads half of it."""
        forms = "".join(
            f'<div class="{name}">{_as_html(frame, theme)}</div>\n'
            for name, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", DIMMED_MONOKAI))
        )
        again = ""
        if self._every_s is not None and not is_last:
            again = f'<meta http-equiv="refresh" content="{max(round(self._every_s), 1)}">'
        with ConfigError.on(
            "--html", "must be a file that can be written", OSError, remedy="choose another --html"
        ):
            replace_file(self._path, _PAGE.format(again=again, forms=forms).encode())


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{again}
<meta name="viewport" content="width=device-width"><title>gear watch</title>
<style>
body {{ background: #ffffff; margin: 1em }}
pre {{ font: 14px/1.25 Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-x: auto }}
.dark {{ display: none; color: #d9d9d9 }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #0d1117 }} .light {{ display: none }} .dark {{ display: block }}
}}
</style></head><body>
{forms}</body></html>
"""


def _as_html(frame: RenderableType, theme: TerminalTheme) -> str:
    console = Console(
        file=StringIO(), record=True, width=_WIDTH, force_terminal=True, color_system="standard"
    )
    console.print(frame)
    return console.export_html(theme=theme, inline_styles=True, code_format="<pre>{code}</pre>")


class RunView:
    """Frames of a run: its latest reading, and rates over its latest readings."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._readings = deque([live.read()], maxlen=_HISTORY + 1)

    @property
    def lives(self) -> bool:
        """Whether a rank was attached at the latest reading."""
        return self._readings[-1].lives

    def read(self) -> None:
        """Read the run once more."""
        self._readings.append(self._live.read())

    def frame(self) -> RenderableType:
        """Return the view of the latest reading."""
        now = self._readings[-1]
        writers = sum(table.writers for table in now.tables)
        living = sum(rank.lives for rank in now.ranks)
        state = f"{living} of {len(now.ranks)} ranks, {writers} writers on {socket.gethostname()}"
        line = Text(f"{time.strftime('%H:%M:%S')}  {state}")
        if not now.lives:
            line = Text("the run has ended", style="red")
        parts = [self._panel(at, table) for at, table in enumerate(now.tables)]
        return Group(Text(f"run {now.run}", style="bold"), line, *parts, self._ranks())

    def _rates(self, count: Callable[[RunReading], float]) -> list[float]:
        """Return the rates between readings, oldest first; a load may set counts back."""
        rates = []
        for before, after in pairwise(self._readings):
            elapsed_s = max(after.at_s - before.at_s, 1e-9)
            rates.append(max(count(after) - count(before), 0.0) / elapsed_s)
        return rates

    def _rank_rates(self, at: int, count: Callable[[RankReading], float]) -> list[float]:
        return self._rates(lambda reading: count(reading.ranks[at]))

    def _panel(self, at: int, table: TableReading) -> Panel:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="cyan", no_wrap=True)
        rows.add_column()
        for name, text in self._lines(at, table):
            rows.add_row(name, Text(text))
        kind = "not sampled" if table.kind is None else f"{table.kind}, unit {table.unit}"
        return Panel(rows, title=Text(f"table {table.table}: {kind}"), title_align="left")

    def _lines(self, at: int, table: TableReading) -> list[tuple[str, str]]:
        lines = [("fill", _fill(table))]
        if table.most_rows is not None:
            added = self._rates(lambda reading: reading.tables[at].added)
            steps = self._rates(lambda reading: reading.tables[at].steps_added)
            text = f"{_rate(added)} trajectories/s, {_rate(steps)} steps/s"
            lines.append(("writers", f"{text}  {_line(added)}  {table.added:,} ever"))
        if table.kind is not None:
            batches = self._rates(lambda reading: reading.tables[at].batches)
            samples = self._rates(lambda reading: reading.tables[at].samples)
            text = f"{_rate(batches)} batches/s, {_rate(samples)} samples/s"
            lines.append(("samplers", f"{text}  {_line(batches)}  {table.batches:,} batches ever"))
        batch = table.batch
        if batch is not None:
            text = f"effective sample size {batch.effective:.1%}"
            lines.append(("newest batch", f"{text}, duplicates {batch.duplicates:.1%}"))
            if len(batch.ages):
                ends = f"mean {batch.ages.mean():,.0f} newer trajectories"
                lines.append(("ages", f"{_histogram(batch.ages)}  {ends}"))
            if len(batch.lags):
                ends = f"mean {batch.lags.mean():.2g}, max {batch.lags.max():.0f} versions"
                lines.append(("policy lag", f"{_histogram(batch.lags)}  {ends}"))
        if table.version is not None:
            lines.append(("policy", f"version {table.version:,}"))
        if table.priorities is not None and len(table.priorities):
            lines.append(("priorities", _priorities(table.priorities)))
        if table.groups:
            counts = ", ".join(
                f"{n:,} {name.replace('_', ' ')}" for name, n in table.groups.items()
            )
            lines.append(("groups", counts))
        if table.prompts:
            counts = ", ".join(f"{n:,} {name}" for name, n in table.prompts.items() if n)
            issued = sum(table.prompts.values())
            lines.append(("prompts", f"{issued:,} issued" + (f": {counts}" if counts else "")))
        return lines

    def _ranks(self) -> Panel:
        now = self._readings[-1]
        heads = ["rank", "process", "batches", "per s", "waits", "late", "latest batch"]
        has_steps = any(rank.steps for rank in now.ranks)
        if has_steps:
            heads[4:4] = ["steps", "tokens/s"]
        grid = Table(box=None, padding=(0, 1), pad_edge=False, header_style="cyan")
        for head in heads:
            grid.add_column(head, justify="left" if head == heads[-1] else "right")
        for at, rank in enumerate(now.ranks):
            batches = self._rank_rates(at, lambda rank: rank.batches)
            waits = self._rank_rates(at, lambda rank: rank.wait_s)
            late = self._rank_rates(at, lambda rank: rank.late_s or 0.0)
            cells: list[str | Text] = [
                str(rank.rank),
                str(rank.process),
                f"{rank.batches:,}",
                _rate(batches),
            ]
            if has_steps:
                tokens = self._rank_rates(at, lambda rank: rank.tokens)
                cells += [f"{rank.steps:,}", _rate(tokens)]
            cells += [
                f"{_line(waits[-_OF_RANK:], 1.0)} {_share(waits)}",
                "" if rank.late_s is None else f"{_line(late[-_OF_RANK:], 1.0)} {_share(late)}",
                _state(rank, now.at_s),
            ]
            grid.add_row(*cells)
        return Panel(grid, title="ranks", title_align="left")


def _fill(table: TableReading) -> str:
    size = show_bytes(table.num_bytes)
    if table.fill is None:
        return f"a data set: {table.trajectories:,} trajectories, {table.steps:,} steps; {size}"
    whole = round(table.fill * _BAR)
    bar = "█" * whole + "░" * (_BAR - whole)
    trajectories = f"{table.trajectories:,} of {table.most_trajectories:,} trajectories"
    rows = f"{table.rows:,} of {table.most_rows:,} rows"
    return f"{bar} {table.fill:.0%}  {trajectories}, {rows}; {size}"


def _state(rank: RankReading, now_s: float) -> str | Text:
    if not rank.lives:
        return Text("ended", style="red")
    if not rank.begun_s:
        return "starts"
    if rank.waited_for_s is not None and rank.waited_for_s > _LATE_S:
        return Text(f"others wait for it, {rank.waited_for_s:.1f} s", style="red")
    if rank.returned_s is None:
        return "none yet"
    return f"{max(now_s - rank.returned_s, 0.0):.1f} s ago"


def _rate(rates: Sequence[float]) -> str:
    """Show the newest rate with three digits."""
    if not rates:
        return "-"
    return f"{rates[-1]:,.0f}" if rates[-1] >= 100 else f"{rates[-1]:.3g}"


def _share(rates: Sequence[float]) -> str:
    """Show the newest seconds per second as a part of the time."""
    return f"{min(rates[-1], 1.0):.1%}" if rates else "-"


def _line(values: Sequence[float], most: float | None = None) -> str:
    """Draw values as a sparkline, from 0 to their maximum or `most`; nothing for a single one."""
    if len(values) < 2:
        return ""
    top = max(values) if most is None else most
    if top <= 0:
        return _BLOCKS[0] * len(values)
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(round(value / top * last), last)] for value in values)


def _histogram(values: np.ndarray) -> str:
    """Draw how many values fall into equal parts of [0, max], and name the maximum."""
    top = float(values.max()) if len(values) else 0.0
    bins = min(_BINS, int(top) + 1)  # whole numbers: no part of their own for a fraction
    counts = np.histogram(values, bins, (0.0, max(top, 1.0)))[0]
    return f"0 {_blocks(counts)} {top:,.0f}"


def _priorities(values: np.ndarray) -> str:
    """Draw how many priorities have each power of two."""
    positive = values[values > 0]
    if not len(positive):
        return "all are 0"
    powers = np.frexp(positive)[1] - 1
    low = int(powers.min())
    high = int(powers.max())
    every = -(-(high - low + 1) // _BINS)
    counts = np.bincount((powers - low) // every)
    text = f"2^{low} {_blocks(counts)} 2^{high + 1}"
    return f"{text}  median {np.median(positive):.3g}, max {positive.max():.3g}"


def _blocks(counts: np.ndarray) -> str:
    """Draw counts: a space for none, and at least the lowest block for one."""
    last = len(_BLOCKS) - 1
    top = max(int(counts.max()), 1)
    return "".join(_BLOCKS[round(int(n) / top * last)] if n else " " for n in counts)

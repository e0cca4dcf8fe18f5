"""Pictures of a data set, for `gear inspect --plot`: lengths, returns, values, gaps and frames."""

from __future__ import annotations

import io
import re
import warnings
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.cli import replace_file
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_sample import (
    MOST_ELEMENTS,
    ColumnSample,
    DatasetSample,
    frame_of,
    holds_images,
)
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
from deepspeed_gear.notebook_views import evenly, histogram, show_number
from deepspeed_gear.schema import Column

SUFFIXES = (".svg", ".png", ".html")
MOST_COLUMNS = 60  # columns with a histogram; a wider picture cannot be read
MOST_STRIPS = 6  # columns of images with frames
MOST_GAPS = 10  # columns with missing values that have a bar
_MOST_LINES = 4  # elements of a row that have a line each
_FEW_BARS = 6
_FRAMES = 8  # of a trajectory
_TRAJECTORIES = 3  # with frames
_ACROSS = 3  # panels side by side
_WIDTH = 11.0  # inches
_PANEL = 1.85
_MOST_STRIP = 1.3  # of the frames of one trajectory
_DPI = 110
_PAGE = "#ffffff"
_TEXT = "#1f2933"
_SMALL = "#52606d"
_LINE = "#cbd2d9"
_BLUE = "#2680c2"
_ORANGE = "#c65d21"
_COLORS = (_BLUE, _ORANGE, "#2f8f5b", "#8e44ad")
# Colours of dark pages in place of those of light ones.
_DARK = {_PAGE: "#14171b", _TEXT: "#e4e7eb", _SMALL: "#9aa5b1", _LINE: "#3e4c59"}
_SETTINGS = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": _TEXT,
    "text.parse_math": False,  # a name may hold a dollar sign
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": _SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.facecolor": _PAGE,
    "xtick.color": _SMALL,
    "ytick.color": _SMALL,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "svg.fonttype": "none",  # text stays text, which is smaller and can be searched
    "svg.hashsalt": "gear",  # the same picture has the same bytes
}


def check_file(file: Path) -> None:
    """Check that a picture can be written, before anything is read.

    Raises:
        ConfigError: The suffix is another, the folder does not exist, or matplotlib is absent.
    """
    if file.is_dir():
        raise ConfigError("--plot", "must be a file", str(file), "it is a folder")
    if file.suffix.lower() not in SUFFIXES:
        rule = f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise ConfigError("--plot", rule, str(file), f"for example {file.with_suffix('.svg')}")
    if not file.parent.is_dir():
        rule = "must be in a folder that exists"
        raise ConfigError("--plot", rule, str(file), f"mkdir -p {file.parent}")
    try:
        import_module("matplotlib.figure")
    except ImportError:
        remedy = "pip install 'deepspeed_gear[plot]'"
        raise ConfigError("--plot", "must be drawn by matplotlib", None, remedy) from None


def plot(dataset: Dataset, file: Path) -> dict[str, Any]:
    """Draw a data set into a file, which replaces an earlier one as a whole.

    Returns:
        The file, and which rows it shows, as JSON values.
    Raises:
        DataError: A file of the data set has changed, or the picture cannot be written.
    Cost: reads a sample of the rows, of a size that does not grow with the data.
    """
    dataset.files.check()
    sample = DatasetSample(dataset)
    suffix = file.suffix.lower()
    with import_module("matplotlib").rc_context(_SETTINGS), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks has boxes in a PNG; SVG keeps the text.
        warnings.filterwarnings("ignore", "Glyph")
        figure = _draw(dataset, sample)
        content = io.BytesIO()
        if suffix == ".png":
            figure.savefig(content, format="png", dpi=_DPI)
        else:
            metadata = {"Date": None, "Creator": None, "Title": f"data set {dataset.path.name}"}
            figure.savefig(content, format="svg", metadata=metadata)
    data = content.getvalue()
    if suffix != ".png":
        data = _with_dark_colours(data.decode()).encode()
    if suffix == ".html":
        data = _page(dataset, data.decode()).encode()
    with DataError.on(str(file), "must be writable", OSError, remedy="choose another --plot"):
        replace_file(file, data)
    return {
        "file": str(file),
        "sampled": sampling(dataset, sample),
        "steps": sample.num_steps,
        "steps_of": dataset.num_steps,
        "trajectories": sample.num_trajectories,
        "trajectories_of": len(dataset),
    }


def _draw(dataset: Dataset, sample: DatasetSample) -> Any:
    """Return the figure of a data set."""
    every = [one for one in dataset.schema if one.role not in ("length", "return")]
    shown = every[:MOST_COLUMNS]
    values = {column.name: sample.column(column) for column in every}
    strips = [column for column in every if holds_images(column)][:MOST_STRIPS]
    returns = sample.returns()
    num_rows = -(-(2 + (returns is not None) + len(shown)) // _ACROSS)  # of panels
    examples = evenly(len(dataset), _TRAJECTORIES).tolist()
    heights = [_PANEL] * num_rows + [_strip_height(one) * len(examples) + 0.3 for one in strips]
    head_and_foot = 1.0
    figure = import_module("matplotlib.figure").Figure(
        figsize=(_WIDTH, sum(heights) + head_and_foot), layout="constrained"
    )
    figure.get_layout_engine().set(h_pad=0.07, hspace=0.04, wspace=0.03, rect=(0.008, 0, 0.984, 1))
    grid = figure.add_gridspec(len(heights), _ACROSS, height_ratios=heights)
    panels = (figure.add_subplot(grid[row, at]) for row in range(num_rows) for at in range(_ACROSS))
    size = show_bytes(dataset.num_bytes)
    name = (
        f"{dataset.path.name}: {len(dataset):,} trajectories, {dataset.num_steps:,} steps, {size}"
    )
    figure.suptitle(name, x=0.012, ha="left", fontsize=12, fontweight="bold")
    _histogram(next(panels), "length of trajectories", "steps", dataset.lengths)
    if returns is not None:
        note = "" if len(returns) == len(dataset) else f"{len(returns):,} of {len(dataset):,}"
        _histogram(next(panels), "return of trajectories", note, returns)
    _gaps(next(panels), {name: one.missing for name, one in values.items()})
    for column in shown:
        _column(next(panels), column, values[column.name])
    for unused in panels:
        unused.set_axis_off()
    for row, column in enumerate(strips, start=num_rows):
        _strip(figure.add_subfigure(grid[row, :]), column, sample, examples)
    left_out = len(every) - len(shown)
    more = f" {left_out} more columns have no histogram." if left_out else ""
    figure.supxlabel(sampling(dataset, sample) + more, x=0.012, ha="left", fontsize=8, color=_SMALL)
    return figure


def sampling(dataset: Dataset, sample: DatasetSample) -> str:
    """Return a sentence on which rows the histograms show."""
    most = MOST_ELEMENTS
    numeric = [column for column in dataset.schema if not column.is_opaque]
    has_large_rows = any(column.num_elements * dataset.num_steps > most for column in numeric)
    large = f"; of rows with many elements, at most {most:,} elements" if has_large_rows else ""
    if sample.num_steps == dataset.num_steps and sample.num_trajectories == len(dataset):
        return f"Values: all rows{large}."
    steps = f"{sample.num_steps:,} of {dataset.num_steps:,} steps"
    trajectories = f"{sample.num_trajectories:,} of {len(dataset):,} trajectories"
    runs = f"in runs of {sample.run_steps} at even distances"
    return f"Values: {steps}, {runs}, and {trajectories}{large}."


def _head(axes: Any, title: str, note: str) -> None:
    axes.set_title(_short(title, 30))
    axes.set_title(note, loc="right", fontsize=8, fontweight="normal", color=_SMALL)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _histogram(axes: Any, title: str, note: str, values: NDArray[Any]) -> None:
    """Draw the histogram of values; of [rows, n] with few elements, a line for each element."""
    _head(axes, title, note)
    counted = histogram(values)
    if counted is None:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=_SMALL)
        axes.set(xticks=[], yticks=[])
        return
    num_bins = len(counted.counts)
    # matplotlib cannot place the edges of extreme or very narrow ranges: these have equal steps.
    farthest = float(np.abs(counted.edges).max())
    narrowest = float(counted.edges[1] / 2 - counted.edges[0] / 2)
    is_plain = farthest < 1e100 and narrowest > max(1e-100, 1e-9 * farthest)
    edges = counted.edges if is_plain else np.arange(num_bins + 1.0)
    num_lines = values.shape[1] if values.ndim == 2 else 1
    if 1 < num_lines <= _MOST_LINES:
        for element, color in zip(range(num_lines), _COLORS, strict=False):
            numbers = values[:, element]
            counts, _ = np.histogram(numbers[np.isfinite(numbers)], counted.edges)
            share = counts / max(1, counts.sum())
            axes.stairs(share, edges, color=color, label=str(element), linewidth=1.1)
        legend = axes.legend(
            frameon=False, fontsize=7, ncols=num_lines, handlelength=0.7, loc="upper right"
        )
        legend.set_in_layout(False)
    elif num_bins < _FEW_BARS:
        middle = (edges[1:] + edges[:-1]) / 2
        width = float(edges[1] - edges[0])
        axes.bar(middle, counted.counts / counted.counts.sum(), width * 0.8, color=_BLUE)
        # The bars of few values are no wider than those of many.
        reach = width * _FEW_BARS / 2
        axes.set_xlim(middle.mean() - reach, middle.mean() + reach)
    else:
        axes.stairs(counted.counts / counted.counts.sum(), edges, fill=True, color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02, y=0.12)
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(3))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.2g}" if y < 0.01 else f"{y:.0%}")
    if counted.low == counted.high:
        axes.set_xticks([(edges[0] + edges[-1]) / 2], [show_number(counted.low)])
    elif not is_plain:
        axes.set_xticks(
            [edges[0], edges[-1]], [show_number(counted.low), show_number(counted.high)]
        )
    elif counted.is_whole and num_bins < _FEW_BARS:
        axes.set_xticks(np.arange(counted.low, counted.high + 1))
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=counted.is_whole))


def _gaps(axes: Any, shares: dict[str, float]) -> None:
    """Draw the share of missing values of the columns that have any."""
    some = sorted((item for item in shares.items() if item[1] > 0), key=lambda item: -item[1])
    note = f"{len(some)} of {len(shares)} columns"
    _head(axes, "missing: NaN, infinite, null", note if some else "")
    if not some:
        text = "no value is missing"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_SMALL)
        axes.set(xticks=[], yticks=[])
        return
    drawn = some[:MOST_GAPS]
    axes.barh([_short(name, 22) for name, _ in drawn], [share for _, share in drawn], color=_ORANGE)
    for place, (_, share) in enumerate(drawn):
        text = f" {share:.1%}" if share >= 0.001 else " < 0.1%"
        axes.text(share, place, text, va="center", fontsize=8, color=_SMALL)
    axes.set_ylim(max(len(drawn), _FEW_BARS) - 0.5, -0.5)  # the first bar is on top
    axes.margins(x=0.25)
    axes.set(xticks=[])


def _column(axes: Any, column: Column, sample: ColumnSample) -> None:
    """Draw the values of a column."""
    shape = "" if column.is_opaque or not column.shape else str(list(column.shape))
    note = f"{column.dtype}{shape}"
    if not sample.is_whole:
        note += f", {len(sample.values):,} rows"
    if column.is_opaque:
        _histogram(axes, column.name, f"{note}, bytes of a value", sample.values)
    else:
        _histogram(axes, column.name, note, sample.values)
    if column.dtype == "bool":
        axes.set_xticks([0, 1], ["False", "True"])


def _strip_height(column: Column) -> float:
    """Return the height of a row of frames with their labels, in inches."""
    height, width = frame_of(np.zeros(column.shape), column).shape[:2]
    return float(min(_MOST_STRIP, _WIDTH / _FRAMES * height / width) + 0.2)


def _strip(figure: Any, column: Column, sample: DatasetSample, examples: list[int]) -> None:
    """Draw frames of a column of images: a row for each of some trajectories."""
    title = f"{column.name}, {column.dtype}{list(column.shape)}: frames"
    figure.suptitle(title, x=0.012, ha="left", fontsize=9, fontweight="bold")
    every = figure.subplots(len(examples), _FRAMES, squeeze=False)
    for trajectory, row in zip(examples, every, strict=True):
        frames, steps = sample.frames(column, trajectory, _FRAMES)
        for axes in row:
            axes.set_axis_off()
        for axes, frame, step in zip(row, frames, steps, strict=False):
            axes.imshow(frame, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            label = f"trajectory {trajectory}, step {step}" if step == 0 else f"step {step}"
            axes.set_title(label, fontsize=7, fontweight="normal", color=_SMALL, pad=2)


def _with_dark_colours(svg: str) -> str:
    """Return a picture that has other colours for readers who have chosen dark pages.

    The same picture has the same bytes.
    """
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    body = svg[svg.index("<svg") :]
    # matplotlib derives the names of clip paths from addresses: numbers are the same each time.
    for number, name in enumerate(dict.fromkeys(re.findall(r'"(p[0-9a-f]{10})"', body))):
        body = body.replace(name, f"clip{number}")
    body = body.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, body, count=1)


def _page(dataset: Dataset, svg: str) -> str:
    """Return a page of a data set's table and picture, which needs no other file."""
    title = escape(f"data set {dataset.path.name}")
    picture = svg.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        'content="light dark"><style>body { margin: 2em auto; max-width: 1100px; padding: 0 1em; '
        f"background: {_PAGE}; color: {_TEXT} }} @media (prefers-color-scheme: dark) {{ body {{ "
        f"background: {_DARK[_PAGE]}; color: {_DARK[_TEXT]} }} }}</style></head><body>"
        f"{dataset._repr_html_()}{picture}</body></html>\n"
    )

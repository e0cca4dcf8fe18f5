"""Creating and writing the figures of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_gear.errors import ConfigError

COLOR, ACCENT = "#33658a", "#c1440e"


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", "must have matplotlib", None, "pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; the suffix of the path chooses the file type.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        remedy = "use a writable path that ends in .png, .svg or .pdf"
        raise ConfigError(f"--plot {path}", "must be writable", str(error), remedy) from error

"""Experience replay for large sequence models, as a part of DeepSpeed."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The stub lists the public names once: for type checkers, and for this module.
_IMPORTS = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_HOMES = {
    name: home for home, name in _IMPORTS.findall(Path(__file__).with_suffix(".pyi").read_text())
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use; without an engine no DeepSpeed is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    with _without_collections():
        module = importlib.import_module(_HOMES[name])
    # Kept as a global, so that the next access does not come here.
    globals()[name] = getattr(module, name)
    return globals()[name]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, which leave no garbage.

    They make so many objects that it would search all those of torch for cycles: a fifth of the
    time until the first batch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    """Return the public names, imported or not; completion shows them."""
    return sorted(__all__)

"""Public names of objects: what completion shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def public_names(names: Iterable[str], internal: Collection[str] = ()) -> list[str]:
    """Return the public ones of an object's names, sorted, for its `__dir__`.

    `internal` are names without an underscore that only other modules of this package use.
    """
    return sorted(name for name in names if not name.startswith("_") and name not in internal)

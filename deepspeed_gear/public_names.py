"""A base class for objects that list only their public names."""

from __future__ import annotations

from typing import ClassVar


class PublicNames:
    """Base of classes whose `dir()` lists public names only, which completion shows."""

    #: Names without an underscore that only other modules of this package use; a subclass adds its
    #: own.
    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        internal = frozenset[str]().union(
            *(vars(one).get("_internal", ()) for one in type(self).__mro__)
        )
        return sorted(
            name for name in super().__dir__() if not name.startswith("_") and name not in internal
        )

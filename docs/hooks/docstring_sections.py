"""A griffe extension: sections of docstrings are found without an empty line above them.

The docstrings of the package have none; griffe would read "Returns:" below the arguments as text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTIONS = "Args|Attributes|Returns|Yields|Raises|Example|Examples|Cost|Source"
_TITLE = re.compile(rf"(?<=[^\n])\n(?=(?:{_SECTIONS}):)")


def separated(text: str) -> str:
    """Return a docstring with an empty line above each section."""
    return _TITLE.sub("\n\n", text)


class DocstringSections(griffe.Extension):
    """Separates the sections of each docstring as it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object before anything reads it."""
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)

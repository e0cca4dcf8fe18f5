"""Griffe extension: sections of docstrings, which stand below each other without empty lines.

Griffe takes "Returns:" for a section only if the line above is empty, and shows it as text
otherwise. Most docstrings of the package have no empty lines between sections.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(
    r"(?m)^(?P<above>[^\n]*\S[^\n]*)\n(?=(?:Args|Attributes|Returns|Yields|Raises):\n[ ]{4})"
)
_PARAGRAPH = re.compile(r"(?m)^(?P<above>[^\n]*\S[^\n]*)\n(?=(?:Cost|Source|Thread safety): )")


def separated(docstring: str) -> str:
    """Return a docstring with an empty line above each section, and above "Cost:" and "Source:"."""
    for pattern in (_SECTION, _PARAGRAPH):
        docstring = pattern.sub(r"\g<above>\n\n", docstring)
    return docstring


class DocstringSections(griffe.Extension):
    """Separates the sections of every docstring that a page shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)

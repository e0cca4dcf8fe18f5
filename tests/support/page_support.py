"""The code of how-to pages."""

from __future__ import annotations

import re

from gear_support import ROOT


def page_code(page: str, holds: str) -> str:
    """Return the block of Python on a how-to page that holds a text."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if holds in block]
    return str(code)

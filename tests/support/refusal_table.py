"""Cases of configs that are refused, as text: a section of JSON, and below it, by four spaces, the
error.
"""

import json
import re
from typing import Any

import pytest


def refusals(text: str) -> list[Any]:
    """Return the section and the message of each case; lines of either are joined, "# ..." is left
    out.
    """
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    cases = re.findall(
        r"((?:^(?! {4}).+\n)+)((?:^ {4}.+\n)+)", "\n".join([*lines, ""]), re.MULTILINE
    )
    found = [(json.loads(section), " ".join(message.split())) for section, message in cases]
    return [pytest.param(section, message, id=message[:60]) for section, message in found]

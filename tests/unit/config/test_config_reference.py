"""The committed option reference is the one that the config model generates."""

from __future__ import annotations

import re

from gear_support import ROOT, load_script

from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.describe_options import options

TEXT = load_script(ROOT / "docs" / "hooks" / "config_reference.py").render()


def test_committed_reference_is_current() -> None:
    remedy = "run: python docs/hooks/config_reference.py docs/reference/config.md"
    assert (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8") == TEXT, remedy


def test_every_option_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.*) \|$", TEXT, re.MULTILINE)
    assert set(options(GearConfig)) < {name for name, *_ in rows}
    assert {"as", "in", "schema", "every", "huge_pages", "shape"} < {name for name, *_ in rows}
    assert all(meaning.endswith(".") for *_, meaning in rows)


def test_links_lead_to_headings() -> None:
    headings = {
        "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "_-")
        for heading in re.findall(r"^## `(.+)`$", TEXT, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]*)\)", TEXT))
    assert len(links) > 5
    assert links <= headings

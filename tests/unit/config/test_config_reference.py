"""The committed option reference is the one that the config model generates."""

from __future__ import annotations

import re
from pathlib import Path

from deepspeed_gear.cli import config_reference
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.describe_options import options

COMMITTED = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def test_committed_reference_is_current(tmp_path: Path) -> None:
    assert config_reference.main([str(tmp_path / "config.md")]) == 0
    remedy = "run: python -m deepspeed_gear.cli.config_reference docs/reference/config.md"
    assert COMMITTED.read_text(encoding="utf-8") == (tmp_path / "config.md").read_text(encoding="utf-8"), (
        remedy
    )


def test_every_option_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.*) \|$", config_reference.render(), re.MULTILINE)
    assert set(options(GearConfig)) < {name for name, *_ in rows}
    assert {"as", "in", "schema", "every", "huge_pages", "shape"} < {name for name, *_ in rows}
    assert all(meaning.endswith(".") for *_, meaning in rows)


def test_links_lead_to_headings() -> None:
    text = config_reference.render()
    headings = {
        "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "_-")
        for heading in re.findall(r"^## `(.+)`$", text, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert len(links) > 5
    assert links <= headings

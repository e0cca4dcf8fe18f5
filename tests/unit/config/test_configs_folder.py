"""Every config in configs/ is one that users can start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_gear.config import parse, refuse_batch_sizes

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("**/*.json"))


def test_there_are_configs() -> None:
    assert "minimal.json" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_parses(path: Path) -> None:
    config = parse(json.loads(path.read_text(encoding="utf-8"))["gear"])
    refuse_batch_sizes(config)
    assert parse(config.to_json()) == config

"""TD3 and PPO use gear as their pages say."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gear_support import ROOT, prefix

from deepspeed_gear import Replay

EXAMPLES = ROOT / "examples"


def lines_of(path: Path, name: str) -> list[str]:
    """Return the lines of code of a class: no blank ones, no docstrings."""
    source = path.read_text()
    found = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    lines = source.splitlines()[found.lineno - 1 : found.end_lineno]
    return [line for line in lines if line.strip() and not line.strip().startswith('"""')]


def test_gear_takes_few_lines_in_td3() -> None:
    """All that differs between a ring buffer and gear are the classes of the two."""
    source = (EXAMPLES / "td3.py").read_text()
    gear = lines_of(EXAMPLES / "td3.py", "Gear")
    assert len(gear) <= 15
    elsewhere = [line for line in source.splitlines() if "Replay" in line and line not in gear]
    assert [line.strip() for line in elsewhere] == ["from deepspeed_gear import Replay"]


def test_the_page_shows_the_config_and_an_actor_of_15_lines() -> None:
    page = (ROOT / "docs" / "how-to" / "online.md").read_text()
    shown = json.loads("{" + re.findall(r"```json\n(\"main\".*?)```", page, re.DOTALL)[0] + "}")["main"]
    table = json.loads((ROOT / "configs" / "online.json").read_text())["gear"]["tables"]["main"]
    assert shown == {name: value for name, value in table.items() if name != "schema"}
    actor = re.findall(r"```python\n(import gymnasium.*?)```", page, re.DOTALL)[0]
    ast.parse(actor)
    assert len(actor.strip().splitlines()) <= 15


@pytest.mark.parametrize("epochs", [1, 3])
def test_ppo_sees_every_step_of_its_roll_outs_once_per_epoch(epochs: int) -> None:
    section = json.loads((ROOT / "configs" / "ppo.json").read_text())["gear"]
    section |= {"batch_size": 256, "shared_memory": {"prefix": prefix()}}
    with Replay(section) as replay:
        for update in range(4):
            codes = np.arange(1024, dtype=np.float32).reshape(16, 64) + 10_000 * update
            for code in codes:
                zeros = dict.fromkeys(("log_probability", "advantage"), np.zeros(64, np.float32))
                rows = {"observation": np.stack([code] * 4, 1), "action": np.zeros(64, np.int64)}
                replay.add({**rows, **zeros, "value": code})
            seen = Counter(v for _ in range(4 * epochs) for v in replay.sample()["value"].tolist())
            assert seen == dict.fromkeys(codes.flatten().tolist(), epochs)
            replay.clear()
            assert len(replay) == 0

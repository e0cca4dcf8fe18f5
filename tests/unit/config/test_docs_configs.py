"""The generated option reference is current, and the configs of two pages give what the
pages say.
"""

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from gear_support import ROOT, config_of, load_script
from page_support import page_code, page_json

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.describe_options import options
from deepspeed_gear.config.table_options import DataConfig
from deepspeed_gear.errors import ShapeError

LOAD = re.compile(r"(?:use |`)load: (\w+)")


def test_remedies_and_pages_name_options_that_exist(checkout: Path) -> None:
    """`load: X` in prose and error texts."""
    known = get_args(DataConfig.model_fields["load"].annotation)
    files = [*(checkout / "deepspeed_gear").rglob("*.py"), *(checkout / "docs").rglob("*.md")]
    found = {(file.name, word) for file in files for word in LOAD.findall(file.read_text())}
    assert {word for _, word in found} == set(known), found


SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("achieved_goal", "float32", (2,), "other", "T+1"),
        Column("desired_goal", "float32", (2,), "other", "1"),
        Column("action", "int64", (), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("state", "float32", (4,)),
    ]
)


def trajectory(number: int, steps: int) -> dict[str, Any]:
    codes = 1000.0 * number + np.arange(steps + 1, dtype=np.float32)
    return {
        "observation": np.stack([codes] * 3, 1),
        "achieved_goal": np.stack([codes] * 2, 1),
        "desired_goal": np.full(2, -1, np.float32),
        "action": np.zeros(steps, np.int64),
        "reward": np.zeros(steps, np.float32),
        "terminated": np.zeros(steps, bool),
        "state": np.stack([codes[:-1]] * 4, 1),
    }


def replay_of(section: dict[str, Any]) -> Replay:
    replay = Replay(config_of(batch_size=64, **section), schemas={"main": SCHEMA})
    for number in range(20):
        replay.add(trajectory(number, 5 + 4 * number))
    return replay


def test_hindsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text(page_code("hindsight.md", "def reward"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with replay_of(page_json("hindsight.md")[0]) as replay:
        batch = replay.sample()
        reached = batch.relabelled & (batch.goal_step == batch.anchor + 1)
        assert torch.equal(batch["reward"], torch.where(reached, 0.0, -1.0))
        assert (batch["goal"][~batch.relabelled] == -1).all()


def test_recurrent() -> None:
    with replay_of(page_json("recurrent-models.md")[0]) as replay:
        batch = replay.sample()
        learns = batch.learns("reward")
        assert learns.shape == (64, 60)
        assert not learns[:, :20].any()
        assert torch.equal(learns[:, 20:], batch.mask["reward"][:, 20:])
        first = (batch.anchor - 20).clamp(min=0)
        assert torch.equal(batch["state"][:, 0], (1000 * batch.trajectory_id + first).float())
        td = torch.rand(64, 60)
        td[:, :20] = torch.nan
        with pytest.raises(ShapeError, match=r'mask must be given .*; as batch.learns\("reward"\)'):
            replay.update_priorities(batch, td)
        replay.update_priorities(batch, td, learns)
        replay.sample()


REFERENCE = load_script(ROOT / "docs" / "hooks" / "config_reference.py").render()
MOST_LINES = 250


def test_committed_reference_is_current() -> None:
    remedy = "run: python docs/hooks/config_reference.py docs/reference"
    folder = ROOT / "docs" / "reference"
    assert {path.name for path in folder.glob("config*.md")} == set(REFERENCE), remedy
    for name, text in REFERENCE.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name}: {remedy}"
        assert len(text.splitlines()) <= MOST_LINES, name


def test_every_option_is_explained() -> None:
    text = "\n".join(REFERENCE.values())
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.*) \|$", text, re.MULTILINE)
    assert set(options(GearConfig)) < {name for name, *_ in rows}
    assert {"as", "in", "schema", "every", "huge_pages", "shape"} < {name for name, *_ in rows}
    assert all(meaning.endswith(".") for *_, meaning in rows)

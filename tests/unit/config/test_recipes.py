"""Recipes: what they fill in, and what a section overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
from gear_support import run_command

from deepspeed_gear import ConfigError
from deepspeed_gear.cli import preview
from deepspeed_gear.config import parse
from deepspeed_gear.config.recipes import expand
from deepspeed_gear.config.resume_options import shared_options


def grpo(table: Any = None, **options: Any) -> dict[str, Any]:
    return {
        "recipe": "grpo",
        "tables": {"rollouts": {"max_length": 512, **(table or {})}},
        **options,
    }


def test_what_a_section_need_not_give() -> None:
    config = parse(grpo({"prompts": {"data": "prompts", "max_lag": 1}}))
    table = config.tables["rollouts"]
    assert (table.capacity_trajectories, table.capacity_steps) == (3 * 64 * 8, 3 * 64 * 8 * 512)
    written = expand(grpo({"prompts": {"data": "prompts", "max_lag": 1}}))
    assert "recipe" not in written
    assert expand(written) is written
    assert shared_options(parse(written)) == shared_options(config)
    assert parse(config.to_json()) == config, "as ranks compare their sections"


def test_what_a_section_gives_counts() -> None:
    given = {
        "group": {"size": 4, "where": None},
        "schema": {"columns": {"logp": None, "tokens": {"dtype": "uint16"}}},
    }
    found = expand(
        grpo(
            given,
            batch={"groups": 3},
            pack={"tokens": 9000},
            fields={"mask": {"source": "loss_mask"}},
        )
    )
    table = found["tables"]["rollouts"]
    assert table["group"] == {"column": "prompt_id", "size": 4}
    assert table["schema"]["columns"]["tokens"] == {"dtype": "uint16", "role": "token"}
    assert "logp" not in table["schema"]["columns"]
    assert table["capacity_trajectories"] == 4 * 3 * 4
    assert list(found["fields"]) == ["tokens", "logp", "mask"]
    assert ("rollout" in found, found["pack"]) == (False, {"tokens": 9000})


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"recipe": "grpo"}, "gear.tables must be one table with the recipe grpo"),
        ({"recipe": "grpo", "tables": {"rollouts": {}}}, "max_length must be given with a recipe"),
        ({"recipe": "grpo", "tables": {"rollouts": 3}}, "gear.tables must be one table"),
        (grpo({"group": {"size": "8"}}), "group.size"),
        (grpo(rollout={"groups": 0}), "rollout.groups"),
        (grpo(recipe="ppo"), "recipe"),
    ],
)
def test_wrong_sections(section: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(section)


def test_preview_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    lengths = tmp_path / "lengths.txt"
    path.write_text(json.dumps({"gear": grpo()}))
    lengths.write_text("5\n" * 9)
    assert run_command(preview, str(path), "--lengths", str(lengths)) == 0
    text = capsys.readouterr().out
    shown, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    assert shown == expand(grpo())

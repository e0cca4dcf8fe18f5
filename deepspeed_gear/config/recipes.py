"""Recipes: options for a kind of training, which a section overrides one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from deepspeed_gear.errors import ConfigError, known_names

COLUMNS = {  # of language models; those that ingest makes of their rows, too
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt_id": {"dtype": "int64", "rows": "1"},
}
_TABLE = {
    "remove": "fifo",
    "max_times_sampled": 1,
    "writers": 8,
    "group": {"column": "prompt_id", "size": 8, "where": {"reward": {"std": {"min": 1e-6}}}},
    "schema": {"columns": COLUMNS},
}
_SECTION = {
    "sampler": {"kind": "fifo", "unit": "group"},
    "rollout": {"groups": 64},
    "fields": {"tokens": {}, "logp": {}},
}


RECIPES = ("grpo",)


def expand(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section with the options of its `recipe` filled in, and without the recipe.

    Options of the section override those of the recipe. Every reader of a section calls this first;
    a section without a recipe is returned unchanged. The table gets room for the groups that may
    wait and those in training, all with responses of the longest length.
    """
    recipe = section.get("recipe")
    if recipe is None:
        return section
    if recipe not in RECIPES:
        raise ConfigError(
            "gear.recipe", 'must be "grpo" or null', recipe, known_names(str(recipe), RECIPES)
        )
    section = {name: value for name, value in section.items() if name != "recipe"}
    tables = section.get("tables")
    if (
        not isinstance(tables, Mapping)
        or len(tables) != 1
        or not all(isinstance(one, Mapping) for one in tables.values())
    ):
        raise ConfigError(
            "gear.tables",
            f"must be one table with the recipe {recipe}",
            tables,
            'give {"rollouts": {"max_length": ...}}',
        )
    (name,) = tables
    table = _merged(_TABLE, tables[name])
    if "max_length" not in table:
        raise ConfigError(
            f"gear.tables.{name}.max_length",
            "must be given with a recipe: most tokens of a prompt and its response",
            remedy="for example 2048",
        )
    merged = _merged(_SECTION, {**section, "tables": {name: table}})
    if "batch" in section:
        del merged["rollout"]
    size = merged["batch" if "batch" in section else "rollout"]
    # Malformed options stay as they are: the checks of the whole section have the errors.
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        max_lag = (table.get("prompts") or {}).get("max_lag", 2)
        of_group = table["group"].get("max_trajectories") or table["group"]["size"]
        most = (max_lag + 2) * size["groups"] * of_group
        table.setdefault("capacity_trajectories", most)
        table.setdefault("capacity_steps", table["capacity_trajectories"] * table["max_length"])
        merged.setdefault("pack", {"tokens": max(4096, table["max_length"])})
    return merged


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge given options into a base as RFC 7386 does: objects merge, and null removes."""
    merged = {
        name: _merged(value, {}) if isinstance(value, dict) else value
        for name, value in base.items()
    }
    for name, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
        if value is None and name in base:
            del merged[name]
    return merged

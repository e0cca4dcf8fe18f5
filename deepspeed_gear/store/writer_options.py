"""Options that a writer depends on: whether an actor's config matches that of a run.

They are the seed and all of the table's. An actor has no config models (DeepSpeed's), so the store
holds them with defaults, which fill in what an actor leaves out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from deepspeed_gear.schema import Schema

# Options of a table that have options of their own.
OBJECTS = ("rate_limiter", "version", "group", "prompts", "media", "ragged")


def with_schema(options: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return a table's options with its schema, in the same form from every source."""
    entries = [dict(entry) for entry in schema.to_json()["columns"]]
    return {**options, "schema": {"columns": {entry.pop("name"): entry for entry in entries}}}


def options_of(seed: int, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a writer's options, JSON-able, in one form for equal configs."""
    kept = {option: value for option, value in table.items() if option != "data"}
    kept["group"] = _without_nulls(kept.get("group"))
    if isinstance(prompts := kept.get("prompts"), Mapping):
        kept["prompts"] = {**prompts, "where": _without_nulls(prompts.get("where", {}))}
    if isinstance(media := kept.get("media"), Mapping):
        columns = {
            one: {"shape": [], "allow_nan": False, **of} for one, of in media["columns"].items()
        }
        kept["media"] = {**media, "columns": columns}
    found: dict[str, Any] = _plain({"seed": seed, "tables": {name: kept}})
    return found


def filled(
    section: Mapping[str, Any], name: str, defaults: Mapping[str, Any], schema: Schema
) -> dict[str, Any]:
    """Return the options of a `gear` section for a table's writer, filled from a store's defaults.

    Args:
        section: The `gear` section.
        name: Name of the table.
        defaults: Of the store: "seed", "table", and each of `OBJECTS`.
        schema: Of the store.
    Raises:
        SchemaError: The section's own schema is wrong.
    """
    given = dict(section.get("tables", {}).get(name, {}))
    for option in OBJECTS:
        if isinstance(given.get(option), Mapping):
            given[option] = {**defaults[option], **given[option]}
    own = given.get("schema")
    table = with_schema(
        {**defaults["table"], **given}, schema if own is None else Schema.from_json(own)
    )
    return options_of(section.get("seed", defaults["seed"]), name, table)


def digest(options: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON, hex."""
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value in which equal numbers are written alike: 16.0 as 16."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_nulls(value: Any) -> Any:
    """Return nested options without those that are null, which is the default of all of them."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}

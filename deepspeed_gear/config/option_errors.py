"""Errors of single options: unknown, misspelt or missing ones, and wrong values.

Those of pydantic are folded into one with option, rule, value and remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.config.describe_options import (
    alternatives,
    as_model,
    describe,
    kind_of,
    options,
    parts,
)
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError, GearError, known_names, near_name

# Keys that users try and the options they mean; difflib finds misspelt ones, not synonyms.
SYNONYMS = {
    "dtype": "as",
    "type": "kind",
    "columns": "fields",
    "window": "length",
    "context": "length",
    "dataset": "data",
    "num_workers": "threads",
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}


def _locate(model: type[BaseModel], where: Sequence[Any]) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """Follow a pydantic location to the option's annotation, its metadata and its path.

    Members of a location that name a branch of a union are not part of the option's name.
    """
    annotation: Any = model
    metadata: tuple[Any, ...] = ()
    path: list[Any] = []
    for key in where:
        for member in [] if key == "[key]" else alternatives(annotation):
            within = as_model(member)
            if within is not None and key in options(within):
                info = options(within)[key]
                annotation = info.annotation
                metadata = tuple(info.metadata)
            elif get_origin(bare := parts(member)[0]) in (dict, list):
                annotation = get_args(bare)[-1]
                metadata = ()
            else:
                continue
            path.append(key)
            break
    return annotation, metadata, path


def _unknown_option(model: type[BaseModel], error: Mapping[str, Any]) -> ConfigError:
    """Return the error of an option that a model does not have; it names the one that was meant."""
    *where, key = error["loc"]
    annotation, _, path = _locate(model, where)
    models = [model for model in map(as_model, alternatives(annotation)) if model is not None]
    # In a union, the location has the kind that was given; the other members have other kinds.
    others = [model for model in models if kind_of(model) not in (None, *where)]
    models = [model for model in models if model not in others] or models
    known = [name for model in models for name in options(model)]
    kinds = [kind_of(model) for model in others if key in options(model)]
    if kinds:
        return ConfigError(
            dotted("gear", *path, key),
            "is not an option of this kind",
            None,
            f"it belongs to the kind {' or '.join(map(repr, kinds))}",
        )
    wanted = SYNONYMS[key] if SYNONYMS.get(key) in known else str(key)
    return ConfigError(
        dotted("gear", *path, key), "is not an option", None, known_names(wanted, known)
    )


def _option_error(model: type[BaseModel], error: Mapping[str, Any]) -> ConfigError:
    """Turn one of pydantic's errors into an error with the option's rule, value and remedy."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if error["type"] == "extra_forbidden":
        return _unknown_option(model, error)
    annotation, metadata, path = _locate(model, error["loc"])
    correct = _to_correct(model, error["loc"])
    name = dotted("gear", *path)
    admitted = describe(annotation, metadata)
    if isinstance(cause, GearError):  # of a schema
        part = "" if name.endswith(f".{cause.name}") else f": {cause.name}"
        return ConfigError(f"{name}{part}", cause.rule, cause.value, cause.remedy)
    if error["type"] == "missing":
        return ConfigError(name, "must be given", None, f"it is {admitted}")
    if error["type"] == "union_tag_invalid":
        kinds = [
            json.dumps(kind_of(m)) for m in map(as_model, alternatives(annotation)) if m is not None
        ]
        rule = f"must be {', '.join(kinds[:-1])} or {kinds[-1]}"
        kind = _short(error["input"].get("kind"))
        return ConfigError(f"{name}.kind", rule, kind, _hint(kind, rule) or "choose one of them")
    if error["type"] == "gear_conflict":
        context = error["ctx"]
        option = dotted("gear", *path, context["option"]) if context["option"] else name
        return ConfigError(
            option,
            context["rule"].replace("{at}", name),
            _short(context["value"]),
            context["remedy"],
        )
    value = _short(error["input"])
    if value is None:
        return ConfigError(
            name, f"must be {admitted}, got null", None, "leave it out for its default"
        )
    if value == "auto":
        return ConfigError(
            name,
            f"must be {admitted}",
            value,
            "'auto' is not defined for it: give a value, or leave the option out for its default",
        )
    if error["type"] == "gear":
        rule = error["ctx"]["rule"]
        return ConfigError(
            name, rule, value, error["ctx"]["remedy"] or _hint(value, rule) or correct
        )
    return ConfigError(name, f"must be {admitted}", value, _hint(value, admitted) or correct)


def _to_correct(model: type[BaseModel], where: Sequence[Any]) -> str:
    """Return the remedy of a value that fits no other: to correct it, or the option's default."""
    within = as_model(_locate(model, where[:-1])[0]) if where else None
    info = None if within is None else options(within).get(where[-1])
    if info is None or info.is_required() or isinstance(info.default, BaseModel):
        return "correct it"
    return f"correct it, or leave it out for its default, {json.dumps(info.get_default())}"


def _short(value: Any) -> Any:
    """Shorten a value whose text would make the message longer than a readable line."""
    text = repr(value)
    return value if len(text) <= 120 else f"{text[:117]}..."


def _hint(value: Any, admitted: str) -> str:
    """Return the remedy for a string: the admitted string that it resembles, or "no quotes"."""
    if not isinstance(value, str):
        return ""
    try:
        return "" if isinstance(parse_json(value), str) else "write it without quotes"
    except ValueError:
        return near_name(value, re.findall(r'"([^"]+)"', admitted))


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Turn pydantic's list of errors into one error: the first, with the others as its remedy.

    Unknown keys come first, since a misspelt key is often why another one is missing.
    """
    entries = error.errors(include_url=False)
    entries.sort(key=lambda entry: entry["type"] != "extra_forbidden")
    by_name: dict[str, ConfigError] = {}
    for entry in entries:
        one = _option_error(model, entry)
        by_name.setdefault(one.name, one)
    # Every branch of a union reports errors. Where one branch fits but for an inner option, the
    # error of that option is more useful than those of the option as a whole.
    whole = {
        name
        for name in by_name
        if any(other.startswith((f"{name}.", f"{name}[")) for other in by_name)
    }
    first, *rest = (one for name, one in by_name.items() if name not in whole)
    if not rest:
        return first
    also = f"(also: {' | '.join(map(str, rest))})"
    return ConfigError(first.name, first.rule, first.value, f"{first.remedy} {also}".strip())

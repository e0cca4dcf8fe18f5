"""The option reference, generated from the config model: python docs/hooks/config_reference.py
FILE.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.describe_options import (
    alternatives,
    as_model,
    describe,
    kind_of,
    options,
    parts,
)

_HEAD = """# The `gear` section

<!-- Generated: python docs/hooks/config_reference.py docs/reference/config.md -->

Every option of the `"gear"` section of `ds_config.json`, with what it admits and its default. A
misspelt option, a value of another type (a number in quotes is not a number), and options that
contradict one another are refused when the engine is made, on all ranks, with the option's name,
the rule, the value and the remedy. `"auto"` is refused wherever it is not listed.
"""
_PLACEHOLDERS = {"tables": "<name>", "fields": "<name>", "where": "<column>", "columns": "<column>"}


def render() -> str:
    """Return the reference as Markdown."""
    titles: dict[type[BaseModel], str] = {}
    for title, model in _sections("gear", GearConfig):
        titles.setdefault(model, title)
    lines = [_HEAD]
    for model, title in titles.items():
        lines += [f"## `{title}`", "", inspect.cleandoc(model.__doc__ or ""), ""]
        lines += ["| option | admits | default | meaning |", "|---|---|---|---|"]
        lines += [_row(name, info, titles) for name, info in options(model).items()]
        lines.append("")
    return "\n".join(lines)


def _sections(
    title: str, model: type[BaseModel], kind: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Walk the models, each with the name of the option that holds it, and its kind if there are
    several.
    """
    yield f"{title}{kind}", model
    for name, info in options(model).items():
        inside = list(_models_in(name, info.annotation))
        for suffix, inner in inside:
            kind = f": {kind_of(inner)}" if len(inside) > 1 else ""
            yield from _sections(f"{title}.{name}{suffix}", inner, kind)


def _models_in(name: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    for member in alternatives(annotation):
        model = as_model(member)
        (bare, _) = parts(member)
        if model is not None:
            yield "", model
        elif get_origin(bare) is dict:
            inner = as_model(get_args(bare)[1])
            if inner is not None:
                yield f".{_PLACEHOLDERS[name]}", inner


def _row(name: str, info: FieldInfo, titles: dict[type[BaseModel], str]) -> str:
    admits = describe(info.annotation, info.metadata)
    links = []
    for title in (titles[model] for _, model in _models_in(name, info.annotation)):
        # The anchor that Markdown viewers give to a heading.
        anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "_-")
        links.append(f"[`{title}`](#{anchor})")
    if links:
        admits += f" (see {', '.join(links)})"
    default = "required"
    if not info.is_required():
        default = f"`{'{}' if isinstance(info.default, BaseModel) else json.dumps(info.default)}`"
    cells = (f"`{name}`", admits, default, " ".join((info.description or "").split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")

"""The option reference, generated from the config model.

python docs/hooks/config_reference.py docs/reference
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
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
from deepspeed_gear.config.types import GearModel

_GENERATED = "<!-- Generated: python docs/hooks/config_reference.py docs/reference -->"
_HEAD = f"""# The `gear` section

{_GENERATED}

Every option of the `"gear"` section of `ds_config.json`, with what it admits and its default. A
misspelt option, a value of another type (a number in quotes is not a number), and options that
contradict one another are refused when the engine is made, on all ranks, with the option's name,
the rule, the value and the remedy. `"auto"` is refused wherever it is not listed.
"""


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        file: Name of the page in docs/reference.
        title: Heading of the page.
        sections: The sections that it explains, each with those inside it.
    """

    file: str
    title: str
    sections: tuple[str, ...]


_PAGES = (
    Page(
        "config-prompts.md",
        "Groups, prompts and media",
        tuple(f"gear.tables.<name>.{part}" for part in ("version", "group", "prompts", "media")),
    ),
    Page("config-tables.md", "Data sets and tables", ("gear.data", "gear.tables")),
    Page("config-sampler.md", "Samplers", ("gear.sampler",)),
    Page(
        "config-batches.md",
        "Fields of a batch",
        ("gear.fields", "gear.n_step", "gear.advantage", "gear.hindsight"),
    ),
    Page(
        "config-packs.md",
        "Packed batches and their losses",
        ("gear.pack", "gear.batch", "gear.rollout", "gear.loss"),
    ),
    Page(
        "config-ranks.md",
        "Pipelines, shared memory and GPUs",
        ("gear.pipeline", "gear.shared_memory", "gear.transfer"),
    ),
)
_BACK = "All sections: [the `gear` section](config.md#sections).\n"
_INDEX = Page("config.md", "The `gear` section", ("gear",))
_PLACEHOLDERS = {
    "tables": "<name>",
    "fields": "<name>",
    "where": "<column>",
    "columns": "<column>",
    "by_table": "<table>",
}


def render() -> dict[str, str]:
    """Return the pages of the reference as Markdown, by the names of their files."""
    titles: dict[type[BaseModel], str] = {}
    for title, model in _sections("gear", GearConfig):
        titles.setdefault(model, title)
    pages = {page.file: [f"# {page.title}", "", _GENERATED, "", _BACK] for page in _PAGES}
    pages[_INDEX.file] = [_HEAD]
    contents = ["## Sections", "", "| section | options |", "|---|---|"]
    for model, title in titles.items():
        page = _page(title)
        lines = pages[page.file]
        lines += [f"## `{title}`", "", inspect.cleandoc(model.__doc__ or ""), ""]
        lines += ["| option | admits | default | meaning |", "|---|---|---|---|"]
        meanings = _meanings(model)
        for attribute, (name, info) in zip(model.model_fields, options(model).items(), strict=True):
            meaning = info.description or meanings.get(attribute, "")
            lines.append(_row(name, info, meaning, titles, page))
        lines.append("")
        if page != _INDEX:
            names = ", ".join(f"`{name}`" for name in options(model))
            contents.append(f"| {_link(title, _INDEX)} | {names} |")
    pages[_INDEX.file] += [*contents, ""]
    return {file: "\n".join(lines) for file, lines in pages.items()}


def _page(title: str) -> Page:
    """Return the page that explains a section."""
    for page in _PAGES:
        if any(re.match(rf"{re.escape(section)}\b", title) for section in page.sections):
            return page
    if title != "gear":
        raise KeyError(f"no page for {title}; add it to a page of _PAGES")
    return _INDEX


def _link(title: str, source: Page) -> str:
    """Return a link from a page to a section."""
    # The anchor that Markdown viewers give to a heading.
    anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "_-")
    target = _page(title)
    return f"[`{title}`]({'' if target == source else target.file}#{anchor})"


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


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the texts below the attributes of a model, by the names of the attributes."""
    meanings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, GearModel):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for attribute, text in itertools.pairwise(tree.body):
            match attribute, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    meanings[name] = meaning
    return meanings


def _row(
    name: str, info: FieldInfo, meaning: str, titles: dict[type[BaseModel], str], page: Page
) -> str:
    admits = describe(info.annotation, info.metadata)
    links = [_link(titles[model], page) for _, model in _models_in(name, info.annotation)]
    if links:
        admits += f" (see {', '.join(links)})"
    default = "required"
    if not info.is_required():
        default = f"`{'{}' if isinstance(info.default, BaseModel) else json.dumps(info.default)}`"
    cells = (f"`{name}`", admits, default, " ".join(meaning.split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    for file, text in render().items():
        (Path(sys.argv[1]) / file).write_text(text, encoding="utf-8")

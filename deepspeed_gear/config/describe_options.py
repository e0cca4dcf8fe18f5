"""Texts for the values that an option admits, in the option reference and in errors."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed_gear.config.types import Words

_BOUNDS: dict[type, str] = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}


def options(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the options of a model by their names in JSON."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotation into the bare type and its metadata."""
    if get_origin(annotation) is Annotated:
        bare, *metadata = get_args(annotation)
        return bare, tuple(metadata)
    return annotation, ()


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union without null; the annotation itself if it is none."""
    bare, _ = parts(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [member for member in get_args(bare) if member is not type(None)]
    return [annotation]


def as_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation is, or None."""
    bare, _ = parts(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the `kind` that selects a model in a union; None if it has no such option."""
    if "kind" not in model.model_fields:
        return None
    admitted = get_args(model.model_fields["kind"].annotation)
    return admitted[0] if admitted else "module:Class"


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values that a type admits, to complete "must be ..."."""
    bare, inner = parts(annotation)
    notes = (*inner, *metadata)
    words = _words(notes)
    if not words:
        words = [
            text for member in alternatives(bare) for text in _describe_one(*parts(member), notes)
        ]
        words = list(dict.fromkeys(words))
    if type(None) in get_args(bare):
        words.append("null")
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def _words(notes: Sequence[Any]) -> list[str]:
    """Return the outermost words.

    They are the last, since Python puts the metadata of nested Annotated types first.
    """
    words = [note.texts for note in notes if isinstance(note, Words)]
    return list(words[-1]) if words else []


def _describe_one(bare: Any, inner: Sequence[Any], outer: Sequence[Any]) -> list[str]:
    """Describe the values of one member of a union; its own metadata comes before the union's."""
    if words := _words(inner):
        return words
    notes = (*inner, *outer)
    if get_origin(bare) is Literal:
        return [json.dumps(value) for value in get_args(bare)]
    filled = any(isinstance(note, MinLen) for note in notes)
    if get_origin(bare) is list:
        return [f"a {'non-empty ' if filled else ''}list ({describe(get_args(bare)[0])} each)"]
    if bare is bool:
        return ["true", "false"]
    if bare is int:
        return [f"an integer{_interval(notes)}"]
    if bare is float:
        return [f"a finite number{_interval(notes)}"]
    text = "a non-empty object" if filled else "an object"
    if get_origin(bare) is dict:
        value = get_args(bare)[1]
        text += " of objects" if as_model(value) is not None else f" ({describe(value)} each)"
    return [text]


def _interval(notes: Sequence[Any]) -> str:
    """Return " in [low, high)", or " >= low" without an upper bound."""
    bounds = {type(n): _power(getattr(n, _BOUNDS[type(n)])) for n in notes if type(n) in _BOUNDS}
    low = f"[{bounds[Ge]}" if Ge in bounds else f"({bounds[Gt]}" if Gt in bounds else ""
    high = f"{bounds[Le]}]" if Le in bounds else f"{bounds[Lt]})" if Lt in bounds else ""
    if low and not high:
        return f" {'>=' if Ge in bounds else '>'} {low[1:]}"
    return f" in {low}, {high}" if low else ""


def _power(bound: Any) -> str:
    """Write a bound; large powers of two as such: 4611686018427387904 as "2^62"."""
    exponent = int(abs(bound)).bit_length() - 1
    sign = "-" if bound < 0 else ""
    return f"{sign}2^{exponent}" if exponent >= 20 and abs(bound) == 2**exponent else str(bound)

"""Descriptions of the values that an option admits: for error messages and for the option reference."""

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
    """Return the options of a model by the name they have in JSON."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotation into the bare type and its metadata."""
    if get_origin(annotation) is Annotated:
        bare, *metadata = get_args(annotation)
        return bare, tuple(metadata)
    return annotation, ()


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, null left out."""
    bare, _ = parts(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [member for member in get_args(bare) if member is not type(None)]
    return [annotation]


def as_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation stands for, if it stands for one."""
    bare, _ = parts(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the value of `kind` that stands for a member of a union of models; None without that option."""
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
        members = alternatives(bare)
        words = [text for member in members for text in _describe_one(*parts(member), notes)]
        words = list(dict.fromkeys(words))
    if type(None) in get_args(bare):
        words.append("null")
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def _words(notes: Sequence[Any]) -> list[str]:
    """Return the outermost words; Python puts the metadata of nested types first."""
    found = [note.texts for note in notes if isinstance(note, Words)]
    return list(found[-1]) if found else []


def _describe_one(bare: Any, inner: Sequence[Any], outer: Sequence[Any]) -> list[str]:
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
    """Return " in [low, high)", or " >= low" without a high bound."""
    bounds = {type(n): _power(getattr(n, _BOUNDS[type(n)])) for n in notes if type(n) in _BOUNDS}
    low = f"[{bounds[Ge]}" if Ge in bounds else f"({bounds[Gt]}" if Gt in bounds else ""
    high = f"{bounds[Le]}]" if Le in bounds else f"{bounds[Lt]})" if Lt in bounds else ""
    if low and not high:
        return f" {'>=' if Ge in bounds else '>'} {low[1:]}"
    return f" in {low}, {high}" if low else ""


def _power(bound: Any) -> str:
    """Write a large power of two as one."""
    exponent = int(abs(bound)).bit_length() - 1
    sign = "-" if bound < 0 else ""
    return f"{sign}2^{exponent}" if exponent >= 20 and abs(bound) == 2**exponent else str(bound)

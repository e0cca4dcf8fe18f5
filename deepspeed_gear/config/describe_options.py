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


def options(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the options of a model by the name they have in JSON."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotation into the bare type and its metadata."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bare, deeper = parts(inner)
        return bare, (*metadata, *deeper)
    return annotation, ()


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, those of unions within it too, null left out."""
    bare, _ = parts(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        members = [alternatives(member) if _is_union(member) else [member] for member in get_args(bare)]
        return [member for group in members for member in group if member is not type(None)]
    return [annotation]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def as_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation stands for, if it stands for one."""
    bare, _ = parts(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def is_optional(annotation: Any) -> bool:
    """Return whether an annotation admits null."""
    return type(None) in get_args(parts(annotation)[0])


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values that a type admits, to complete "must be ..."."""
    bare, inner = parts(annotation)
    notes = (*inner, *metadata)
    words = _words(notes)
    if not words:
        members = alternatives(bare)
        words = [text for member in members for text in _describe_one(*parts(member), notes)]
        words = list(dict.fromkeys(words))
    if is_optional(bare):
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
    lows = [
        f"[{_power(n.ge)}" if isinstance(n, Ge) else f"({_power(n.gt)}"
        for n in notes
        if isinstance(n, (Ge, Gt))
    ]
    highs = [
        f"{_power(n.le)}]" if isinstance(n, Le) else f"{_power(n.lt)})"
        for n in notes
        if isinstance(n, (Le, Lt))
    ]
    if lows and highs:
        return f" in {lows[0]}, {highs[0]}"
    return "".join(f" {'>=' if low[0] == '[' else '>'} {low[1:]}" for low in lows)


def _power(bound: Any) -> str:
    """Write a large power of two as one."""
    exponent = int(abs(bound)).bit_length() - 1
    sign = "-" if bound < 0 else ""
    return f"{sign}2^{exponent}" if exponent >= 20 and abs(bound) == 2**exponent else str(bound)

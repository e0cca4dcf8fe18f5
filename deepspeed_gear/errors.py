"""Errors that name the thing, the rule, the value and the remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class GearError(Exception):
    """Base of every error that the package raises for users.

    Args:
        name: The faulty thing: an option (`sampler.alpha`), a file, a column, a rank.
        rule: The rule that it breaks ("must be in [0, 1]").
        value: The value that was found; None leaves it out of the message.
        remedy: The action that corrects it.
    """

    def __init__(self, name: str, rule: str, value: Any = None, remedy: str = "") -> None:
        self.name = name
        self.rule = rule
        self.value = value
        self.remedy = remedy
        got = "" if value is None else f", got {value!r}"
        super().__init__(f"{name} {rule}{got}" + (f"; {remedy}" if remedy else ""))

    @classmethod
    @contextmanager
    def on(
        cls,
        name: str,
        rule: str,
        *kinds: type[Exception],
        value: Any = None,
        remedy: str | None = None,
    ) -> Iterator[None]:
        """Raise exceptions of these kinds, as libraries raise them, as this error; itself it stays.

        With a remedy the exception's text is the value, else it is the remedy.
        """
        try:
            yield
        except cls:
            raise
        except kinds as error:
            if remedy is None:
                raise cls(name, rule, value, str(error)) from error
            raise cls(name, rule, str(error), remedy) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by parts, so that an error crosses a process group unchanged."""
        is_plain = isinstance(self.value, (str, int, float, bool, type(None)))
        return type(self), (
            self.name,
            self.rule,
            self.value if is_plain else repr(self.value),
            self.remedy,
        )


class ConfigError(GearError, ValueError):
    """An option of the `gear` section is wrong, alone or together with others."""


class SchemaError(GearError, ValueError):
    """A column or schema is malformed, or two schemas differ."""


class DataError(GearError, ValueError):
    """A data file or trajectory is missing, foreign, truncated, changed or malformed."""


class FieldError(GearError, KeyError):
    """A batch has no field or part of a name."""

    __str__ = Exception.__str__  # KeyError's shows quotes


class ShapeError(GearError, ValueError):
    """An argument of an op has a wrong shape, dtype or device."""


class StoreError(GearError, RuntimeError):
    """A store cannot be created, attached or used."""


class StaleBatchError(StoreError):
    """A batch is used after later batches have overwritten its tensors."""


class StoreFullError(StoreError):
    """A table or the machine's shared memory has no room."""


class StoreGoneError(StoreError):
    """The store is not there, or has just been removed: its run has ended."""


class LeaseExpiredError(StoreError):
    """A lease of a prompt came back meanwhile: nothing was added, and another attempt may have the
    prompt.
    """


class NotReadyError(StoreError):
    """The table's rate limiter admits no sample or addition for now, or nothing can be
    sampled yet.
    """


class EmptyTableError(NotReadyError):
    """Nothing can be sampled from a table that admits writers; later priority updates may change
    that.
    """


class BuildError(GearError, RuntimeError):
    """The native op cannot be built or loaded."""


class PeerError(GearError, RuntimeError):
    """Another rank failed, differs, or does not answer in time."""


class LostNodeError(PeerError):
    """A rank or a node ended, is stopped or cannot be reached: no message reaches it any more."""


class CheckpointError(GearError, RuntimeError):
    """A checkpoint does not fit the replay that loads it."""


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` where the block raises anything: what was made before it must not stay."""
    try:
        yield
    except BaseException:
        undo()
        raise


def near_name(name: str, known: Iterable[str]) -> str:
    """Return the remedy of a misspelt name: "did you mean 'x' or 'y'?"; empty where no known name
    is near.
    """
    near = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the remedy of a name that does not exist: the nearest known one, or the
    list of them.
    """
    return near_name(name, known := list(known)) or f"known are {', '.join(known) or 'none'}"


def show_bytes(count: float) -> str:
    """Return a size as people read it: "0 B", "1.5 GiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.3g} {units[0]}" if count < 1000 else f"{count:.0f} {units[0]}"


_ABSENT = object()


def differences(
    mine: Any, theirs: Any, name: str = "gear", form: str = "{}: {} here, {} there"
) -> list[str]:
    """Return the values of JSON that differ, such as "gear.seed: 0 here, 1 there"."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        inner = {
            key: (mine.get(key, _ABSENT), theirs.get(key, _ABSENT)) for key in {**mine, **theirs}
        }
        return [
            text for key, two in inner.items() for text in differences(*two, f"{name}.{key}", form)
        ]
    shown = [
        "absent" if one is _ABSENT else json.dumps(one, sort_keys=True, default=str)
        for one in (mine, theirs)
    ]
    return [] if shown[0] == shown[1] else [form.format(name, *shown)]


def error_to_json(error: GearError) -> dict[str, Any]:
    """Return an error's kind and parts, JSON-able; `error_from_json` reverses it."""
    _, (name, rule, value, remedy) = error.__reduce__()
    return {
        "kind": type(error).__name__,
        "name": name,
        "rule": rule,
        "value": value,
        "remedy": remedy,
    }


def error_from_json(parts: Mapping[str, Any]) -> GearError:
    """Return an error of its kind; a PeerError for a kind that this version does not have."""
    kind = globals().get(str(parts["kind"]), PeerError)
    known = isinstance(kind, type) and issubclass(kind, GearError)
    return (kind if known else PeerError)(
        *(parts[key] for key in ("name", "rule", "value", "remedy"))
    )


_RAISED = " [raised on "


def relayed(kind: type[GearError], text: str, where: str) -> GearError:
    """Return the error of another rank or node, which may have been relayed before, as it is raised
    here: the cause first, then its path. `where` is the rank or node that it comes from, and what
    it did.
    """
    cause, found, way = text.rpartition(_RAISED)
    if found and way.endswith("]"):
        return kind(cause, f"{_RAISED.lstrip()}{way[:-1]}, relayed by {where}]")
    return kind(text, f"{_RAISED.lstrip()}{where}]")

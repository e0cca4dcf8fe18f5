"""Errors that name the faulty thing, the rule it breaks, the value and the remedy."""

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
        """Raise foreign exceptions of the block as this error; errors of this class pass unchanged.

        With a `remedy`, the exception's text is the value: "config must be JSON, got 'Expecting
        ...'; correct it". With a `value` too, the text stands in front of the remedy; without a
        remedy, it stands in its place.
        """
        try:
            yield
        except cls:
            raise
        except kinds as error:
            if remedy is None:
                raise cls(name, rule, value, str(error)) from error
            if value is not None:
                raise cls(name, rule, value, f"{error}; {remedy}") from error
            raise cls(name, rule, str(error), remedy) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the four parts, so that an error crosses process boundaries unchanged."""
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
    """A batch has no field, or no part, of the name that was asked for."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


class ShapeError(GearError, ValueError):
    """An argument of an op has a wrong shape, dtype or device."""


class StoreError(GearError, RuntimeError):
    """A store cannot be created, attached or used."""


class StaleBatchError(StoreError):
    """A batch was used after later batches had overwritten its tensors."""


class StoreFullError(StoreError):
    """A table or the machine's shared memory has no room."""


class StoreGoneError(StoreError):
    """The store does not exist, or has just been removed because its run ended."""


class LeaseExpiredError(StoreError):
    """A lease ended before its group was committed; nothing was added.

    Another rollout worker may have a lease of the same prompt.
    """


class NotReadyError(StoreError):
    """The rate limiter admits no sample or addition for now, or no item can be sampled yet."""


class EmptyTableError(NotReadyError):
    """No item of a table that admits writers can be sampled.

    Writers or priority updates may change that, so the call may succeed later.
    """


class BuildError(GearError, RuntimeError):
    """The native op cannot be built or loaded."""


class PeerError(GearError, RuntimeError):
    """Another rank failed, has another config or code, or did not answer in time."""


class LostNodeError(PeerError):
    """A rank or node ended, is stopped or cannot be reached: no collective can complete."""


class CheckpointError(GearError, RuntimeError):
    """A checkpoint does not fit the replay that loads it."""


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` and raise again if the block raises, so that nothing half-made remains."""
    try:
        yield
    except BaseException:
        undo()
        raise


def near_name(name: str, known: Iterable[str]) -> str:
    """Return the remedy of a misspelt name, "did you mean 'x' or 'y'?"; "" if none is similar."""
    near = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the remedy of an unknown name: the similar known names, or else all of them."""
    known = list(known)
    return near_name(name, known) or f"known are {', '.join(known) or 'none'}"


def show_bytes(count: float) -> str:
    """Format a size for people: "0 B", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    # Three digits; 1000 to 1023 have four, which "g" would write as 1e+03.
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


_ABSENT = object()


def differences(
    mine: Any, theirs: Any, name: str = "gear", form: str = "{}: {} here, {} there"
) -> list[str]:
    """List where two JSON values differ, such as "gear.seed: 0 here, 1 there".

    Args:
        name: Name of both values; a key below it is appended after a dot.
        form: Text of one difference, with places for the name and the two values.
    """
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
    """Return an error's kind and parts as JSON values; `error_from_json` reverses it."""
    _, (name, rule, value, remedy) = error.__reduce__()
    return {
        "kind": type(error).__name__,
        "name": name,
        "rule": rule,
        "value": value,
        "remedy": remedy,
    }


def error_from_json(parts: Mapping[str, Any]) -> GearError:
    """Rebuild an error; a kind that this version does not have becomes a PeerError."""
    kind = globals().get(str(parts["kind"]), PeerError)
    is_known = isinstance(kind, type) and issubclass(kind, GearError)
    cls: type[GearError] = kind if is_known else PeerError
    return cls(parts["name"], parts["rule"], parts["value"], parts["remedy"])


_RAISED = " [raised on "


def relayed(kind: type[GearError], text: str, where: str) -> GearError:
    """Return the error to raise here for a failure on another rank or node: cause first, then path.

        name rule, got value [raised on rank 3, relayed by rank 0 of node 1]

    Args:
        kind: Type of the error.
        text: The failure as it was received; it has a path already if it was relayed before.
        where: The rank or node that it was received from.
    """
    cause, mark, path = text.rpartition(_RAISED)
    if mark and path.endswith("]"):
        return kind(cause, f"{_RAISED.lstrip()}{path[:-1]}, relayed by {where}]")
    return kind(text, f"{_RAISED.lstrip()}{where}]")

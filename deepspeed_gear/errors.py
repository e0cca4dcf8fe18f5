"""Errors of the package. Each one names what is wrong, the rule, the value, and the remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class GearError(Exception):
    """Base class of the errors that the package raises for users.

    The message is "name rule, got value; remedy".

    Args:
        name: What is wrong: an option (`sampler.alpha`), a file, a column or a rank.
        rule: The rule that it breaks ("must be in [0, 1]").
        value: The value that it has; None leaves it out of the message.
        remedy: How to correct it; empty: the message has no remedy.
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
        """Raise exceptions of the block as this error; errors of this class pass unchanged.

        The text of the exception becomes a part of the message:

        - with only a `remedy`, the value: "config must be JSON, got 'Expecting ...'; correct it";
        - with a `remedy` and a `value`, the beginning of the remedy;
        - without a `remedy`, the remedy.

        Args:
            name: As in the class.
            rule: As in the class.
            *kinds: Types of the exceptions to convert.
            value: As in the class.
            remedy: As in the class.
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
        """Pickle the four parts, so that an error can be sent to another process unchanged."""
        is_plain = isinstance(self.value, (str, int, float, bool, type(None)))
        return type(self), (
            self.name,
            self.rule,
            self.value if is_plain else repr(self.value),
            self.remedy,
        )


class ConfigError(GearError, ValueError):
    """An option of the `gear` section is wrong, by itself or in combination with others."""


class SchemaError(GearError, ValueError):
    """A column or a schema is malformed, or two schemas differ."""


class DataError(GearError, ValueError):
    """A data file or trajectory is missing, malformed, truncated, changed or of another format."""


class FieldError(GearError, KeyError):
    """A batch has no field, or a field has no part, with the requested name."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


class ShapeError(GearError, ValueError):
    """An argument of an op has the wrong shape, dtype or device."""


class StoreError(GearError, RuntimeError):
    """A store cannot be created, attached or used."""


class StaleBatchError(StoreError):
    """A batch was used after later batches had overwritten its tensors."""


class StoreFullError(StoreError):
    """A table, or the shared memory of the machine, has no free space."""


class StoreGoneError(StoreError):
    """The store does not exist, or was removed because its run ended."""


class LeaseExpiredError(StoreError):
    """A lease ended before its group was committed; nothing was added to the table.

    Another rollout worker may have leased the same prompt since.
    """


class NotReadyError(StoreError):
    """The rate limiter blocks samples or additions for now, or no item can be sampled yet."""


class EmptyTableError(NotReadyError):
    """A table that takes writers has no item that can be sampled.

    The call may succeed later, after additions or priority updates.
    """


class BuildError(GearError, RuntimeError):
    """The native ops cannot be built or loaded."""


class KernelError(GearError, RuntimeError):
    """A kernel on a GPU has found a wrong index, and has ended the process's CUDA context."""


class PeerError(GearError, RuntimeError):
    """Another rank failed, did not answer in time, or has a different config or code."""


class LostNodeError(PeerError):
    """A rank or node has ended, is stopped or cannot be reached: collectives cannot complete."""


class CheckpointError(GearError, RuntimeError):
    """A checkpoint does not match the replay that loads it."""


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises, so that nothing incomplete remains, and raise again."""
    try:
        yield
    except BaseException:
        undo()
        raise


def near_name(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x' or 'y'?" for a misspelt name; "" if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the similar known names, or all if none is."""
    known = list(known)
    return near_name(name, known) or f"known are {', '.join(known) or 'none'}"


def show_bytes(count: float) -> str:
    """Return a number of bytes as text: "0 B", "1.5 GiB"."""
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
        mine: The value on this side.
        theirs: The value on the other side.
        name: Name of both values; keys of nested mappings are appended after a dot.
        form: Format of one difference, with fields for the name and the two values.

    Returns:
        One text for each difference.
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
    """Return the kind and the parts of an error as JSON values, for `error_from_json`."""
    _, (name, rule, value, remedy) = error.__reduce__()
    return {
        "kind": type(error).__name__,
        "name": name,
        "rule": rule,
        "value": value,
        "remedy": remedy,
    }


def error_from_json(parts: Mapping[str, Any]) -> GearError:
    """Return the error of `error_to_json`; an unknown kind becomes a PeerError."""
    kind = globals().get(str(parts["kind"]), PeerError)
    is_known = isinstance(kind, type) and issubclass(kind, GearError)
    cls: type[GearError] = kind if is_known else PeerError
    return cls(parts["name"], parts["rule"], parts["value"], parts["remedy"])


_RAISED = " [raised on "


def relayed(kind: type[GearError], text: str, where: str) -> GearError:
    """Return the error to raise here for a failure on another rank or node.

    Its text has the cause first, then the path by which it arrived:

        name rule, got value [raised on rank 3, relayed by rank 0 of node 1]

    Args:
        kind: Type of the error.
        text: Text of the failure as received; if it was relayed before, it contains a path.
        where: The rank or node from which it was received.
    """
    cause, mark, path = text.rpartition(_RAISED)
    if mark and path.endswith("]"):
        return kind(cause, f"{_RAISED.lstrip()}{path[:-1]}, relayed by {where}]")
    return kind(text, f"{_RAISED.lstrip()}{where}]")

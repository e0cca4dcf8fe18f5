"""Expansion of braces in names, as bash and the package braceexpand of WebDataset do it."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

from deepspeed_gear.errors import DataError

#: The rule that a file breaks which is not there.
EXISTS = "must exist"
_SHOWN = 8  # names in an error
_MOST_NAMES = 100_000
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_CHARACTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")
_ESCAPED = re.compile(r"\\(.)")
_FORMS = (
    "write a list {a,b} or a range {000..012}, and a backslash before a brace of the name itself"
)


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern, in its order.

    - `{000..012}` is a range, with as many digits as the longer end where one begins with 0;
      `{0..10..5}` has the step 5, `{a..e}` are letters, and `{3..1}` counts down.
    - `{a,b}` is a list, of which an item may be empty or a pattern.
    - Braces that are neither stay as they are. A backslash makes the next character an ordinary
      one.

    Raises:
        DataError: Braces are not balanced, there is nothing to expand, or a name occurs twice.
    """
    names = _expanded(pattern, pattern)
    if names == [_ESCAPED.sub(r"\1", pattern)]:
        raise DataError(pattern, "must have a list or a range in its braces", None, _FORMS)
    seen = set[str]()
    for name in names:
        if name in seen:
            raise DataError(pattern, "must give every name once", name, "correct the pattern")
        seen.add(name)
    return names


def wildcards(pattern: str) -> str | None:
    """Return a pattern with `*` for its braces; None if braces hold a slash, which `*` is not."""
    parts = []
    start = 0
    for low, high in _braces(pattern, pattern):
        if "/" in pattern[low:high]:
            return None
        parts.append(pattern[start:low])
        start = high + 1
    return _ESCAPED.sub(r"\1", "*".join([*parts, pattern[start:]]))


def check_none_missing(names: Sequence[str]) -> None:
    """Raise DataError if files of a pattern are missing."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(names[:_SHOWN]) + more
        raise DataError(shown, EXISTS, None, "copy what is missing, or correct the pattern")


def _expanded(pattern: str, part: str) -> list[str]:
    """Return the names of a part of a pattern."""
    bounds = next(_braces(pattern, part), None)
    if bounds is None:
        return [_ESCAPED.sub(r"\1", part)]
    low, high = bounds
    head = _ESCAPED.sub(r"\1", part[:low])
    items = _items(pattern, part[low + 1 : high])
    tails = _expanded(pattern, part[high + 1 :])
    if len(items) * len(tails) > _MOST_NAMES:
        number = f"at most {_MOST_NAMES:,} names"
        raise DataError(pattern, f"must stand for {number}", None, "give the folder of the files")
    return [f"{head}{item}{tail}" for item in items for tail in tails]


def _braces(pattern: str, part: str) -> Iterator[tuple[int, int]]:
    """Yield the places of each pair of braces that is in no other pair."""
    depth = 0
    low = 0
    for place, character in _characters(part):
        if character == "{":
            low = low if depth else place
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield low, place
        if depth < 0:
            break
    if depth:
        raise DataError(pattern, "must have a closing brace for each opening one", None, _FORMS)


def _items(pattern: str, inner: str) -> list[str]:
    """Return what a pair of braces stands for."""
    if match := _NUMBERS.fullmatch(inner):
        ends = match.group(1, 2)
        is_padded = any(end not in ("0", "-0") and end.startswith(("0", "-0")) for end in ends)
        width = max(map(len, ends)) if is_padded else 0
        numbers = _range(pattern, int(ends[0]), int(ends[1]), match[3])
        return [f"{number:0{width}d}" for number in numbers]
    if match := _CHARACTERS.fullmatch(inner):
        first, last = map(_LETTERS.index, match.group(1, 2))
        return [_LETTERS[number] for number in _range(pattern, first, last, match[3])]
    items = _divided(inner)
    if len(items) == 1:
        return [f"{{{name}}}" for name in _expanded(pattern, inner)]
    return [name for item in items for name in _expanded(pattern, item)]


def _range(pattern: str, first: int, last: int, step: str | None) -> range:
    size = int(step or 1) or 1
    numbers = range(first, last + 1, size) if first < last else range(first, last - 1, -size)
    if len(numbers) > _MOST_NAMES:
        raise DataError(
            pattern,
            f"must stand for at most {_MOST_NAMES:,} names",
            len(numbers),
            "give the folder of the files",
        )
    return numbers


def _divided(inner: str) -> list[str]:
    """Return the items of a list: the parts between commas that are in no inner braces."""
    depth = 0
    start = 0
    items = []
    for place, character in _characters(inner):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            items.append(inner[start:place])
            start = place + 1
    return [*items, inner[start:]]


def _characters(part: str) -> Iterator[tuple[int, str]]:
    """Yield the place and character of each one that no backslash makes an ordinary one."""
    is_escaped = False
    for place, character in enumerate(part):
        if not is_escaped and character != "\\":
            yield place, character
        is_escaped = character == "\\" and not is_escaped

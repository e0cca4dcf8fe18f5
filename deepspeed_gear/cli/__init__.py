"""The `gear` command: one module per subcommand, each with `OPTIONS`, `run` and its help."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_gear.errors import ConfigError

T = TypeVar("T")
Options = Mapping[str, str | tuple[str, dict[str, Any]]]


def add_options(parser: ArgumentParser, options: Options) -> None:
    """Declare the arguments and options of a subcommand.

    Args:
        options: For each of "DEST", "--timeout S" or "--quiet" (an argument, an option with a
            value, a flag), its help, or its help and keywords of `add_argument`.
    """
    for form, given in options.items():
        text, more = (given, {}) if isinstance(given, str) else given
        name, _, metavar = form.partition(" ")
        if not name.startswith("-"):
            name, metavar = name.lower(), name
        kind = {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(name, help=text, **{**kind, **more})


def grid_of(heads: list[str], rows: list[list[str]], num_left: int = 1) -> list[str]:
    """Align a table: the first `num_left` columns to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    form = "  ".join(
        f"{{:{'<' if i < num_left else '>'}{width}}}" for i, width in enumerate(widths)
    )
    return [form.format(*row).rstrip() for row in [heads, ["-" * width for width in widths], *rows]]


def grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group things with equal keys, in the order of the first thing of each group."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


def listed(options: list[str] | None) -> list[str] | None:
    """Split a repeatable option at its commas; None where it was not given."""
    if options is None:
        return None
    return [part.strip() for option in options for part in option.split(",") if part.strip()]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once: a reader sees the earlier one or all of the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_one_source(name: str, folder: object, living: object, command: str) -> None:
    """Raise ConfigError unless a command has either its folder or `--living`.

    Args:
        name: Name of the folder's argument.
        folder: Its value; None: it is not given.
        living: The value of `--living`; None: it is not given.
        command: The command, whose help the error names.
    """
    if (folder is None) == (living is None):
        both = "and --living must not both be given"
        rule = "or --living must be given" if folder is None else both
        raise ConfigError(name, rule, folder, f"{command} --help shows both")

"""What the adapters of TRL and OpenRLHF share: tested versions, limits and derived options."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from deepspeed_gear.errors import ConfigError

#: The table of the responses.
TABLE = "rollouts"


class Limit(NamedTuple):
    """Values of a framework's option that a table and packs support.

    Attributes:
        accepts: Whether a value is supported.
        rule: The rule, as in an error.
        remedy: How to correct it.
    """

    accepts: Callable[[Any], bool]
    rule: str
    remedy: str

    def check(self, name: str, value: object) -> None:
        """Raise a ConfigError, with the option's name, for a value that is not supported."""
        if not self.accepts(value):
            raise ConfigError(name, self.rule, value, self.remedy)


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a `Limit.accepts` of some values."""
    return lambda value: value in values


def check_version(package: str, versions: str, remedy: str) -> None:
    """Raise a ConfigError unless an installed framework has a version that was tested.

    Raises:
        PackageNotFoundError: An ImportError: it is not installed.
    """
    version = importlib.metadata.version(package)
    if not SpecifierSet(versions).contains(version, prereleases=True):
        raise ConfigError(package, f"must have a version {versions}", version, remedy)


def follow(source: str, section: dict[str, Any], where: str, values: Mapping[str, Any]) -> None:
    """Set options of a config in place that follow from a framework's.

    Args:
        source: What they follow from, for the error.
        section: The part of the config.
        where: Its name, which ends in a dot.
        values: The options.

    Raises:
        ConfigError: The section has another value of one.
    """
    for name, value in values.items():
        if section.setdefault(name, value) != value:
            remedy = f"leave it out: it follows from {source}"
            raise ConfigError(f"{where}{name}", f"must be {value!r}", section[name], remedy)

"""Rules of options: a part of the config, whose methods raise ConfigError for a broken rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel

from deepspeed_gear.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """A part of the config and its name; each method raises ConfigError unless its rule holds.

    `part.leave_out("align", "without gear.fields.x.length", "drop it")` raises
    "gear.fields.x.align must not be given without gear.fields.x.length, got 'left'; drop it".
    """

    at: str
    options: BaseModel

    def leave_out(self, names: str, when: str, remedy: str = "leave it out") -> None:
        """Require that options have their defaults.

        Args:
            names: The options, separated by spaces.
            when: The condition, as the end of the rule.
        """
        for name in names.split():
            value, default = self._value_and_default(name)
            if value != default:
                self.refuse(name, f"must not be given {when}", remedy)

    def need(self, name: str, when: str, remedy: str) -> None:
        """Require that an option is not null."""
        if self._value_and_default(name)[0] is None:
            self.refuse(name, f"must be given {when}", remedy)

    def admit(self, name: str, values: Sequence[Any], when: str, remedy: str = "") -> None:
        """Require that an option has one of some values, which the rule lists.

        Args:
            remedy: "" is to set the first of the values.
        """
        if self._value_and_default(name)[0] not in values:
            admitted = [json.dumps(value) for value in values]
            remedy = remedy or f"set it to {admitted[0]}"
            self.refuse(name, f"must be {' or '.join(admitted)} {when}", remedy)

    def at_most(
        self, name: str, limit: int | None, rule: str, remedy: str = "choose a smaller number"
    ) -> None:
        """Require that an option is null or at most `limit`.

        Args:
            limit: The limit, which the rule shows; None is no limit.
            rule: What the limit is, after "must be at most".
        """
        value = self._value_and_default(name)[0]
        if value is not None and limit is not None and value > limit:
            self.refuse(name, f"must be at most {rule} ({limit})", remedy)

    def require(self, holds: bool, name: str, rule: str, remedy: str) -> None:
        """Require that a condition on an option holds, which the rule states."""
        if not holds:
            self.refuse(name, rule, remedy)

    def refuse(self, name: str, rule: str, remedy: str) -> NoReturn:
        """Raise ConfigError for an option's value; a value that is itself a part is not shown."""
        value = self._value_and_default(name)[0]
        if isinstance(value, dict) and any(
            isinstance(inner, BaseModel) for inner in value.values()
        ):
            value = [*value]
        shown = None if isinstance(value, BaseModel) else value
        raise ConfigError(f"{self.at}.{name}", rule, shown, remedy)

    def _value_and_default(self, name: str) -> tuple[Any, Any]:
        fields = type(self.options).model_fields
        key = next(key for key, info in fields.items() if (info.alias or key) == name)
        return getattr(self.options, key), fields[key].default

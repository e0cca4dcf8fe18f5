"""Checks of hindsight relabelling: of the options alone, and against the columns of a table."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_gear.config.cross_checks import dotted
from deepspeed_gear.config.options import FieldConfig, GearOptions
from deepspeed_gear.config.resolved_field import ResolvedField
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import Column, Schema

EXAMPLE = '"goal": {"column": "desired_goal", "hindsight": "achieved_goal"}'


def check_hindsight(config: GearOptions) -> None:
    """Reject options that contradict hindsight relabelling.

    Raises:
        ConfigError: A goal without `gear.hindsight` or the reverse, or an option that excludes it.
    """
    goals = {name: field for name, field in config.fields.items() if field.hindsight is not None}
    for name, field in goals.items():
        at = dotted("gear", "fields", name)
        if config.hindsight is None:
            rule, remedy = "must not be given without gear.hindsight", 'give "hindsight": {}'
            raise ConfigError(f"{at}.hindsight", rule, field.hindsight, remedy)
        if field.length is not None:
            remedy = "a sample has one goal: expand it over the steps in the model"
            raise ConfigError(f"{at}.length", "must not be given for a goal", field.length, remedy)
        if field.derived is not None:
            raise ConfigError(f"{at}.derived", "must not be given for a goal", field.derived, "drop one")
    if config.hindsight is None:
        return
    if not goals:
        rule = "must have a field with the option hindsight"
        raise ConfigError("gear.hindsight", rule, None, EXAMPLE)
    if config.n_step is not None:
        rule = "must not be given together with gear.n_step"
        remedy = "n-step returns are sums of the rewards for the goal that was pursued"
        raise ConfigError("gear.hindsight", rule, None, remedy)


def column_of(at: str, field: FieldConfig, column: Column | None, schema: Schema) -> Column | None:
    """Return the column of a goal that was achieved; None for a field that is no goal.

    Raises:
        ConfigError: It is missing, has no row per step, or other elements than the goal.
    """
    if field.hindsight is None:
        return None
    option = f"{at}.hindsight"
    if field.hindsight not in schema:
        known = f"the table has {', '.join(schema.names)}"
        raise ConfigError(option, "must be a column of the table", field.hindsight, known)
    achieved = schema[field.hindsight]
    if achieved.rows == "1":
        raise ConfigError(option, "must be a column with a row per step", field.hindsight)
    if column is None:
        raise ConfigError(at, "must be a stored column to be a goal", None, EXAMPLE)
    if (achieved.dtype, achieved.shape) != (column.dtype, column.shape):
        raise ConfigError(
            option,
            f"must have dtype and shape of column {column.name} ({column.dtype}{list(column.shape)})",
            f"{achieved.name}: {achieved.dtype}{list(achieved.shape)}",
        )
    return achieved


def check_fields(config: GearOptions, fields: Sequence[ResolvedField]) -> None:
    """Reject fields that do not agree under hindsight relabelling.

    Raises:
        ConfigError: Achieved goals have different rows, a field sums rewards, or no single one holds them.
    """
    if config.hindsight is None:
        return
    goals = [field for field in fields if field.hindsight is not None]
    first = goals[0].hindsight
    for field in goals:
        assert first is not None
        assert field.hindsight is not None
        if field.hindsight.rows != first.rows:
            option = f"{dotted('gear', 'fields', field.name)}.hindsight"
            rule = f"must have as many rows as column {first.name} ({first.rows})"
            raise ConfigError(option, rule, f"{field.hindsight.name}: {field.hindsight.rows}")
    for field in fields:
        if field.derived == "return_to_go":
            rule, remedy = "must not be given with gear.hindsight", "it sums rewards for the goal pursued"
            raise ConfigError(dotted("gear", "fields", field.name), rule, None, remedy)
    if config.hindsight.reward is not None:
        reward_field(fields)


def reward_field(fields: Sequence[ResolvedField]) -> ResolvedField:
    """Return the field whose values a program's reward replaces.

    Raises:
        ConfigError: There is none, or more than one.
    """
    found = [field for field in fields if field.column is not None and field.column.role == "reward"]
    if len(found) != 1:
        rule = "must have one field of the reward column to replace"
        names = ", ".join(field.name for field in found) or "none"
        raise ConfigError("gear.hindsight.reward", rule, names)
    return found[0]

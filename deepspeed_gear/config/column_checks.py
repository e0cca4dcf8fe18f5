"""Checks of columns that options name: groups, prompts, eviction, versions, samplers, `where`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepspeed_gear.config.device_checks import check_device_columns
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.sampler_options import WhereConfig
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import TOKEN_DTYPES, Column, Schema

_ONE_NUMBER = "must name a column with one number per trajectory"


def _scalars(schema: Schema) -> list[Column]:
    return [c for c in schema.trajectory_columns if not (c.shape or c.is_ragged)]


def need_roles(at: str, roles: Sequence[str], schema: Schema) -> None:
    """Raise ConfigError for a role that no column has."""
    for role in roles:
        if schema.role(role) is None:
            raise ConfigError(
                at, f"must have a {role} column in the sampled table", None, known_columns(schema)
            )


def check_listed(at: str, rule: str, name: str, columns: Iterable[Column]) -> None:
    """Raise ConfigError unless the option `at` names one of some columns."""
    known = [column.name for column in columns]
    if name not in known:
        raise ConfigError(at, rule, name, f"there are: {', '.join(known) or 'none'}")


def check_table_columns(config: GearOptions, name: str, schema: Schema) -> None:
    """Reject options of a table that name a column which is missing or does not suit them."""
    at = dotted("gear", "tables", name)
    table = config.resolved_tables[name]
    if table.placement == "device":
        check_device_columns(at, schema)
    numbers = [c for c in _scalars(schema) if c.dtype != "bool"]
    if (group := table.group) is not None:
        integers = [c for c in numbers if not c.is_floating and not c.late]
        rule = "must name a column with one integer per trajectory, which is not late"
        check_listed(f"{at}.group.column", rule, group.column, integers)
        if group.member is not None:
            check_listed(f"{at}.group.member", rule, group.member, integers)
        for name in group.needs:
            check_listed(f"{at}.group.needs", "must name late columns", name, schema.late_columns)
        for name in group.where:
            check_listed(f"{at}.group.where.{name}", _ONE_NUMBER, name, _scalars(schema))
    if table.prompts is not None and table.prompts.column is not None:
        taken = () if group is None else (group.column, group.member)
        free = [c for c in numbers if c.dtype == "int64" and not c.late and c.name not in taken]
        rule = "must name a column of one int64 per trajectory, which is not late and not a group's"
        check_listed(f"{at}.prompts.column", rule, table.prompts.column, free)
    if table.prompts is not None:
        rule = "must name columns of steps that have no role token, loss_mask or media"
        free = [
            c for c in schema if c.rows != "1" and c.role not in ("token", "loss_mask", "media")
        ]
        for name in table.prompts.shared_columns:
            check_listed(f"{at}.prompts.shared_columns", rule, name, free)
    if table.keep_best is not None:
        check_listed(f"{at}.keep_best", _ONE_NUMBER, table.keep_best, numbers)
    if table.version is not None:
        versions = [c for c in schema.step_columns if not c.shape and c.dtype in TOKEN_DTYPES]
        check_listed(
            f"{at}.version.column",
            "must name a column with one integer per step",
            table.version.column,
            versions,
        )


def check_sampler_columns(config: GearOptions, table: str, schema: Schema) -> None:
    """Raise ConfigError for a column of a table's sampler that is missing or does not suit it."""
    sampler = config.sampler_of(table)
    for column, where in sampler.where.items():
        check_where(dotted("gear", "sampler", "where", column), column, where, schema)
    for option, column in sampler.columns.items():
        numbers = [c for c in _scalars(schema) if c.dtype != "bool"]
        check_listed(f"gear.sampler.{option}", _ONE_NUMBER, column, numbers)


def check_where(at: str, name: str, where: WhereConfig, schema: Schema) -> None:
    """Raise a ConfigError unless the condition `at` suits the column that it names."""
    check_listed(at, _ONE_NUMBER, name, _scalars(schema))
    column = schema[name]
    if column.dtype == "bool" and where.in_ is None:
        raise ConfigError(at, "must use in, as the column is bool", None, 'write {"in": [true]}')
    for value in where.in_ or ():
        if isinstance(value, bool) and column.dtype != "bool":
            raise ConfigError(
                f"{at}.in",
                f"must hold numbers, as the column is {column.dtype}",
                value,
                "write 0 or 1",
            )
        if not column.is_floating and value != int(value):
            raise ConfigError(
                f"{at}.in",
                f"must hold integers, as the column is {column.dtype}",
                value,
                "no row equals it",
            )


def known_columns(schema: Schema) -> str:
    """Return the remedy for a column that a table lacks."""
    return f"the table has {', '.join(schema.names)}"

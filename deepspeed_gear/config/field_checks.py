"""Checks of fields against the schema of the table that they are read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_gear.config import hindsight_checks
from deepspeed_gear.config.cross_checks import N_STEP_NAMES, check_field_name, check_nesting, dotted
from deepspeed_gear.config.dtypes import check_dtype, check_pad
from deepspeed_gear.config.group_checks import check_group_columns
from deepspeed_gear.config.options import FieldConfig, GearOptions
from deepspeed_gear.config.resolved_field import ResolvedField
from deepspeed_gear.config.sampler_options import WhereConfig
from deepspeed_gear.errors import ConfigError, known_names, near_name
from deepspeed_gear.schema import Column, Schema

DERIVED = {"return_to_go": "float32", "timestep": "int64", "position": "int64"}
SAMPLE_NAMES = (  # of any batch
    "is_weight",
    "trajectory_id",
    "anchor",
    "sample_number",
    "sample_index",
    "probability",
    "epoch",
    "valid",
    "relabelled",
    "goal_step",
)
VERSION_DTYPES = ("uint8", "int8", "int16", "int32", "int64")
MASK, LEARNS = "mask.", "learns."  # before the name of a field: its mask, and which of its steps learn


def check_against(
    config: GearOptions,
    schemas: Mapping[str, Schema],
    statistics_available: Collection[str] | bool | None = None,
) -> list[ResolvedField]:
    """Check a config against the columns of its tables.

    Args:
        config: The config.
        schemas: Schema of each table by name.
        statistics_available: Columns of the sampled table that have statistics; True for all, False for none,
            None for all where the table holds a data set.
    Returns:
        The fields of a batch in the order of the config, or of the schema where the config names none; then
        without opaque columns.
    Raises:
        ConfigError: An option asks for a column that is missing or does not suit it.
    """
    for name in config.resolved_tables:
        if name not in schemas:
            raise ConfigError(
                dotted("gear", "tables", name),
                "must have a schema",
                None,
                "give it here or to Replay(schemas=...)",
            )
    if statistics_available is None:
        statistics_available = any(config.resolved_tables[t].data is not None for t in config.sampled_tables)
    for name in config.resolved_tables:
        _check_columns(config, name, schemas[name])
    found = [_check_table(config, schemas[table], statistics_available) for table in config.sampled_tables]
    if config.pack is not None:
        for table in config.sampled_tables[1:]:
            _check_packed(config, config.sampled_tables[0], table, schemas)
    for table, resolved in zip(config.sampled_tables, found, strict=True):
        _check_same(config.sampled_tables[0], found[0], table, resolved)
    _check_pipeline(config, [field.name for field in found[0] if not field.is_opaque])
    return found[0]


def _check_columns(config: GearOptions, name: str, schema: Schema) -> None:
    """Reject columns that do not suit the options of their table."""
    at, table = dotted("gear", "tables", name), config.resolved_tables[name]
    opaque = [column for column in schema if column.is_opaque]
    if opaque and table.placement == "device":
        rule = f"must not have a column of dtype {opaque[0].dtype} on devices"
        raise ConfigError(at, rule, opaque[0].name, 'give the table "placement": "host"')
    if table.group is not None:
        check_group_columns(table.group, f"{at}.group", schema)
    if table.keep_best is not None:
        _check_number(table.keep_best, f"{at}.keep_best", schema)
    if table.version is not None:
        versions = [c.name for c in schema.step_columns if not c.shape and c.dtype in VERSION_DTYPES]
        if table.version.column not in versions:
            rule, remedy = "must name a column with one integer per step", f"there are: {versions or 'none'}"
            raise ConfigError(f"{at}.version.column", rule, table.version.column, remedy)


def _check_pipeline(config: GearOptions, fields: list[str]) -> None:
    """Reject names in `gear.pipeline` that no batch has."""
    if config.pipeline is None:
        return
    more = N_STEP_NAMES if config.n_step is not None else ()
    known = [*fields, *more, *SAMPLE_NAMES]
    for end in ("inputs", "labels"):
        names: list[str] = getattr(config.pipeline, end)
        for index, name in enumerate(names):
            if name not in known and name.removeprefix(MASK).removeprefix(LEARNS) not in fields:
                raise ConfigError(
                    f"gear.pipeline.{end}[{index}]",
                    "must name a field, its mask, or what every batch has",
                    name,
                    known_names(name, [*known, f"{MASK}<field>"]),
                )


def _check_same(first: str, fields: list[ResolvedField], other: str, others: list[ResolvedField]) -> None:
    """Reject tables whose samples cannot stand in one batch."""
    for a, b in zip(fields, others, strict=False):
        if a != b:
            raise ConfigError(
                dotted("gear", "fields", a.name),
                f"must have the same column in tables {first} and {other}",
                f"{a.column} and {b.column}",
            )
    if len(fields) != len(others):
        rule = f"must be given where the columns of tables {first} and {other} differ"
        raise ConfigError("gear.fields", rule)


def _check_packed(config: GearOptions, first: str, other: str, schemas: Mapping[str, Schema]) -> None:
    """Reject tables of one packed batch that differ in tokens, loss masks or members of groups."""
    remedy = "give the tables equal columns, or sample one of them"
    for role in ("token", "loss_mask"):
        columns = [schemas[table].role(role) for table in (first, other)]
        known = ["none" if column is None else f"{column.name} ({column.dtype})" for column in columns]
        if known[0] != known[1]:
            rule = f"must have the column of the role {role} of table {first}, {known[0]}"
            raise ConfigError(dotted("gear", "tables", other), rule, known[1], remedy)
    groups = [config.resolved_tables[table].group for table in (first, other)]
    members = ["none" if group is None or group.member is None else group.member for group in groups]
    if members[0] != members[1]:
        at, rule = (
            dotted("gear", "tables", other, "group", "member"),
            f"must be that of table {first} ({members[0]})",
        )
        raise ConfigError(at, rule, members[1], remedy)


def _check_table(
    config: GearOptions, schema: Schema, statistics_available: Collection[str] | bool
) -> list[ResolvedField]:
    """Check a config against one table; return the fields of its samples."""
    sampler = config.item_sampler
    for column, where in sampler.where.items():
        _check_where(column, where, schema)
    for option, column in sampler.columns.items():
        _check_number(column, f"gear.sampler.{option}", schema)
    _check_n_step(config, schema)
    requested = config.fields or {c.name: FieldConfig() for c in schema if not c.is_opaque}
    if not config.fields:
        for name in requested:
            check_field_name(name, n_step=config.n_step is not None)
        check_nesting(list(requested))
    shifts = config.pack is not None and schema.role("token") is not None
    resolved = [
        _resolve(name, field, schema, statistics_available, shifts) for name, field in requested.items()
    ]
    _check_duplicates(resolved)
    _check_bootstraps(config, resolved)
    hindsight_checks.check_fields(config, resolved)
    return resolved


def _known(schema: Schema) -> str:
    return f"the table has {', '.join(schema.names)}"


def _check_number(name: str, at: str, schema: Schema) -> None:
    numbers = [c.name for c in schema.trajectory_columns if not c.shape and c.dtype != "bool"]
    if name not in numbers:
        raise ConfigError(
            at,
            "must name a column with one number per trajectory",
            name,
            f"there are: {', '.join(numbers) or 'none'}",
        )


def _check_where(name: str, where: WhereConfig, schema: Schema) -> None:
    at = dotted("gear", "sampler", "where", name)
    per_trajectory = ", ".join(c.name for c in schema.trajectory_columns if not c.is_opaque) or "none"
    remedy = f"per-trajectory columns are: {per_trajectory}"
    if name not in schema:
        raise ConfigError(at, "must name a column", name, remedy)
    column = schema[name]
    if column.rows != "1" or column.shape:
        raise ConfigError(at, "must name a column with one number per trajectory", name, remedy)
    if column.dtype == "bool" and where.in_ is None:
        raise ConfigError(at, "must use in, as the column is bool", None, 'write {"in": [true]}')
    for value in where.in_ or ():
        if isinstance(value, bool) and column.dtype != "bool":
            raise ConfigError(
                f"{at}.in", f"must hold numbers, as the column is {column.dtype}", value, "write 0 or 1"
            )
        if not column.is_floating and value != int(value):
            raise ConfigError(
                f"{at}.in", f"must hold integers, as the column is {column.dtype}", value, "no row equals it"
            )


def _check_n_step(config: GearOptions, schema: Schema) -> None:
    if config.n_step is None:
        return
    for role in ("reward", "terminated"):
        if schema.role(role) is None:
            raise ConfigError(
                "gear.n_step", f"must have a {role} column in the sampled table", None, _known(schema)
            )


def _check_bootstraps(config: GearOptions, fields: list[ResolvedField]) -> None:
    """Reject fields of the state after an n-step return that have no row of it at the end of a trajectory."""
    if config.item_sampler.anchors == "fits":
        return
    for field in fields:
        column = field.column
        if not field.follows or column is None or column.rows != "T" or column.is_next_observation:
            continue
        rule = 'must have a row after the last step with offset "n_step": padding would be bootstrapped from'
        remedy = (
            "store the observations in T+1 rows, or the next ones in a column of the role next_observation; "
            'or leave out the last n steps of each trajectory by "anchors": "fits"'
        )
        raise ConfigError(
            f"{dotted('gear', 'fields', field.name)}.column", rule, f"{column.name} of T rows", remedy
        )


def _source(name: str, field: FieldConfig, schema: Schema) -> tuple[Column | None, str | None]:
    at = dotted("gear", "fields", name)
    derived: str | None = field.derived
    if derived is None and field.column is None and name in DERIVED and name not in schema:
        derived = name
    if derived == "return_to_go" and schema.role("reward") is None:
        raise ConfigError(at, "must have a reward column to sum", None, _known(schema))
    if derived is not None:
        return None, derived
    requested = field.column if field.column is not None else name
    if requested not in schema:
        option = f"{at}.column" if field.column is not None else at
        near = near_name(requested, schema.names)
        raise ConfigError(option, "must be a column of the table", requested, near or _known(schema))
    return schema[requested], None


def _resolve(
    name: str, field: FieldConfig, schema: Schema, statistics: Collection[str] | bool, shifts: bool
) -> ResolvedField:
    at = dotted("gear", "fields", name)
    column, derived = _source(name, field, schema)
    if column is not None and column.rows == "1":
        _check_per_trajectory(at, field, column)
    if column is not None and column.is_opaque:
        _check_opaque(at, field, column)
        return ResolvedField(name, column, dtype=column.dtype)
    if field.normalize is not None:
        _check_normalize(at, field, column, statistics)
    if derived in ("timestep", "position"):
        _check_computed(at, field, "time steps" if derived == "timestep" else "positions")
    if derived == "position":
        _check_position(at, field)
    own = (
        DERIVED[derived]
        if column is None and derived is not None
        else (column.dtype if column is not None else "")
    )
    converted = field.normalize is not None or field.scale != 1.0
    floating = own in ("float16", "bfloat16", "float32", "float64")
    if converted and own == "bool":
        raise ConfigError(
            f"{at}.scale", "must not be given for a bool column", field.scale, 'use "as": "float32"'
        )
    narrowed = own == "float64" or (converted and not floating)  # float64 breaks models of float32
    dtype = field.dtype or ("float32" if narrowed else own)
    if field.dtype is not None:
        check_dtype(at, own, field.dtype, column, converted)
    pad_value = 0 if isinstance(field.pad, str) else field.pad
    check_pad(at, pad_value, dtype)
    return ResolvedField(
        name=name,
        column=column,
        derived=derived,
        offset=_offset_of(field, column, shifts),
        length=field.length,
        align=field.align,
        pad_kind=field.pad if isinstance(field.pad, str) else "value",
        pad_value=pad_value,
        normalize=field.normalize,
        scale=field.scale,
        dtype=dtype,
        hindsight=hindsight_checks.column_of(at, field, column, schema),
    )


def _offset_of(field: FieldConfig, column: Column | None, shifts: bool) -> Any:
    """Return a field's offset; `shifts`: where none is given, columns stand where the token is predicted."""
    if field.offset is not None:
        return field.offset
    follows = column is not None and column.rows == "T" and column.role != "token"
    return int(shifts and follows)


def _check_per_trajectory(at: str, field: FieldConfig, column: Column) -> None:
    for option, defaults in (("offset", (None, 0)), ("length", (None,)), ("pad", ("zero",))):
        value = getattr(field, option)
        if value not in defaults:
            raise ConfigError(
                f"{at}.{option}",
                f"must not be given: {column.name} has one value per trajectory",
                value,
                "drop it",
            )


def _check_opaque(at: str, field: FieldConfig, column: Column) -> None:
    given = {
        "normalize": (field.normalize, None),
        "scale": (field.scale, 1.0),
        "as": (field.dtype, None),
        "hindsight": (field.hindsight, None),
    }
    for option, (value, default) in given.items():
        if value != default:
            rule = f"must not be given: column {column.name} has the dtype {column.dtype}"
            raise ConfigError(
                f"{at}.{option}", rule, value, "drop it: batch.opaque returns values as they are"
            )


def _check_computed(at: str, field: FieldConfig, what: str) -> None:
    for option, value, only in (("scale", field.scale, (1.0,)), ("as", field.dtype, (None, "int64"))):
        if value not in only:
            raise ConfigError(
                f"{at}.{option}", f"must not be given for {what}", value, "convert them in the model"
            )


def _check_position(at: str, field: FieldConfig) -> None:
    if field.length is None:
        raise ConfigError(
            f"{at}.length", "must be given for positions", None, "they count the steps of a window"
        )
    if field.pad != "zero":
        raise ConfigError(
            f"{at}.pad",
            "must not be given for positions",
            field.pad,
            "drop it: a padded step has a position, too",
        )


def _check_normalize(
    at: str, field: FieldConfig, column: Column | None, statistics: Collection[str] | bool
) -> None:
    if column is None:
        raise ConfigError(
            f"{at}.normalize", "must not be given for a derived field", field.normalize, "use scale"
        )
    if column.dtype == "bool":
        raise ConfigError(
            f"{at}.normalize", "must not be given for a bool column", field.normalize, "drop it"
        )
    if not (statistics if isinstance(statistics, bool) else column.name in statistics):
        raise ConfigError(
            f"{at}.normalize",
            f"must not be given: column {column.name} has no statistics",
            field.normalize,
            "only data sets have them; use scale",
        )


def _check_duplicates(fields: list[ResolvedField]) -> None:
    seen: dict[ResolvedField, str] = {}
    for field in fields:
        meaning = replace(field, name="")
        if meaning in seen:
            raise ConfigError(
                dotted("gear", "fields", field.name),
                f"must differ from {dotted('gear', 'fields', seen[meaning])}",
                None,
                "both hold the same; drop one",
            )
        seen[meaning] = field.name

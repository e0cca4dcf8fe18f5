"""Fields of a batch with defaults, dtypes and columns resolved against the tables' schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from deepspeed_gear.config.column_checks import (
    check_listed,
    check_sampler_columns,
    check_table_columns,
    known_columns,
    need_roles,
)
from deepspeed_gear.config.cross_checks import GOAL_EXAMPLE
from deepspeed_gear.config.field_names import N_STEP_NAMES, SAMPLE_NAMES, check_field_names
from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import AdvantageConfig, FieldConfig, GearOptions
from deepspeed_gear.config.resolved_field import OF_EPISODES, ResolvedField
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError, known_names, near_name
from deepspeed_gear.schema import DTYPES, SOURCE, Column, Schema

ESTIMATED = ("advantage", "value_target")
DERIVED = {"return_to_go": "float32", "timestep": "int64", "position": "int64"}
DERIVED |= dict.fromkeys(ESTIMATED, "float32")
ADVANTAGE_EXAMPLE = '"advantage": {"kind": "gae", "value": "value", "gamma": 0.99, "lam": 0.95}'
MASK = "mask."  # prefix of a field's name: the mask of its real steps
LEARNS = "learns."  # prefix of a field's name: the mask of its steps after the burn-in
_GATHERED = (torch.int32, torch.int64)  # integer types that the gather op converts others to


def check_against(
    config: GearOptions, schemas: Mapping[str, Schema], statistics: Collection[str] | None = None
) -> list[ResolvedField]:
    """Check a config against the schemas of its tables.

    Args:
        statistics: Columns of the sampled table that have statistics. None: all; without late ones
            where the statistics are those of added rows.
    Returns:
        The fields of a batch in the order of the config. If the config names none: a field for
        every column of the schema that is not opaque, in its order.
    Raises:
        ConfigError: A column is missing, or does not suit an option.
    """
    for name in config.resolved_tables:
        if name not in schemas:
            raise ConfigError(
                dotted("gear", "tables", name),
                "must have a schema",
                None,
                "give it here or to Replay(schemas=...)",
            )
        check_table_columns(config, name, schemas[name])
    first, *others = config.sampled_tables
    if statistics is None:
        every = [column for name in config.sampled_tables for column in schemas[name]]
        statistics = [c.name for c in every if not (c.late and config.normalizes_online)]
    fields = {
        name: _fields(config, name, schemas[name], statistics) for name in config.sampled_tables
    }
    if config.pack is not None:
        for other in others:
            _check_packed(first, other, schemas)
        _check_members(config)
    joined = _joined(config, fields)
    _check_pipeline(config, [field.name for field in joined if not field.is_opaque])
    return joined


def _joined(
    config: GearOptions, fields: Mapping[str, Sequence[ResolvedField]]
) -> list[ResolvedField]:
    """Return the fields of all tables, which must agree; those that some lack are `absent` there.

    Args:
        fields: Fields by table.
    """
    first, *others = fields
    known = {field.name: (first, field) for field in fields[first]}
    for other in others:
        if not config.fields and len(fields[first]) != len(fields[other]):
            raise ConfigError(
                "gear.fields",
                f"must be given where the columns of tables {first} and {other} differ",
                remedy='name the fields in gear.fields; one with "absent" may lack its column in '
                "some of the tables of a packed mixture",
            )
        for field in fields[other]:
            table, same = known.setdefault(field.name, (other, field))
            if field != same:
                raise ConfigError(
                    dotted("gear", "fields", field.name),
                    f"must have the same column in tables {table} and {other}",
                    f"{same.column} and {field.column}",
                    "name the field's column in gear.fields, or give both tables this column",
                )
    for name in config.fields:
        if name not in known:
            raise ConfigError(
                dotted("gear", "fields", name),
                "must be a column of one of the tables",
                config.fields[name].column or name,
                "correct the name, or leave the field out",
            )
    names = list(config.fields) or [field.name for field in fields[first]]
    return [known[name][1] for name in names]


def _check_pipeline(config: GearOptions, fields: list[str]) -> None:
    if config.pipeline is None:
        return
    known = [*fields, *(N_STEP_NAMES if config.n_step is not None else ()), *SAMPLE_NAMES]
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


def _check_packed(first: str, other: str, schemas: Mapping[str, Schema]) -> None:
    """Reject tables of one packed batch with different tokens or loss masks."""
    for role in ("token", "loss_mask"):
        columns = [schemas[table].role(role) for table in (first, other)]
        known = [
            "none" if column is None else f"{column.name} ({column.dtype})" for column in columns
        ]
        if known[0] != known[1]:
            raise ConfigError(
                dotted("gear", "tables", other),
                f"must have the column of the role {role} of table {first}, {known[0]}",
                known[1],
                "give the tables equal columns, or sample one of them",
            )


def _check_members(config: GearOptions) -> None:
    """Reject tables of groups in one packed batch whose members have different columns."""
    groups = {name: config.resolved_tables[name].group for name in config.sampled_tables}
    members = {name: one.member or "none" for name, one in groups.items() if one is not None}
    for name, member in members.items():
        first = next(iter(members))
        if member != members[first]:
            raise ConfigError(
                dotted("gear", "tables", name, "group", "member"),
                f"must be that of table {first} ({members[first]})",
                member,
                "give the tables equal columns, or sample one of them",
            )


def _fields(
    config: GearOptions, table: str, schema: Schema, statistics: Collection[str]
) -> list[ResolvedField]:
    """Check a config against one table; return the fields of its samples."""
    check_sampler_columns(config, table, schema)
    if config.n_step is not None:
        need_roles("gear.n_step", ("reward", "terminated"), schema)
    for option in ("n_step", "advantage"):
        wrong = [f"{c.name} of dtype {c.dtype}" for c in schema.end_columns if c.dtype != "bool"]
        if wrong and getattr(config, option) is not None:
            raise ConfigError(
                f"gear.{option}",
                "must be of a table whose columns of the roles terminated and truncated are bool",
                ", ".join(wrong),
                "store them as bool (gear ingest: --dtype COLUMN=bool)",
            )
    packed = config.pack is not None  # windows have no ragged columns
    given = [c for c in schema if c.is_tensor or (c.is_ragged and packed)]
    every = [column.name for column in given if column != SOURCE]
    requested = config.fields or {name: FieldConfig() for name in every}
    check_field_names(list(requested), n_step=config.n_step is not None)
    resolved = [
        _resolve(config, name, field, schema, statistics)
        for name, field in requested.items()
        if field.absent is None or (field.column or name) in schema
    ]
    _check_resolved(config, schema, resolved)
    return resolved


def _check_resolved(config: GearOptions, schema: Schema, resolved: Sequence[ResolvedField]) -> None:
    """Reject fields that contradict one another, packed batches, or what is derived from them."""
    if config.pack is not None and config.pack.prefix == "share":
        need_roles("gear.pack.prefix", ("token", "loss_mask"), schema)
        for field in resolved:
            if field.derived == "timestep" or int(field.offset) < 0:
                raise ConfigError(
                    dotted("gear", "fields", field.name),
                    'must be of the same or a later step with "prefix": "share" of gear.pack',
                    field.offset,
                    "take micro.position_ids, or store the values in a column",
                )
    estimated = [field for field in resolved if field.inputs]
    if config.advantage is not None and not estimated:
        raise ConfigError(
            "gear.advantage",
            "must have a field that is derived from it",
            None,
            'give gear.fields "advantage": {"length": 32}',
        )
    for field in estimated:
        if (field.inputs, field.length) != (estimated[0].inputs, estimated[0].length):
            raise ConfigError(
                dotted("gear", "fields", field.name),
                f"must have the offset and length of {dotted('gear', 'fields', estimated[0].name)}",
                f"{field.offset}, {field.length}",
                "give all advantage fields one offset and length",
            )
    seen: dict[ResolvedField, str] = {}
    for field in resolved:
        at = dotted("gear", "fields", field.name)
        meaning = replace(field, name="")
        if meaning in seen:
            raise ConfigError(
                at,
                f"must differ from {dotted('gear', 'fields', seen[meaning])}",
                None,
                "both hold the same; drop one",
            )
        seen[meaning] = field.name
        stored = field.column
        if not field.follows or stored is None or config.item_sampler.anchors == "fits":
            continue
        if stored.rows == "T" and not stored.is_next_observation:
            raise ConfigError(
                f"{at}.column",
                'must have a row after the last step with offset "n_step": padding would be '
                "bootstrapped from",
                f"{stored.name} of T rows",
                "store the observations in T+1 rows, or the next ones in a column of the role "
                'next_observation; or leave out the last n steps by "anchors": "fits"',
            )
    if config.hindsight is not None:
        _check_goals(resolved)
        if config.hindsight.reward is not None:
            reward_field(resolved)


def _source(name: str, field: FieldConfig, schema: Schema) -> tuple[Column | None, str | None]:
    """Return the column that a field reads, or the quantity that it is derived as."""
    at = dotted("gear", "fields", name)
    derived: str | None = field.derived
    if derived is None and field.column is None and name in DERIVED and name not in schema:
        derived = name
    if derived in OF_EPISODES and (stored := schema.role(derived)) is not None:
        return stored, None
    if derived == "return_to_go" and schema.role("reward") is None:
        raise ConfigError(at, "must have a reward column to sum", None, known_columns(schema))
    if derived is not None:
        return None, derived
    requested = field.column if field.column is not None else name
    if requested not in schema:
        option = f"{at}.column" if field.column is not None else at
        near = near_name(requested, schema.names)
        raise ConfigError(
            option, "must be a column of the table", requested, near or known_columns(schema)
        )
    return schema[requested], None


def _resolve(
    config: GearOptions, name: str, field: FieldConfig, schema: Schema, statistics: Collection[str]
) -> ResolvedField:
    """Return a field with its defaults filled in; ConfigError if it does not suit its column."""
    column, derived = _source(name, field, schema)
    part = Part(dotted("gear", "fields", name), field)
    if column is not None:
        _check_column(part, column, statistics)
        if column.is_ragged:
            return _ragged_field(config, part, name, column, schema)
        if column.is_opaque:
            return ResolvedField(name, column, dtype=column.dtype)
        own = DERIVED["timestep"] if column.role == "timestep" else column.dtype
    else:
        assert derived is not None
        _check_derived(part, derived)
        own = DERIVED[derived]
    converted = field.normalize is not None or field.scale != 1.0
    # A float64 input fails in a model of float32.
    narrowed = own == "float64" or (converted and not DTYPES[own].is_floating_point)
    dtype = field.dtype or ("float32" if narrowed else own)
    if field.dtype is not None:
        _check_dtype(part, own, field.dtype, column, converted)
    if dtype != "engine" and not isinstance(field.pad, str):
        _check_number(part, "pad", field.pad, dtype)
    if dtype != "engine" and field.absent is not None:
        _check_number(part, "absent", field.absent, dtype)
    offset = field.offset
    if offset is None:
        # In a pack, position t holds the values of token t + 1, which is predicted there; tokens,
        # media and derived fields stay in place.
        shifts = config.pack is not None and schema.role("token") is not None
        stays = ("token", "media", *OF_EPISODES)
        offset = int(
            shifts and column is not None and column.rows == "T" and column.role not in stays
        )
    inputs: tuple[ResolvedField | None, ...] = ()
    if derived in ESTIMATED:
        if config.advantage is None:
            raise ConfigError(
                part.at, "must not be derived without gear.advantage", None, ADVANTAGE_EXAMPLE
            )
        inputs = _inputs(config.advantage, schema, int(offset), field.length or 1)
    return ResolvedField(
        name=name,
        column=column,
        derived=derived,
        offset=offset,
        length=field.length,
        align=field.align,
        pad_kind=field.pad if isinstance(field.pad, str) else "value",
        pad_value=0 if isinstance(field.pad, str) else field.pad,
        normalize=field.normalize,
        scale=field.scale,
        dtype=dtype,
        absent=field.absent,
        hindsight=None if field.hindsight is None else _goal(part, field.hindsight, column, schema),
        inputs=inputs,
        factors=config.advantage.factors if inputs and config.advantage is not None else (),
    )


def _ragged_field(
    config: GearOptions, part: Part, name: str, column: Column, schema: Schema
) -> ResolvedField:
    """Return the field of a ragged column, whose values stand where the token is predicted."""
    if config.pack is None:
        rule = "must not name a ragged column without gear.pack"
        remedy = 'train on packs ("pack": {"tokens": 4096}), or read it with Replay.read'
        raise ConfigError(part.at, rule, column.name, remedy)
    when = "for a ragged column"
    part.leave_out(
        "length pad normalize scale as hindsight absent", when, "drop it: values stay as stored"
    )
    offset = part.options.model_dump()["offset"]
    if offset is None:
        offset = int(schema.role("token") is not None)
    part.admit("offset", (None, 0, 1), when, "1: place i has the values of step i + 1")
    return ResolvedField(name, column, offset=offset, dtype=column.dtype)


def _inputs(
    options: AdvantageConfig, schema: Schema, offset: int, length: int
) -> tuple[ResolvedField | None, ...]:
    """Return the windows that advantages are estimated from; ConfigError if a column is missing."""

    def window(name: str, column: Column | None, later: int = 0) -> ResolvedField | None:
        if column is None:
            return None
        dtype = "bool" if name in ("terminated", "truncated") else "float64"
        return ResolvedField(f"\0{name}", column, offset=offset + later, length=length, dtype=dtype)

    def named(option: str, rows: Sequence[str] = ("T",)) -> Column | None:
        name = getattr(options, option)
        columns = [c for c in schema if c.rows in rows and not c.shape and c.is_floating]
        if name is not None:
            check_listed(
                f"gear.advantage.{option}",
                f"must name a column with one float per step ({' or '.join(rows)} rows)",
                name,
                columns,
            )
        return None if name is None else schema[name]

    need_roles("gear.advantage", ("reward", "terminated"), schema)
    value = named("value", ("T", "T+1"))
    following = named("next_value")
    assert value is not None
    if (value.rows == "T") != (following is not None):
        raise ConfigError(
            "gear.advantage.next_value",
            "must be given where value has T rows, and only there: the next one bootstraps windows",
            options.next_value,
            "store the values in T+1 rows, or those of the next observations in a column of "
            "their own",
        )
    after = window("next_value", value, 1) if following is None else window("next_value", following)
    inputs = [window("reward", schema.role("reward")), window("value", value), after]
    inputs += [window(role, schema.role(role)) for role in ("terminated", "truncated")]
    inputs += [window(option, named(option)) for option in ("log_prob", "behaviour_log_prob")]
    return tuple(inputs)


def _check_column(part: Part, column: Column, statistics: Collection[str]) -> None:
    if column.rows == "1" and not column.is_ragged:
        when = f"as {column.name} has one value per trajectory"
        part.admit("offset", (None, 0), when, "drop it")
        part.leave_out("length pad", when, "drop it")
    if column.is_opaque:
        when = f"for the dtype {column.dtype}"
        part.leave_out(
            "normalize scale as hindsight absent",
            when,
            "drop it: batch.opaque returns values as they are",
        )
    if column.dtype == "bool":
        part.leave_out("normalize", "for a bool column", "drop it")
        part.leave_out("scale", "for a bool column", 'use "as": "float32"')
    if column.name not in statistics:
        when = f"as column {column.name} has no statistics"
        remedy = "data sets have them, and columns that are added with their rows"
        part.leave_out("normalize", when, f"{remedy}; use scale")


def _check_derived(part: Part, derived: str) -> None:
    part.leave_out("normalize", "for a derived field", "use scale")
    if derived in ("timestep", "position"):
        when = f"for {'time steps' if derived == 'timestep' else 'positions'}"
        part.leave_out("scale", when, "convert them in the model")
        part.admit("as", (None, "int64"), when, "convert them in the model")
    if derived == "position":
        part.need("length", "for positions", "they count the steps of a window")
        part.leave_out("pad", "for positions", "drop it: a padded step has a position, too")
    if derived in ESTIMATED:
        when = "for advantages and value targets"
        part.leave_out("align pad scale as", when, "they stand in place, padded by 0")
        follows = part.options.model_dump()["offset"] == "n_step"
        part.require(not follows, "offset", f"must be a number {when}", "give the offset in steps")


def _check_dtype(
    part: Part, own: str, requested: str, column: Column | None, converted: bool
) -> None:
    """Reject a conversion that loses values, or precision that targets and losses need."""
    source = f"a derived {own}" if column is None else f"the {own} column {column.name}"
    # Values that targets and losses are computed from keep at least the precision of float32.
    exact = column is None or column.role in (
        "reward",
        "return",
        "return_to_go",
        "terminated",
        "truncated",
    )
    if requested == "engine":
        rule = f'must not be "engine" for {source}'
        kept = "rewards, returns, flags and derived fields keep their precision"
        part.require(not exact, "as", rule, f"{kept}; convert them in the model")
        is_rounded = own in ("int16", "int32", "int64") and not converted
        part.require(not is_rounded, "as", rule, f"use {own}: large integers would be rounded")
        return
    target = DTYPES[requested]
    have = DTYPES[own]
    if target.is_floating_point:
        keeps = target.itemsize >= min(4, have.itemsize)
        rule = f"must keep the precision of {source}"
        part.require(keeps or not exact, "as", rule, "use float32")
    elif converted:
        part.refuse(
            "as", "must be a float type where the field is normalised or scaled", "use float32"
        )
    elif torch.promote_types(target, have) != target:
        part.refuse("as", f"must hold every value of {source}", f"use {own} or a wider type")
    elif target != have and target not in _GATHERED:
        part.refuse("as", f"must be {own}, int32, int64 or a float type", "use int32")


def _check_number(part: Part, option: str, value: int | float, dtype: str) -> None:
    """Reject the value of an option that a field of this dtype cannot hold."""
    target = DTYPES[dtype]
    if dtype == "bool":
        rule = "must be 0 or 1 for a bool field"
        part.require(value in (0, 1), option, rule, "or convert the field with as")
    elif target.is_floating_point:
        fits = abs(value) <= torch.finfo(target).max
        part.require(fits, option, f"must be representable in {dtype}", "choose a smaller number")
    else:
        bounds = torch.iinfo(target)
        fits = value == int(value) and bounds.min <= value <= bounds.max
        rule = f"must be an integer that {dtype} can hold"
        part.require(fits, option, rule, 'or convert the field with "as"')


def _goal(part: Part, name: str, column: Column | None, schema: Schema) -> Column:
    """Return the column of achieved goals, a row of which replaces the goal of a sample."""
    part.require(
        name in schema, "hindsight", "must be a column of the table", known_columns(schema)
    )
    achieved = schema[name]
    part.require(
        achieved.rows != "1",
        "hindsight",
        "must be a column with a row per step",
        known_columns(schema),
    )
    if column is None:
        raise ConfigError(part.at, "must be a stored column to be a goal", None, GOAL_EXAMPLE)
    if (achieved.dtype, achieved.shape) != (column.dtype, column.shape):
        rule = (
            f"must have dtype and shape of column {column.name} "
            f"({column.dtype}{list(column.shape)})"
        )
        value = f"{achieved.name}: {achieved.dtype}{list(achieved.shape)}"
        raise ConfigError(
            f"{part.at}.hindsight",
            rule,
            value,
            "choose an achieved-goal column of the same dtype and shape",
        )
    return achieved


def _check_goals(fields: Sequence[ResolvedField]) -> None:
    """Reject achieved goals with different rows, and fields that sum rewards.

    Those are rewards for the goal that was pursued, not for the one in the sample.
    """
    columns = [(field, field.hindsight) for field in fields if field.hindsight is not None]
    _, first = columns[0]
    for field, achieved in columns:
        if achieved.rows != first.rows:
            option = f"{dotted('gear', 'fields', field.name)}.hindsight"
            raise ConfigError(
                option,
                f"must have as many rows as column {first.name} ({first.rows})",
                f"{achieved.name}: {achieved.rows}",
                "store all achieved goals with the same rows",
            )
    for field in fields:
        sums = field.column is not None and field.column.role == "return_to_go"
        if sums or field.derived in ("return_to_go", *ESTIMATED):
            raise ConfigError(
                dotted("gear", "fields", field.name),
                "must not be given with gear.hindsight",
                None,
                "it sums rewards for the goal pursued",
            )


def first_step(fields: Sequence[ResolvedField]) -> int:
    """Return the first step of the earliest window, relative to the anchor."""
    return min(int(field.offset or 0) for field in fields if field.length is not None)


def reward_field(fields: Sequence[ResolvedField]) -> ResolvedField:
    """Return the one field whose values a program's reward replaces; ConfigError if not one."""
    rewards = [
        field for field in fields if field.column is not None and field.column.role == "reward"
    ]
    if len(rewards) != 1:
        raise ConfigError(
            "gear.hindsight.reward",
            "must have one field of the reward column to replace",
            ", ".join(field.name for field in rewards) or "none",
            "add one field of the reward column to gear.fields",
        )
    return rewards[0]

"""Checks that cross options and need no schema."""

from __future__ import annotations

from collections.abc import Collection

from deepspeed_gear.config.group_checks import check_groups
from deepspeed_gear.config.options import FieldConfig, GearOptions
from deepspeed_gear.config.pack_checks import check_pack
from deepspeed_gear.config.retention_checks import check_retention
from deepspeed_gear.config.sampler_options import ItemSampler, MixtureSampler, WhereConfig
from deepspeed_gear.config.table_options import DataConfig, TableConfig
from deepspeed_gear.errors import ConfigError, known_names

BATCH_NAMES = (
    "mask",
    "trajectory_id",
    "handle",
    "anchor",
    "sample_number",
    "sample_index",
    "probability",
    "is_weight",
    "epoch",
    "valid",
    "source",
    "relabelled",
    "goal_step",
)
SHARES_TOLERANCE = 1e-6  # of the sum of the shares of a mixture
# Suffixes that a checkpoint adds to the name of a table's folder, and the other file beside it.
_NOT_OF_TABLES = (".partial", ".old", ".older", "position.json")
N_STEP_NAMES = ("return_n", "discount", "steps_n")


def dotted(*parts: object) -> str:
    """Join the parts of an option's name; keys that are no plain words stand in brackets."""
    name = ""
    for part in parts:
        word = isinstance(part, str) and part.replace("-", "_").isidentifier()
        name += (f".{part}" if name else str(part)) if word else f"[{part!r}]"
    return name


def check_options(config: GearOptions) -> None:
    """Reject options that contradict one another.

    Raises:
        ConfigError: Two options conflict, or one needs another that is missing.
    """
    _check_tables(config)
    _check_sampler(config)
    check_groups(config)
    for name, table in config.tables.items():
        if table.data is None:
            check_retention(config, table, dotted("gear", "tables", name), name)
    for name, field in config.fields.items():
        check_field_name(name, n_step=config.n_step is not None)
        _check_field(name, field, config)
    check_nesting(list(config.fields))
    if config.exchange == "device" and config.prefetch:
        raise ConfigError(
            "gear.prefetch",
            'must be 0 where gear.exchange is "device"',
            config.prefetch,
            "collectives of a device belong to the main thread, at one place among those of training",
        )
    _check_batch(config)
    check_pack(config)


def _check_tables(config: GearOptions) -> None:
    if config.data is not None and config.tables:
        raise ConfigError(
            "gear.data",
            "and gear.tables must not be given together",
            None,
            'write the data set as an entry of gear.tables: {"main": {"data": ...}}',
        )
    if config.data is None and not config.tables:
        raise ConfigError(
            "gear.data", "or gear.tables must be given", None, "name the folder that `gear ingest` wrote"
        )
    if config.data is not None:
        _check_split(config.data, "gear.data")
    for name, table in config.tables.items():
        _check_table_name(name)
        _check_table(table, dotted("gear", "tables", name))


def _check_table_name(name: str) -> None:
    """Reject a table whose folder in a checkpoint would be that of another table's earlier save."""
    if name.endswith(_NOT_OF_TABLES):
        rule = f"must not have a table whose name ends with {', '.join(_NOT_OF_TABLES)}"
        raise ConfigError("gear.tables", rule, name, "give the table another name")


def _check_table(table: TableConfig, at: str) -> None:
    if table.data is None and (table.capacity_steps is None) == (table.capacity_bytes is None):
        rule = "must have one of data, capacity_steps and capacity_bytes"
        raise ConfigError(at, rule, None, "give the one that the table is made of")
    if table.data is not None:
        given = {
            "capacity_steps": table.capacity_steps,
            "capacity_bytes": table.capacity_bytes,
            "writers": table.writers or None,
            "remove": None if table.remove == "none" else table.remove,
            "max_times_sampled": table.max_times_sampled or None,
            "max_age": table.max_age or None,
            "version": table.version,
            "rate_limiter": table.rate_limiter,
            "capacity_trajectories": table.capacity_trajectories,
            "max_length": table.max_length,
            "num_envs": table.num_envs,
            "schema": table.schema_,
        }
        for option, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{at}.{option}", f"must not be given together with {at}.data", value, "drop one"
                )
        _check_split(table.data, f"{at}.data")
        return
    for option, limit in (
        ("max_length", table.max_length),
        ("capacity_trajectories", table.capacity_trajectories),
    ):
        if limit is not None and table.capacity_steps is not None and limit > table.capacity_steps:
            raise ConfigError(
                f"{at}.{option}",
                f"must be at most {at}.capacity_steps ({table.capacity_steps})",
                limit,
                "a trajectory has at least one step, and must fit into the table",
            )


def _check_split(data: DataConfig, at: str) -> None:
    if "train" in data.split:
        raise ConfigError(
            f"{at}.split.train",
            "must not be given",
            data.split["train"],
            "what the other splits leave is for training",
        )
    if sum(data.split.values()) >= 1:
        raise ConfigError(
            f"{at}.split", "must sum to less than 1", data.split, "nothing is left for training"
        )


def _check_sampler(config: GearOptions) -> None:
    tables = config.resolved_tables
    if isinstance(config.sampler, MixtureSampler):
        _check_mixture(config.sampler, tables)
        _check_item_sampler(config.sampler.of, config, "gear.sampler.of")
        return
    sampler = config.sampler
    if sampler.table is not None and sampler.table not in tables:
        remedy = known_names(sampler.table, tables)
        raise ConfigError("gear.sampler.table", "must be a table", sampler.table, remedy)
    if sampler.table is None and len(tables) > 1:
        rule = "must be given where there are several tables"
        raise ConfigError("gear.sampler.table", rule, None, f"one of {', '.join(tables)}")
    _check_item_sampler(sampler, config, "gear.sampler")


def _check_mixture(sampler: MixtureSampler, tables: Collection[str]) -> None:
    for name in sampler.shares:
        if name not in tables:
            at = dotted("gear", "sampler", "shares", name)
            raise ConfigError(at, "must be of a table", None, known_names(name, tables))
    constants = [share for share in sampler.shares.values() if isinstance(share, (int, float))]
    if len(constants) == len(sampler.shares) and abs(sum(constants) - 1) > SHARES_TOLERANCE:
        raise ConfigError("gear.sampler.shares", "must sum to 1", sampler.shares)
    if sampler.of.table is not None:
        raise ConfigError(
            "gear.sampler.of.table", "must not be given: shares name the tables", sampler.of.table
        )


def _check_item_sampler(sampler: ItemSampler, config: GearOptions, at: str) -> None:
    sampler.check(at)
    if sampler.anchors == "fits" and all(f.length is None and not f.offset for f in config.fields.values()):
        raise ConfigError(
            f"{at}.anchors",
            'must not be "fits" where no field has a length or an offset',
            None,
            'every step fits: use "all", or give a field a length',
        )
    for column, where in sampler.where.items():
        _check_where(where, dotted(*at.split("."), "where", column))


def _check_where(where: WhereConfig, at: str) -> None:
    if where.min is None and where.max is None and where.in_ is None:
        raise ConfigError(
            at, "must have min, max or in", None, "an empty condition admits everything; drop it"
        )
    if where.in_ is not None and (where.min is not None or where.max is not None):
        raise ConfigError(at, "must have min and max, or in, not both", None, "drop one")
    if where.min is not None and where.max is not None and where.min > where.max:
        raise ConfigError(f"{at}.min", f"must be at most {at}.max ({where.max})", where.min, "swap them")


def check_field_name(name: str, n_step: bool) -> None:
    """Reject a field whose name means something else in a batch."""
    at = dotted("gear", "fields", name)
    remedy = f'give it another name: {{"my_{name}": {{"column": "{name}"}}}}'
    if name in BATCH_NAMES:
        raise ConfigError(at, "must not be named like a part of every batch", name, remedy)
    if n_step and name in N_STEP_NAMES:
        raise ConfigError(at, "must not be named like what gear.n_step adds to the batch", name, remedy)


def check_nesting(names: list[str]) -> None:
    """Reject a field that is also a group of fields: `a` beside `a.b` has no nested form."""
    for name in names:
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ConfigError(
                dotted("gear", "fields", name),
                f"must not be a field and a group (of {inner})",
                None,
                "rename one",
            )


def _check_field(name: str, field: FieldConfig, config: GearOptions) -> None:
    at = dotted("gear", "fields", name)
    if field.column is not None and field.derived is not None:
        raise ConfigError(
            f"{at}.derived",
            f"must not be given together with {at}.column ({field.column!r})",
            field.derived,
            "drop one",
        )
    names = ("return_to_go", "timestep", "position")
    if field.derived is not None and name in names and name != field.derived:
        raise ConfigError(
            f"{at}.derived", f"must be {name!r} in a field of that name", field.derived, "rename the field"
        )
    if field.derived is not None and field.normalize is not None:
        raise ConfigError(
            f"{at}.normalize",
            "must not be given for a derived field",
            field.normalize,
            "there are no statistics; use scale",
        )
    if field.offset == "n_step" and config.n_step is None:
        raise ConfigError(
            f"{at}.offset", 'must not be "n_step" without gear.n_step', None, "give gear.n_step or a number"
        )
    if field.align != "in_place" and field.length is None:
        raise ConfigError(
            f"{at}.align", f"must not be given without {at}.length", field.align, "drop it or give a length"
        )
    if field.scale == 0:
        raise ConfigError(
            f"{at}.scale", "must not be 0", field.scale, "the field would hold zeros; leave it out"
        )


def _check_batch(config: GearOptions) -> None:
    gas = config.gradient_accumulation_steps
    micro = config.micro_batch_size or 1
    if config.batch_size is not None and config.batch_size % (micro * gas):
        raise ConfigError(
            "gear.batch_size",
            f"must be a multiple of micro_batch_size * gradient_accumulation_steps ({micro} * {gas})",
            config.batch_size,
            "it is their product times the number of ranks",
        )


def batch_sizes(config: GearOptions, replicas: int) -> tuple[int, int]:
    """Return the sizes of the micro batch and the global batch of a replay without an engine, in samples.

    Args:
        config: The config.
        replicas: Ranks that train on different samples.
    Raises:
        ConfigError: Neither size is given, or they do not agree for this number of ranks.
    """
    parts = replicas * config.gradient_accumulation_steps
    if config.batch_size is None:
        if config.micro_batch_size is None:
            raise ConfigError(
                "gear.batch_size",
                "must be given where there is no engine",
                None,
                "or micro_batch_size; train_batch_size in a ds_config",
            )
        return config.micro_batch_size, config.micro_batch_size * parts
    micro = config.micro_batch_size if config.micro_batch_size is not None else config.batch_size // parts
    if micro * parts != config.batch_size:
        raise ConfigError(
            "gear.batch_size",
            f"must be micro_batch_size * gradient_accumulation_steps * ranks "
            f"({config.micro_batch_size or 'any'} * {config.gradient_accumulation_steps} * {replicas})",
            config.batch_size,
            "change one of them, or the number of ranks",
        )
    return micro, config.batch_size


def refuse_batch_sizes(config: GearOptions) -> None:
    """Reject batch sizes where an engine gives them.

    Raises:
        ConfigError: One of them is given.
    """
    for option, of_the_engine, default in (
        ("batch_size", "train_batch_size", None),
        ("micro_batch_size", "train_micro_batch_size_per_gpu", None),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", 1),
    ):
        value = getattr(config, option)
        if value != default:
            raise ConfigError(
                f"gear.{option}",
                "must not be given with an engine or a ds_config",
                value,
                f"use {of_the_engine} of ds_config.json",
            )

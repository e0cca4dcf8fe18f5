"""Resolution of a config into table sizes, schemas and data sets: all that ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_gear.config import (
    GearConfig,
    ResolvedField,
    TableConfig,
    batch_sizes,
    check_against,
    difference,
    ds_config,
    parse,
    refuse_batch_sizes,
)
from deepspeed_gear.config.cross_checks import check_ranks
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.sampling.batch_info import BatchInfo
from deepspeed_gear.sampling.stream_spec import StreamSpec, read_columns
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_options import group_spec_of, retention_of
from deepspeed_gear.store.table_spec import Shard, TableSpec, spare_rows_for

STEPS_PER_SLOT, LEAST_SLOTS = 16, 1024  # trajectories of a table whose config gives no number


def read_config(exchange: ControlPlane, given: Any) -> tuple[GearConfig, dict[str, Any]]:
    """Parse the config on every rank and compare. Collective.

    Returns:
        The config, and the batch sizes of the ds_config around it, if there is one.
    Raises:
        ConfigError: It is wrong, or differs between ranks.
    """
    section, sizes = exchange.agree("reading the config", lambda: ds_config.read(given))
    config = exchange.agree("the gear section", lambda: parse(section))
    others = exchange.gather((config.to_json(), sizes))
    first, first_sizes = others[0]
    for rank, (other, other_sizes) in enumerate(others):
        found = difference(parse(first), parse(other)) if other != first else []
        if other_sizes != first_sizes:
            found.append(f"batch sizes of the ds_config: {first_sizes} and {other_sizes}")
        if found:
            raise ConfigError(
                "the gear section",
                "must be the same on all ranks",
                f"rank 0 and rank {rank}: {'; '.join(found)}",
            )
    return config, sizes


def compare_placement(exchange: ControlPlane, topology: Topology, config: GearConfig) -> None:
    """Check that the ranks of a node have the same backend and `load` for their common store. Collective.

    Raises:
        ConfigError: Backend or `load` differ.
    """
    tables = config.resolved_tables.items()
    mine: dict[str, str] = {"gear.backend": "cpu" if config.backend == "auto" else config.backend}
    mine |= {f"gear.tables.{name}.data.load": t.data.load for name, t in tables if t.data is not None}
    for rank, other in enumerate(exchange.gather(mine)):
        for option, value in mine.items():
            if topology.nodes[rank] == topology.node and other.get(option) != value:
                raise ConfigError(
                    option,
                    "must be the same on all ranks of a node",
                    f"rank {exchange.rank}: {value}, rank {rank}: {other.get(option)}",
                )


def open_data(exchange: ControlPlane, config: GearConfig) -> dict[str, Dataset]:
    """Open the data sets on every rank and compare them. Collective.

    Ranks of several nodes may have different parts of one whole.

    Raises:
        DataError: One is missing, broken, or not of the same whole on all ranks.
    """
    tables = config.resolved_tables.items()
    data = exchange.agree(
        "opening the data sets",
        lambda: {name: Dataset.open(t.data.path) for name, t in tables if t.data is not None},
    )
    prints = {name: dataset.whole_fingerprint for name, dataset in data.items()}
    for rank, other in enumerate(exchange.gather(prints)):
        for name, fingerprint in prints.items():
            if other[name] != fingerprint:
                raise DataError(
                    f"table {name}: {data[name].path}",
                    "must be the same data set on all ranks",
                    f"rank {exchange.rank}: {fingerprint[:12]}, rank {rank}: {other[name][:12]}",
                    "copy it again; nodes may have parts of one whole, of one `gear split`",
                )
    return data


def schemas_of(
    config: GearConfig, data: Mapping[str, Dataset], given: Mapping[str, Schema] | None
) -> dict[str, Schema]:
    """Return the schema of each table: from its data set, its config, or the program."""
    schemas: dict[str, Schema] = {}
    for name, table in config.resolved_tables.items():
        schema = data[name].schema if name in data else (table.schema or (given or {}).get(name))
        if schema is not None:
            schemas[name] = schema
    unknown = sorted(set(given or {}) - set(config.resolved_tables))
    if unknown:
        raise ConfigError("schemas", "must be of tables in the config", unknown[0])
    return schemas


def capacity_of(name: str, table: TableConfig, schema: Schema, count: int) -> tuple[int, int]:
    """Return the steps and trajectories that fit into one of `count` equal shards of a table with a capacity.

    Raises:
        ConfigError: The longest trajectory or a group does not fit into one shard, or the bytes hold no step.
    """
    whole = table.capacity_steps or (table.capacity_bytes or 0) // schema.row_bytes
    if whole < 1:
        rule = f"must hold a step ({schema.row_bytes} bytes)"
        raise ConfigError(f"gear.tables.{name}.capacity_bytes", rule, table.capacity_bytes)
    slots = table.capacity_trajectories or min(whole, max(LEAST_SLOTS, whole // STEPS_PER_SLOT))
    steps = -(-whole // count)
    if table.max_length is not None and table.max_length > steps:
        raise ConfigError(
            f"gear.tables.{name}.max_length",
            f"must be at most {steps}, what each of {count} shards holds of capacity_steps ({whole})",
            table.max_length,
            "raise capacity_steps, or use fewer shards",
        )
    slots_each = -(-slots // count)
    most = 1 if table.group is None else table.group.max_trajectories or table.group.size
    if most > slots_each:
        raise ConfigError(
            f"gear.tables.{name}.capacity_trajectories",
            f"must hold the {most} trajectories of a group in each of {count} shards",
            table.capacity_trajectories,
            f"at least {most * count}",
        )
    return steps, slots_each


def environment_sizes(name: str, table: TableConfig, schema: Schema) -> tuple[int, int]:
    """Return the rows and slots of each environment of a table to which steps are added one by one.

    They do not depend on the number of replicas. One slot is spare, so that no call frees a slot and uses it.

    Raises:
        ConfigError: The bytes do not hold two longest trajectories of each environment.
    """
    assert table.num_envs is not None
    assert table.max_length is not None
    steps, slots = capacity_of(name, table, schema, 1)
    envs, longest, final = table.num_envs, table.max_length, int(schema.has_final_row)
    if steps < 2 * envs * longest:
        rule = f"must hold {2 * envs * longest} steps, two longest trajectories per environment"
        raise ConfigError(f"gear.tables.{name}.capacity_bytes", rule, table.capacity_bytes)
    own_slots = max(-(-slots // envs), longest + 1)
    rows = -(-steps // envs) + own_slots * final + longest + final  # a wrap may skip a longest trajectory
    # While a trajectory is open, its environment moves on by less: it is never the one that is evicted.
    least = longest + final + (1 + final) * (longest + 1)
    return max(rows, least), own_slots + 1


def check_holds_batch(config: GearConfig, name: str, schema: Schema, stream: StreamSpec, count: int) -> None:
    """Raise if a table can never hold the items of a global batch at once, so that none is ever drawn.

    Args:
        name: Of the table, which has a capacity.
        count: Stores that hold it together.
    Raises:
        ConfigError: It is too small.
    """
    table, sampler, samples = config.resolved_tables[name], stream.sampler, stream.num_samples(0)
    queue = table.rate_limiter is not None and table.rate_limiter.queue is not None
    if not (sampler.each_once or sampler.drops_tail):
        samples = -(-samples // table.max_times_sampled) if table.max_times_sampled and not queue else 0
    steps, slots = capacity_of(name, table, schema, count)
    if stream.rule.unit == "step":
        option, held, needed, what = "capacity_steps", steps * count, samples, "steps"
    else:
        least = 1 if table.group is None else table.group.min_size or table.group.size
        held, needed, what = slots // least * least * count, samples * least, "trajectories"
        option = "capacity_trajectories"
        if steps * count < needed:  # of one step each
            option, held = "capacity_steps", steps * count
    if held < needed:
        rule = f"must be at least the {what} of a batch ({needed})"
        remedy = "raise it, or lower the size of the batch: no batch would ever be complete"
        raise ConfigError(f"gear.tables.{name}.{option}", rule, held, remedy)


def num_items_of(config: GearConfig, name: str, schema: Schema, dataset: Dataset | None) -> int:
    """Return an upper bound on the items that a table ever holds; the same for any number of nodes.

    Args:
        dataset: This node's part of its data set; None: the table has a capacity.
    Raises:
        ConfigError: The bytes hold no step.
    """
    by_step = config.item_sampler.unit == "step"
    if dataset is not None:
        whole = dataset.num_steps if dataset.part is None else dataset.part.steps
        return whole if by_step else dataset.num_trajectories_of_whole
    table = config.resolved_tables[name]
    if table.num_envs is not None and table.max_length is not None:
        return table.num_envs * environment_sizes(name, table, schema)[0 if by_step else 1]
    steps = table.capacity_steps or (table.capacity_bytes or 0) // schema.row_bytes
    slots = max(capacity_of(name, table, schema, 1)[1], -(-steps // (table.max_length or steps)))
    # A ring on a device has rows for one more trajectory; steps may lie in rows kept for final ones.
    return steps + slots + (table.max_length or 0) if by_step else slots


def table_specs(
    config: GearConfig,
    schemas: Mapping[str, Schema],
    datasets: Mapping[str, Dataset],
    fields: list[ResolvedField],
    num_peers: int,
    shards: Mapping[str, Shard] | None = None,
    batches: Mapping[str, int] | None = None,
) -> list[TableSpec]:
    """Return the sizes of this node's stores of all tables, without rows for arrivals.

    Args:
        datasets: This node's data sets, by table.
        num_peers: Processes of the node that attach.
        shards: Shards of the stores, by table; missing: the whole table.
        batches: Samples of a global batch that come from each sampled table, at most.
    Raises:
        DataError: A shard is not in what the node has of a data set.
        ConfigError: The longest trajectory does not fit into one shard.
    """
    needed = any(field.derived == "return_to_go" for field in fields)
    returns = set(config.sampled_tables) if needed else set()
    whole = tuple(field.name for field in fields if field.needs_episode)

    def spec(name: str, table: TableConfig) -> TableSpec:
        schema, shard = schemas[name], (shards or {}).get(name)
        read = read_columns(config.item_sampler, fields, table.group)
        part = (shard, 0, 0)  # a caller adds rows and slots for arrivals
        if name in datasets:
            assert table.data is not None
            held, in_memory = datasets[name], table.data.load == "memory"
            own = held.first_id, held.first_id + len(held)
            first, end = (0, held.num_trajectories_of_whole) if shard is None else (shard.first, shard.end)
            if not (own[0] <= first <= end <= own[1]):
                raise DataError(
                    f"table {name}: {held.path}",
                    f"must hold the trajectories {first} to {end - 1}",
                    str(held.part or f"{len(held)} trajectories"),
                    "give this node the whole data set, or its own part and every other node another one",
                )
            slots, rows = end - first, held.row_of(end - own[0]) - held.row_of(first - own[0])
            sizes = (slots, rows, held, in_memory, name in returns, num_peers)
            group = None if table.group is None else group_spec_of(table.group, schema, read)
            return TableSpec(name, schema, *sizes, *part, group=group)
        steps, slots = capacity_of(name, table, schema, 1 if shard is None else shard.count)
        group = None if table.group is None else group_spec_of(table.group, schema, read, slots)
        rows, longest = steps + (slots if schema.has_final_row else 0), table.max_length
        retention = retention_of(config, name, (steps, slots), (batches or {}).get(name, 0))
        most_rows = None if longest is None else longest + int(schema.has_final_row)
        spare = spare_rows_for(retention, rows, most_rows)
        more = (*part, table.writers, retention, spare, group, whole if name in config.sampled_tables else ())
        return TableSpec(name, schema, slots, rows + spare, None, True, name in returns, num_peers, *more)

    return [spec(name, table) for name, table in config.resolved_tables.items()]


def fields_of(
    config: GearConfig, schemas: Mapping[str, Schema], data: Mapping[str, Dataset]
) -> list[ResolvedField]:
    """Check the config against the schemas and return the fields of a batch."""
    table = _statistics_table(config, data)
    return check_against(config, schemas, False if table is None else set(data[table].statistics))


def _statistics_table(config: GearConfig, data: Mapping[str, Dataset]) -> str | None:
    """Return the table whose data set's statistics normalise fields: the first sampled one with one."""
    return next((table for table in config.sampled_tables if table in data), None)


def statistics_of(config: GearConfig, data: Mapping[str, Dataset]) -> Mapping[str, ColumnStatistics]:
    """Return the statistics of the training split that fields are normalised with; none without a data set.

    Cost: of another split than the data set's own, one pass over the data.
    """
    table = _statistics_table(config, data)
    if table is None:
        return {}
    dataset, split = data[table], split_of(config, table, data)
    return dataset.statistics if dict(dataset.split) == split else dataset.statistics_for(split)


def batch_info(
    config: GearConfig, topology: Topology, given: BatchInfo | None, sizes: Mapping[str, Any]
) -> BatchInfo:
    """Return the sizes of a batch: those of an engine, a ds_config, the config, or of packed batches.

    Raises:
        ConfigError: They do not suit the ranks.
    """
    place = topology.place
    if config.pack is not None:
        worlds = place.data_world, place.tensor_world, place.pipe_world, place.sequence_world
        check_ranks(config, place.data_world, place.sequence_world, place.pipe_world)
        size = config.rollout_size
        assert size is not None
        return BatchInfo(1, 1, *worlds, items=size.size)
    if given is not None or sizes:
        refuse_batch_sizes(config)
    if given is not None:
        return given
    if sizes:
        return BatchInfo(*ds_config.micro_and_accumulation(sizes, place.data_world), place.data_world)
    micro, _ = batch_sizes(config, place.data_world)
    return BatchInfo(micro, config.gradient_accumulation_steps, place.data_world)


def split_of(config: GearConfig, table: str, datasets: Mapping[str, Dataset]) -> dict[str, float]:
    """Return the split of a table: that of the config, else that of its data set."""
    data = config.resolved_tables[table].data
    given = dict(data.split) if data is not None else {}
    return given or (dict(datasets[table].split) if table in datasets else {})

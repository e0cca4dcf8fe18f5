"""Sizes of a table: steps and trajectories of a shard or an environment, and bounds of items."""

from __future__ import annotations

from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.schema import Schema

# A table whose config gives no number of trajectories has one per so many steps, and at least so
# many.
STEPS_PER_SLOT = 16
LEAST_SLOTS = 1024


def capacity_of(name: str, table: TableConfig, schema: Schema, count: int) -> tuple[int, int]:
    """Return the steps and trajectories that fit into one of `count` equal shards of a table.

    The table has a capacity.

    Raises:
        ConfigError: The longest trajectory or a group does not fit, or the bytes hold no step.
    """
    whole = table.num_steps(schema)
    if whole < 1:
        rule = f"must hold a step ({schema.row_bytes} bytes)"
        raise ConfigError(
            f"gear.tables.{name}.capacity_bytes", rule, table.capacity_bytes, "raise it"
        )
    slots = table.capacity_trajectories or min(whole, max(LEAST_SLOTS, whole // STEPS_PER_SLOT))
    steps = -(-whole // count)
    if table.max_length is not None and table.max_length > steps:
        holds = f"what each of {count} shards holds of capacity_steps ({whole})"
        rule = f"must be at most {steps}, {holds}"
        remedy = "raise capacity_steps, or use fewer shards"
        raise ConfigError(f"gear.tables.{name}.max_length", rule, table.max_length, remedy)
    slots_each = -(-slots // count)
    most = table.most_trajectories
    if most > slots_each:
        rule = f"must hold the {most} trajectories of a group in each of {count} shards"
        at = f"gear.tables.{name}.capacity_trajectories"
        given = table.capacity_trajectories
        raise ConfigError(at, rule, given, f"at least {most * count}")
    return steps, slots_each


def environment_sizes(name: str, table: TableConfig, schema: Schema) -> tuple[int, int]:
    """Return rows and slots per environment of a table to which steps are added one by one.

    They do not depend on the replicas. One slot is spare, so that no call frees a slot and uses it.

    Raises:
        ConfigError: The bytes do not hold two longest trajectories of each environment.
    """
    assert table.num_envs is not None
    assert table.max_length is not None
    steps, slots = capacity_of(name, table, schema, 1)
    envs = table.num_envs
    longest = table.max_length
    final = int(schema.has_final_row)
    if steps < 2 * envs * longest:
        rule = f"must hold {2 * envs * longest} steps, two longest trajectories per environment"
        raise ConfigError(
            f"gear.tables.{name}.capacity_bytes",
            rule,
            table.capacity_bytes,
            "raise it, or lower max_length or num_envs",
        )
    own_slots = max(-(-slots // envs), longest + 1)
    # A wrap around the environment's rows may skip as many as a longest trajectory has.
    rows = -(-steps // envs) + own_slots * final + longest + final
    # While a trajectory is open, its environment moves on by fewer rows than these, so that the
    # open trajectory is never evicted.
    least = longest + final + (1 + final) * (longest + 1)
    return max(rows, least), own_slots + 1


def device_sizes(name: str, table: TableConfig, schema: Schema) -> tuple[int, int]:
    """Return steps and slots of a table on a device, to which whole trajectories are added.

    Without `capacity_trajectories`, it has slots for its steps in trajectories of `max_length`.
    """
    steps, slots = capacity_of(name, table, schema, 1)
    if table.capacity_trajectories is None:
        slots = max(slots, -(-steps // (table.max_length or steps)))
    return steps, slots


def check_holds_batch(
    config: GearConfig, name: str, schema: Schema, stream: StreamSpec, count: int
) -> None:
    """Raise ConfigError if a table in `count` stores can never hold a global batch's items."""
    table = config.resolved_tables[name]
    sampler = stream.sampler
    samples = stream.num_samples(0)
    queue = table.rate_limiter is not None and table.rate_limiter.queue is not None
    if not (sampler.each_once or sampler.drops_tail):
        # The same item may be drawn again: without a limit, one item is enough for a batch.
        times = 0 if queue else table.max_times_sampled
        samples = -(-samples // times) if times else 0
    steps, slots = capacity_of(name, table, schema, count)
    held = {"capacity_steps": steps * count}  # by option; a trajectory has at least one step
    what = "steps"
    needed = samples
    if stream.rule.unit != "step":
        least = 1 if table.group is None else table.group.min_size or table.group.size
        held["capacity_trajectories"] = slots // least * least * count
        what = "trajectories"
        needed = samples * least
    for option, most in held.items():
        if most < needed:
            rule = f"must be at least the {what} of a batch ({needed})"
            remedy = "raise it, or lower the size of the batch: no batch would ever be complete"
            raise ConfigError(f"gear.tables.{name}.{option}", rule, most, remedy)


def num_items_of(config: GearConfig, name: str, schema: Schema, dataset: Dataset | None) -> int:
    """Return a bound of the items that a table ever holds, for any number of nodes."""
    by_step = config.item_sampler.unit == "step"
    if dataset is not None:
        whole = dataset.num_steps if dataset.part is None else dataset.part.steps
        return whole if by_step else dataset.num_trajectories_of_whole
    table = config.resolved_tables[name]
    if table.num_envs is not None and table.max_length is not None:
        return table.num_envs * environment_sizes(name, table, schema)[0 if by_step else 1]
    steps = table.num_steps(schema)
    slots = max(capacity_of(name, table, schema, 1)[1], -(-steps // (table.max_length or steps)))
    # A ring on a device has rows for one more trajectory; steps may lie in rows kept for final
    # ones.
    return steps + slots + (table.max_length or 0) if by_step else slots

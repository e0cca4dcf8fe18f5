"""Cross-checks of tables on devices (GPU memory): options, samplers, capacity, columns."""

from __future__ import annotations

from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.sampler_options import MixtureSampler, PrioritizedSampler
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import Schema

ON_HOST = 'give the table "placement": "host"'
_WHOLE_TRAJECTORIES = f"leave num_envs out and add whole trajectories, or {ON_HOST}"


def check_device_batches(config: GearOptions) -> None:
    """Raise ConfigError for options of batches or samplers that need tables in host memory."""
    names = "hindsight prefetch verify_every count_draws pipeline transfer"
    Part("gear", config).leave_out(names, "for a table on devices", ON_HOST)
    sampler = config.item_sampler
    is_mixture = isinstance(config.sampler, MixtureSampler)
    part = Part("gear.sampler.of" if is_mixture else "gear.sampler", sampler)
    if isinstance(config.sampler, MixtureSampler):
        Part("gear.sampler", config.sampler).leave_out("by_table", "for tables on devices", ON_HOST)
        for name, share in config.sampler.shares.items():
            if not isinstance(share, (int, float)):
                raise ConfigError(
                    f"gear.sampler.shares.{name}",
                    "must be a number for tables on devices: a captured step has fixed numbers "
                    "of samples",
                    share,
                    ON_HOST,
                )
    part.require(
        sampler.on_device,
        "kind",
        "must be one of uniform, length, prioritized, top_k, epoch for a table on devices",
        ON_HOST,
    )
    if any(config.resolved_tables[name].num_envs is not None for name in config.sampled_tables):
        when = "where steps are added one by one: an episode's values may come later"
        part.leave_out("where", when, "leave environments out with mask")
        if sampler.kind == "top_k":
            when = (
                "where steps are added one by one: rows are not in the order of ids, by which equal"
            )
            part.admit(
                "unit", ["trajectory"], f"{when} priorities are selected", _WHOLE_TRAJECTORIES
            )
    if isinstance(sampler, PrioritizedSampler):
        part.leave_out("decay", "for a table on devices", ON_HOST)
        part.require(
            isinstance(sampler.alpha, (int, float)),
            "alpha",
            "must be a number for a table on devices: all masses follow from it",
            ON_HOST,
        )


def check_device_table(config: GearOptions, name: str, table: TableConfig, part: Part) -> None:
    """Raise ConfigError for options of a table on devices that need host memory or contradict.

    Args:
        part: The table's options, with their name.
    """
    if name not in config.sampled_tables:
        part.admit(
            "placement",
            ["host"],
            "for a table that is not sampled",
            'leave the table out, or give it a share of a "kind": "mixture"',
        )
    if table.data is not None:
        return
    part.need("max_length", "for a table on devices", ON_HOST)
    when = "for a table on devices: it is a ring that evicts the oldest trajectories"
    part.admit("remove", ["fifo"], when, 'write "remove": "fifo"')
    on_host = "writers max_age version rate_limiter media ragged"
    part.leave_out(on_host, "for a table on devices", ON_HOST)
    if config.item_sampler.kind == "epoch":
        when = "with epochs of a table on devices: every item is drawn once in each"
        part.leave_out("max_times_sampled", when, "remove trajectories with remove_ or clear")
    n = 1 if config.n_step is None else config.n_step.n
    part.require(
        table.max_length != 1 or n == 1,
        "max_length",
        f"must be at least 2 with gear.n_step.n {n}: a return ends with its trajectory",
        f"set it to {n} or more and add pieces of that many steps, or single steps of "
        "environments (num_envs, add_steps_); or set gear.n_step.n to 1",
    )
    if table.num_envs is None:
        return
    when = "where steps are added one by one: an open trajectory would leave the table"
    part.leave_out("max_times_sampled", when, _WHOLE_TRAJECTORIES)
    # A step of an environment must not evict the environment's own open trajectory.
    longest = table.max_length or 1
    least = 2 * table.num_envs * longest
    part.require(
        table.capacity_steps is None or table.capacity_steps >= least,
        "capacity_steps",
        f"must be at least {least}: two trajectories of {part.at}.max_length per environment",
        "raise it, or lower max_length",
    )
    least = table.num_envs * (longest + 1)
    part.require(
        table.capacity_trajectories is None or table.capacity_trajectories >= least,
        "capacity_trajectories",
        f"must be at least {least}: other environments may begin as many while one trajectory is "
        "open",
        "leave it out",
    )


def check_device_columns(at: str, schema: Schema) -> None:
    """Raise ConfigError for an opaque or ragged column, which a table on devices cannot hold."""
    for column in schema:
        if not column.is_tensor:
            kind = "with max_values" if column.is_ragged else f"of dtype {column.dtype}"
            raise ConfigError(at, f"must not have a column {kind} on devices", column.name, ON_HOST)

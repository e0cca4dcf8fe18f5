"""Checks of a table in the memory of the ranks' own devices."""

from __future__ import annotations

from typing import Any

from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.sampler_options import MixtureSampler
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.errors import ConfigError

KINDS = ("uniform", "length", "prioritized", "top_k")
_ON_HOST = 'give the table "placement": "host"'


def check_device(config: GearOptions) -> None:
    """Reject options that need the host where a table lies on devices.

    Raises:
        ConfigError: One does, or an option that such a table needs is missing.
    """
    tables = config.resolved_tables
    for name, table in tables.items():
        at = f"gear.tables.{name}"
        if table.placement == "device":
            _check_table(table, at)
            _check_environments(table, at)
            _check_n_step(config, table, at)
            if len(tables) > 1 and name not in config.sampled_tables:
                rule = "must be sampled, alone or in a mixture, where it lies on devices"
                raise ConfigError(at, rule, None, "leave the table out, or give it a share")
        elif table.rows != "device":
            rule, remedy = "must not be given for a table in host memory", 'give it "placement": "device"'
            raise ConfigError(f"{at}.rows", rule, table.rows, remedy)
        elif table.num_envs is not None:
            rule, remedy = (
                "must not be given for a table in host memory",
                "use replay.vector_writer(num_envs)",
            )
            raise ConfigError(f"{at}.num_envs", rule, table.num_envs, remedy)
    if config.on_device:
        _check_mixture(config)
        _check_selection(config)


def _check_table(table: TableConfig, at: str) -> None:
    if table.data is not None:
        return
    needed: dict[str, Any] = {"max_length": table.max_length}
    for option, value in needed.items():
        if value is None:
            raise ConfigError(f"{at}.{option}", "must be given for a table on devices", None, _ON_HOST)
    if table.remove != "fifo":
        rule = 'must be "fifo" for a table on devices: it is a ring that evicts the oldest trajectories'
        raise ConfigError(f"{at}.remove", rule, table.remove, 'write "remove": "fifo"')
    if table.max_times_sampled and table.num_envs is not None:
        rule = "must not be given where steps are added one by one: an open trajectory would leave the table"
        remedy = f"leave num_envs out and add whole trajectories, or {_ON_HOST}"
        raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled, remedy)
    given = {
        "writers": table.writers,
        "max_age": table.max_age,
        "version": table.version,
        "rate_limiter": table.rate_limiter,
    }
    for option, wrong in given.items():
        if wrong:
            raise ConfigError(f"{at}.{option}", "must not be given for a table on devices", wrong, _ON_HOST)


def _check_mixture(config: GearOptions) -> None:
    """Reject a mixture whose numbers of samples a captured step could not contain."""
    sampler = config.sampler
    if not isinstance(sampler, MixtureSampler):
        if len(config.resolved_tables) > 1:
            rule = "must all be sampled where one lies on devices"
            raise ConfigError("gear.tables", rule, [*config.resolved_tables], 'use "kind": "mixture"')
        return
    for name, share in sampler.shares.items():
        table = config.resolved_tables[name]
        if table.placement != "device":
            rule = 'must be "device", as that of the other tables of the mixture'
            raise ConfigError(f"gear.tables.{name}.placement", rule, table.placement)
        if not isinstance(share, (int, float)):
            rule = "must be a number for tables on devices: a captured step has fixed numbers of samples"
            raise ConfigError(f"gear.sampler.shares.{name}", rule, share, _ON_HOST)
        if table.data is not None and table.data.split:
            rule = "must not be given in a mixture of tables on devices"
            remedy = "evaluate with a replay of this table alone"
            raise ConfigError(f"gear.tables.{name}.data.split", rule, table.data.split, remedy)


def _check_environments(table: TableConfig, at: str) -> None:
    """Reject sizes for which a step of an environment could evict its own open trajectory."""
    envs, longest = table.num_envs, table.max_length
    if envs is None or longest is None:
        return
    if table.capacity_steps is not None and table.capacity_steps < 2 * envs * longest:
        rule = f"must be at least {2 * envs * longest}: two trajectories of {at}.max_length per environment"
        raise ConfigError(f"{at}.capacity_steps", rule, table.capacity_steps, "raise it, or lower max_length")
    least = envs * (longest + 1)
    if table.capacity_trajectories is not None and table.capacity_trajectories < least:
        rule = f"must be at least {least}: other environments may begin as many while one trajectory is open"
        raise ConfigError(f"{at}.capacity_trajectories", rule, table.capacity_trajectories, "leave it out")


def _check_n_step(config: GearOptions, table: TableConfig, at: str) -> None:
    """Reject n-step returns that would all be of one step."""
    n = 1 if config.n_step is None else config.n_step.n
    if table.data is None and table.max_length == 1 and n > 1:
        rule = f"must be at least 2 with gear.n_step.n {n}: a return ends with its trajectory"
        remedy = (
            f"set it to {n} or more and add pieces of that many steps, or single steps of environments "
            "(num_envs, add_steps_); or set gear.n_step.n to 1"
        )
        raise ConfigError(f"{at}.max_length", rule, table.max_length, remedy)


def _check_selection(config: GearOptions) -> None:
    sampler = config.item_sampler
    if not sampler.on_device:
        rule = f"must be one of {', '.join(KINDS)} for a table on devices"
        raise ConfigError("gear.sampler.kind", rule, sampler.kind, _ON_HOST)
    by_steps = any(config.resolved_tables[name].num_envs is not None for name in config.sampled_tables)
    if sampler.where and by_steps:
        rule = "must not be given where steps are added one by one: an episode's values may come later"
        raise ConfigError("gear.sampler.where", rule, [*sampler.where], "leave environments out with mask")
    if sampler.kind == "top_k" and sampler.unit == "step" and by_steps:
        rule = (
            'must be "trajectory" where steps are added one by one: rows of several environments are not in '
            "the order of ids, by which equal priorities are selected"
        )
        remedy = f"leave num_envs out and add whole trajectories, or {_ON_HOST}"
        raise ConfigError("gear.sampler.unit", rule, sampler.unit, remedy)
    given = {
        "hindsight": config.hindsight,
        "prefetch": config.prefetch,
        "verify_every": config.verify_every,
        "count_draws": config.count_draws,
        "pipeline": config.pipeline,
        "transfer": None if config.transfer == type(config.transfer)() else config.transfer.model_dump(),
    }
    for option, value in given.items():
        if value:
            raise ConfigError(f"gear.{option}", "must not be given for a table on devices", value, _ON_HOST)
    sampler.check_on_device()

"""Advantages of a rollout batch: against a group, or by a critic (GAE, V-trace); whitening."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from deepspeed_gear.batching.group_advantages import ESTIMATORS, group_advantages
from deepspeed_gear.config.option_errors import config_error
from deepspeed_gear.config.options import AdvantageConfig
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import READ

EPSILON = 1e-8  # added to the variance of a column that is whitened


class GroupBaseline(NamedTuple):
    """What group-relative advantages are computed against; as `Rollout.advantages`."""

    group: str | None
    member: str | None
    count_masked: bool | None
    absent: float | None


def set_advantages(
    columns: RolloutColumns,
    kind: str,
    reward: str,
    name: str,
    baseline: GroupBaseline,
    options: dict[str, Any],
) -> np.ndarray:
    """Set a column to advantages, and return them; see `Rollout.advantages`. Collective."""
    if kind in ("gae", "vtrace"):
        of_groups = baseline._asdict()  # which `_estimator` refuses
        options |= {option: value for option, value in of_groups.items() if value is not None}
        return _set_estimates(columns, reward, name, _estimator(kind, options))
    if options:
        option, value = next(iter(options.items()))
        raise ConfigError(
            f"rollout.advantages.{option}",
            f"is not an option of {kind!r}",
            value,
            "leave it out for this estimator",
        )
    return _set_against_group(columns, kind, reward, name, baseline)


def _set_estimates(
    columns: RolloutColumns, reward: str, name: str, options: AdvantageConfig
) -> np.ndarray:
    """Set a column to advantages by a critic's values, and "value_target". [num_tokens]."""
    context = columns.context

    def estimate() -> np.ndarray:
        advantages, targets = _estimated(columns, options, reward)
        columns.set_column(name, advantages)
        columns.set_column("value_target", targets)
        return np.asarray(advantages)

    context.check_same(READ, (reward, options.model_dump()))
    return context.agree(estimate)


def _set_against_group(
    columns: RolloutColumns, kind: str, reward: str, name: str, baseline: GroupBaseline
) -> np.ndarray:
    """Set a column to the advantages of trajectories against their group. [n], float64."""
    context = columns.context
    settings = context.settings
    group = baseline.group
    member = settings.member if baseline.member is None else baseline.member
    count_masked = baseline.count_masked
    count_masked = settings.loss.count_masked if count_masked is None else count_masked
    absent = baseline.absent
    named = tuple(column for column in (group, member, reward) if column is not None)

    def check() -> None:
        if absent is not None and not (isinstance(absent, (int, float)) and np.isfinite(absent)):
            rule = "must be a finite number"
            raise ConfigError(
                "rollout.advantages.absent", rule, absent, "write 1.0, or leave it out"
            )
        columns.check_values(*named, where=None if absent is None else reward)

    def compare() -> np.ndarray:
        check()
        if kind not in ESTIMATORS:
            rule = f"must be one of {', '.join(ESTIMATORS)}, gae, vtrace"
            raise ConfigError("rollout.advantages: kind", rule, kind, "choose one of them")
        # Trajectories of tables without rewards count in no baseline.
        own = columns.has_column(reward).nonzero()[0]
        values = {column: columns.values_or_zero(column)[own] for column in named}
        counted = None if count_masked else columns.counts[own] > 0
        items = columns.trajectories.item[own]
        groups = items if group is None else values[group].astype(np.int64)
        members = np.arange(len(items)) if member is None else values[member].astype(np.int64)
        advantages = np.full(len(columns.trajectories), 0.0 if absent is None else absent)
        advantages[own] = group_advantages(kind, values[reward], groups, members, counted)
        columns.set_column(name, advantages)
        if context.rewards_warning is not None:
            rejected = columns.num_rejected
            context.rewards_warning.count(advantages[own], groups, reward, counted, rejected)
        return advantages

    # Reading is collective over nodes, so a wrong name must be raised on all ranks first.
    context.check_same(READ, (*named, count_masked, absent), check)
    return context.agree(compare)


def whiten_column(columns: RolloutColumns, name: str, values: np.ndarray, over: str) -> None:
    """Set a column to values normalised over the batch; see `Rollout.whiten`.

    Args:
        values: Values to normalise. [num_tokens], float64.
        over: "token" or "sequence".
    """
    counted = values[columns.mask]
    starts = columns.trajectories.starts
    if over == "sequence" and len(starts):
        sums = np.add.reduceat(np.where(columns.mask, values, 0.0), starts)
        has = columns.counts > 0
        counted = sums[has] / columns.counts[has]
    if len(counted):
        deviation = np.sqrt(np.var(counted, ddof=min(1, len(counted) - 1)) + EPSILON)
        values = (values - counted.mean()) / deviation
    columns.filled[name] = torch.from_numpy(values.astype(np.float32))


def _estimator(kind: str, options: dict[str, Any]) -> AdvantageConfig:
    """Return the options of "gae" or "vtrace"; gamma is 1 where they leave it out.

    Raises:
        ConfigError: An option does not exist, or its value is out of range.
    """
    try:
        return AdvantageConfig(**{"kind": kind, "gamma": 1.0, **options})
    except ValidationError as error:
        wrong = config_error(AdvantageConfig, error)
        at = wrong.name.replace("gear", "rollout.advantages", 1)
        raise ConfigError(at, wrong.rule, wrong.value, wrong.remedy) from None


def _estimated(columns: RolloutColumns, options: AdvantageConfig, reward: str) -> np.ndarray:
    """Estimate advantages and value targets by the op `advantages_`. [2, num_tokens], float32.

    A place of the loss mask is an action, the others take no time: after an action comes the next
    one of the trajectory, or its end; a reward at another place is added to that of the action
    before it. Collective over nodes.

    Raises:
        ConfigError: There is no such column.
        DataError: A late column is absent, or a trajectory that was not terminated has no value
            after it.
    """
    trajectories = columns.trajectories
    estimates = np.zeros((2, trajectories.num_tokens), np.float32)
    rewards = _rewards(columns, reward)
    value = columns.places(options.value)
    ends = _ends(columns)
    after = _values_after(columns, options, value, ends)
    actions = columns.mask.nonzero()[0]
    names = options.log_prob, options.behaviour_log_prob
    logs = [None if name is None else columns.places(name)[actions] for name in names]
    if not len(actions):
        return estimates
    # For lengths [2, 2] and the mask [0, 1, 0, 1], the actions are the places [1, 3].
    owner = np.repeat(np.arange(len(trajectories)), trajectories.lengths)  # [0, 0, 1, 1]
    of = owner[actions]  # trajectory of each action: [0, 1]
    is_last = np.append(of[1:] != of[:-1], True)  # in its trajectory: [True, True]
    latest = np.cumsum(columns.mask) - 1  # action at or before each place: [-1, 0, 0, 1]
    follows = (latest >= 0) & (of[latest] == owner)  # in its own trajectory: [0, 1, 0, 1]
    summed = np.bincount(latest[follows], rewards[follows], len(actions))
    last = trajectories.starts + trajectories.lengths - 1
    following = np.where(is_last, after[last[of]], np.roll(value[actions], -1))
    given = [summed, value[actions], following, is_last & ends[of], is_last, is_last | True]
    inputs = [None if x is None else torch.from_numpy(x)[None] for x in (*given, *logs)]
    outs = torch.zeros(2, 1, len(actions))
    columns.tables[0].table.ops.advantages_(*outs, *inputs, list(options.factors))
    estimates[:, actions] = outs[:, 0]
    return estimates


def _rewards(columns: RolloutColumns, name: str) -> np.ndarray:
    """Return the reward of each place; a trajectory's reward is at its last. [num_tokens]."""
    schema = columns.context.settings.schema
    trajectories = columns.trajectories
    if name in columns.filled or name not in schema or schema[name].rows != "1":
        return columns.places(name)
    rewards: np.ndarray = np.zeros(trajectories.num_tokens)
    rewards[trajectories.starts + trajectories.lengths - 1] = columns.values(name)
    return rewards


def _ends(columns: RolloutColumns) -> np.ndarray:
    """Return a mask of trajectories that were terminated: no value follows. [n], bool."""
    trajectories = columns.trajectories
    last = trajectories.starts + trajectories.lengths - 1
    ends = np.ones(len(last), bool)  # without flags trajectories are whole
    for role in ("truncated", "terminated"):
        flag = columns.context.settings.schema.role(role)
        if flag is not None:
            flags = [rows.steps(flag.name, 0, as_flags=True) for rows in columns.tables]
            ends = np.concatenate(flags)[last] == (role == "terminated")
    return np.asarray(ends & ~trajectories.is_cut)


def _values_after(
    columns: RolloutColumns, options: AdvantageConfig, value: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return the value of the state after each place; only last places are used. [num_tokens].

    Args:
        columns: Columns of the rollout batch.
        options: The columns of values.
        value: The value at each place. [num_tokens].
        ends: Mask of trajectories that need no value. [n], bool.
    """
    column = None
    offset = 0
    if options.value not in columns.filled:
        column, offset = columns.step_column(options.value)
    if options.next_value is not None:
        return columns.places(options.next_value)
    if column is not None and column.rows == "T+1":
        return columns.places(options.value, 1)
    if columns.context.settings.predicts and offset == 0:
        return value  # the last place is that of the last token: its value follows all actions
    if ends.all():
        return np.zeros(len(value))
    rule = "must have the value of the state after trajectories that were not terminated"
    remedy = "name the column of the values after each step as next_value"
    raise DataError(f"column {options.value!r}", rule, f"{(~ends).sum()} of {len(ends)}", remedy)

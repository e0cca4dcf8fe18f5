"""From the sampler's config to the streams that select."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from deepspeed_gear.batching.batch_info import TRAIN, BatchInfo
from deepspeed_gear.config import (
    CustomSampler,
    GearConfig,
    LengthSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecentSampler,
    ResolvedField,
    Sampler,
    TopKSampler,
    WeightedSampler,
    value_at,
)
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import most_mass_bits
from deepspeed_gear.sampling.anchors import AnchorRule, WindowSpan
from deepspeed_gear.sampling.mass_rules import (
    AgeWindow,
    Condition,
    CustomMasses,
    MassRule,
    PriorityRule,
    check_weights,
    key_of,
    weight_bits,
)
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.selection import StreamSpec

SPARE_CUTS = 4  # cuts that a rank may lag behind the fastest one of its node
LEAST_LOG = 1 << 16  # reports of priorities that may wait on a rank
KINDS = {"epoch": "epoch", "top_k": "top", "fifo": "oldest", "lifo": "newest"}


def mixture_of(config: GearConfig, info: BatchInfo, ops: Ops) -> Mixture | None:
    """Return which table each sample comes from, where there are several."""
    sampler = config.sampler
    if not isinstance(sampler, MixtureSampler):
        return None
    shares = [_schedule(share, f"gear.sampler.shares.{table}") for table, share in sampler.shares.items()]
    key = key_of(*config.sampled_tables, "mixture")
    return Mixture(config.sampled_tables, shares, info.global_batch, sampler.exact, config.seed, key, ops)


def stream_specs(
    config: GearConfig,
    table: str,
    fields: list[ResolvedField],
    split: Mapping[str, float],
    info: BatchInfo,
    dataset: Dataset | None,
    mixture: Mixture | None,
    num_items: int,
    num_shards: int = 1,
    weight_total: float | None = None,
    replicated: bool = False,
) -> list[StreamSpec]:
    """Return the training stream and one evaluation stream per split of a sampled table.

    Args:
        config: The config.
        table: Which table.
        fields: Of a whole batch.
        split: Fractions of the splits.
        info: Sizes of a batch.
        dataset: What this node has of the table's data set; None: the table has a capacity.
        mixture: How many samples come from each table; None for one.
        num_items: Most items that the table ever holds, all nodes together.
        num_shards: Nodes over which the table is spread.
        weight_total: Sum of the weights of all items where this node has a part only; None: it has all.
        replicated: Whether several nodes hold the whole table.

    Raises:
        DataError: The data set's weights are none.
    """
    sampler = config.item_sampler
    base = MassRule(sampler.unit, False, anchor_rule(config, fields), _conditions(sampler), dict(split))
    base = replace(base, late=_late_columns(sampler, fields))
    priorities = _priority_rule(sampler, config.prefetch, info, most_mass_bits(num_items))
    train = StreamSpec(
        name=TRAIN,
        kind=_kind(sampler),
        rule=_train_rule(sampler, base, dataset, weight_total),
        seed=config.seed,
        key=key_of(table, TRAIN),
        batch=info.global_batch,
        depth=config.prefetch + SPARE_CUTS,
        priorities=priorities,
        drop=getattr(sampler, "tail", "wrap") == "drop",
        count=None if mixture is None else partial(mixture.count, config.sampled_tables.index(table)),
        count_draws=config.count_draws,
        num_shards=num_shards,
        together=num_shards > 1 or (replicated and priorities is not None),
        offset=None if mixture is None else partial(mixture.offset, config.sampled_tables.index(table)),
    )
    specs = [train]
    for index, name in enumerate(sorted(split)):  # a pass visits each item once, whatever the sampler
        rule = replace(base, split_index=index + 1)
        batch = info.micro * info.data_world
        key = key_of(table, name)
        passes = StreamSpec(name, "pass", rule, config.seed, key, batch, SPARE_CUTS)
        specs.append(replace(passes, num_shards=num_shards, together=num_shards > 1))
    return specs


def _late_columns(sampler: Sampler, fields: Sequence[ResolvedField]) -> tuple[str, ...]:
    """Return the columns that batches read; those of them that come late must be there."""
    read = {
        column.name for field in fields for column in (field.column, field.hindsight) if column is not None
    }
    read.update(sampler.where)
    if isinstance(sampler, WeightedSampler):
        read.add(sampler.weight)
    return tuple(sorted(read))


def _kind(sampler: Sampler) -> str:
    kind: str = sampler.kind  # type: ignore[attr-defined]  # each of its subclasses has one
    return KINDS.get(kind, "stratified" if getattr(sampler, "stratified", False) else "random")


def _train_rule(
    sampler: Sampler, base: MassRule, dataset: Dataset | None, weight_total: float | None
) -> MassRule:
    if isinstance(sampler, WeightedSampler):
        if weight_total is None:
            weight_total = _total_weight(sampler.weight, base, dataset)
        return replace(base, weight=(sampler.weight, weight_bits(weight_total)))
    if isinstance(sampler, CustomSampler):
        return replace(base, custom=_custom(sampler))
    if isinstance(sampler, RecentSampler):
        within = sampler.within
        column, distance = (None, 0) if within is None else (within.column, within.distance)
        return replace(base, window=AgeWindow(sampler.newest, column, distance))
    return replace(base, by_length=isinstance(sampler, LengthSampler))


def _custom(sampler: CustomSampler) -> CustomMasses:
    """Make an instance of a program's own class.

    Raises:
        ConfigError: It cannot be imported or made.
    """
    made = imported(sampler.masses, "gear.sampler.masses")
    try:
        instance: CustomMasses = made(**sampler.options)
    except Exception as error:
        raise ConfigError(
            "gear.sampler.options", f"must make a {sampler.masses}", sampler.options, str(error)
        ) from error
    return instance


def total_weight(
    config: GearConfig, fields: list[ResolvedField], split: Mapping[str, float], dataset: Dataset
) -> float:
    """Return the sum of the weights of the items that a data set, or a part of one, holds; 0 without weights.

    Raises:
        DataError: The weights are none.
    """
    sampler = config.item_sampler
    if not isinstance(sampler, WeightedSampler):
        return 0.0
    base = MassRule(sampler.unit, False, anchor_rule(config, fields), _conditions(sampler), dict(split))
    return _total_weight(sampler.weight, base, dataset)


def _total_weight(name: str, base: MassRule, dataset: Dataset | None) -> float:
    """Return the sum of all weights; 0 where they are not known yet."""
    if dataset is None:
        return 0.0
    weights = as_numbers(dataset.columns[name], dataset.schema[name])
    check_weights(f"table {dataset.path}: column {name}", weights)
    anchors = base.anchors.num_anchors(dataset.lengths)
    counts = anchors if base.unit == "step" else (anchors > 0).astype(np.int64)
    return float(weights.astype(np.float64) @ counts)


def _priority_rule(sampler: Sampler, prefetch: int, info: BatchInfo, most_bits: int) -> PriorityRule | None:
    log_size = max(LEAST_LOG, 4 * info.micro * info.accumulation * (prefetch + 2))
    sizes = prefetch, log_size, most_bits
    if isinstance(sampler, TopKSampler):
        return PriorityRule(lambda _: 1.0, lambda _: 0.0, sampler.initial, None, *sizes)
    if not isinstance(sampler, PrioritizedSampler):
        return None
    alpha, beta = _schedule(sampler.alpha, "gear.sampler.alpha"), _schedule(sampler.beta, "gear.sampler.beta")
    every = sampler.alpha_every
    return PriorityRule(
        lambda key: alpha(key - key % every), beta, sampler.initial, sampler.normalize, *sizes
    )


def _schedule(schedule: Any, name: str) -> Callable[[int], float]:
    if isinstance(schedule, (int, float)):
        constant = float(schedule)
        return lambda _: constant
    return lambda key: value_at(schedule, key, name)


def _conditions(sampler: Sampler) -> tuple[Condition, ...]:
    return tuple(
        Condition(column, bounds.min, bounds.max, None if bounds.in_ is None else tuple(bounds.in_))
        for column, bounds in sampler.where.items()
    )


def anchor_rule(config: GearConfig, fields: list[ResolvedField]) -> AnchorRule:
    """Return which steps the sampler admits."""
    anchors = config.item_sampler.anchors
    if anchors == "fits":
        n = config.n_step.n if config.n_step is not None else 0
        windows = []
        for field in fields:
            if field.column is not None and field.column.rows == "1":
                continue
            extra = 1 if field.column is not None and field.column.rows == "T+1" else 0
            offset = n if field.offset == "n_step" else int(field.offset)
            windows.append(WindowSpan(offset, field.length or 1, extra))
        return AnchorRule.fits(windows)
    if isinstance(anchors, str):
        return {"all": AnchorRule.all, "start": AnchorRule.start, "end": AnchorRule.end}[anchors]()
    return AnchorRule.every(anchors.every)

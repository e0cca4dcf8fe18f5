"""Resolution of the batch streams of a sampled table: what the sampler admits, and the samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from deepspeed_gear.config import GearConfig, MixtureSampler, ResolvedField, SamplerOptions
from deepspeed_gear.config.cross_checks import refuse_split
from deepspeed_gear.config.table_options import GroupConfig
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.distributed.shard_placement import ShardPlacement
from deepspeed_gear.ops.constants import most_mass_bits
from deepspeed_gear.sampling.batch_info import TRAIN, BatchInfo
from deepspeed_gear.sampling.mass_rules import (
    AnchorRule,
    Condition,
    MassRule,
    WindowSpan,
    check_weights,
    key_of,
)
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.samplers import sampler_for
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.ordered_samplers import EvaluationPass
from deepspeed_gear.sampling.samplers.random_samplers import schedule
from deepspeed_gear.sampling.stream_spec import StreamSpec

SPARE_SELECTIONS = 4  # by which a rank may trail the fastest one of its node
MIN_LOG_SIZE = 1 << 16  # priority updates that may wait on a rank


def mixture_of(config: GearConfig, info: BatchInfo) -> Mixture | None:
    """Return the mixture of a config with several tables; None with one."""
    sampler = config.sampler
    if not isinstance(sampler, MixtureSampler):
        return None
    shares = [schedule(share, f"gear.sampler.shares.{table}") for table, share in sampler.shares.items()]
    return Mixture(config.sampled_tables, shares, info.global_batch)


def split_of(config: GearConfig, table: str, dataset: Dataset | None) -> dict[str, float]:
    """Return the split of a table: that of the config, else that of its data set."""
    data = config.resolved_tables[table].data
    given = dict(data.split) if data is not None else {}
    return given or ({} if dataset is None else dict(dataset.split))


def streams_of(
    config: GearConfig,
    name: str,
    dataset: Dataset | None,
    num_items: int,
    fields: Sequence[ResolvedField],
    info: BatchInfo,
    placement: ShardPlacement | None,
    weight_total: float,
) -> dict[str, StreamSpec]:
    """Return the training stream and one evaluation stream per split of a sampled table, by name.

    Args:
        dataset: This node's part of the table's data set; None: the table has a capacity.
        num_items: Most items that the table ever holds, all nodes together.
        placement: Of the tables on nodes; None: every replica samples a table of its own.
        weight_total: Sum of the weights of all items, all nodes together; 0 where it is not known yet.
    Raises:
        ConfigError: The table has groups and a split.
    """
    options, table = config.item_sampler, config.resolved_tables[name]
    group, rate, split = table.group, table.rate_limiter, split_of(config, name, dataset)
    admitted = _admitted(config, fields, split, group)
    if group is not None and split:
        refuse_split(f"gear.tables.{name}", split)
    sampler, waiting = sampler_for(options), 4 * info.micro * info.accumulation * (config.prefetch + 2)
    bits = most_mass_bits(num_items)
    scope = SamplerScope(admitted, config.prefetch, max(MIN_LOG_SIZE, waiting), bits, weight_total)
    sampling = sampler.spec(scope)
    is_spread, num_holders = False, 1
    if placement is not None:
        is_spread, num_holders = name in placement.spread, len(placement.order)
    num_shards = num_holders if is_spread else 1
    is_replicated = num_holders > 1 and not is_spread
    mixture, index = mixture_of(config, info), config.sampled_tables.index(name)
    train = StreamSpec(
        name=TRAIN,
        sampler=sampler,
        sampling=sampling,
        seed=config.seed,
        key=key_of(name, TRAIN),
        batch=info.global_batch,
        depth=config.prefetch + SPARE_SELECTIONS,
        count=None if mixture is None else partial(mixture.count, index),
        count_draws=config.count_draws,
        num_shards=num_shards,
        together=is_spread or (is_replicated and sampling.priorities is not None),
        offset=None if mixture is None else partial(mixture.offset, index),
        rate_timeout_s=config.timeout_s if rate is None else rate.timeout_s,
        most_trajectories=1 if group is None else group.max_trajectories or group.size,
    )
    specs = {TRAIN: train}
    for number, part in enumerate(sorted(split)):
        passes = EvaluationPass()
        of_part = replace(admitted, split_index=number + 1)
        specs[part] = StreamSpec(
            name=part,
            sampler=passes,
            sampling=passes.spec(replace(scope, admitted=of_part)),
            seed=config.seed,
            key=key_of(name, part),
            batch=info.micro * info.data_world,
            depth=SPARE_SELECTIONS,
            num_shards=num_shards,
            together=is_spread,
        )
    return specs


def _admitted(
    config: GearConfig,
    fields: Sequence[ResolvedField],
    split: Mapping[str, float],
    group: GroupConfig | None = None,
) -> MassRule:
    """Return which trajectories and anchors the config admits, each with mass 1."""
    options = config.item_sampler
    return MassRule(
        unit=options.unit,
        by_length=False,
        anchors=anchor_rule(config, fields),
        where=tuple(
            Condition(column, bounds.min, bounds.max, None if bounds.in_ is None else tuple(bounds.in_))
            for column, bounds in options.where.items()
        ),
        split=dict(split),
        late=read_columns(options, fields, group),
    )


def read_columns(
    options: SamplerOptions, fields: Sequence[ResolvedField], group: GroupConfig | None
) -> tuple[str, ...]:
    """Return the columns that batches read, or that groups need: late columns among them must be filled."""
    read = {
        column.name for field in fields for column in (field.column, field.hindsight) if column is not None
    }
    read.update(options.where)
    if options.weight_column is not None:
        read.add(options.weight_column)
    if group is not None:
        read.update((*group.needs, *group.where))
    return tuple(sorted(read))


def weight_total(config: GearConfig, fields: Sequence[ResolvedField], table: str, dataset: Dataset) -> float:
    """Return the sum of the weights of the items of a data set, or of a part; 0 without weights.

    Raises:
        DataError: They are negative, infinite or NaN.
    """
    column = config.item_sampler.weight_column
    if column is None:
        return 0.0
    admitted = _admitted(config, fields, split_of(config, table, dataset))
    weights = as_numbers(dataset.columns[column], dataset.schema[column])
    check_weights(f"table {dataset.path}: column {column}", weights)
    anchors = admitted.anchors.num_anchors(dataset.lengths)
    counts = anchors if admitted.unit == "step" else (anchors > 0).astype(np.int64)
    return float(weights.astype(np.float64) @ counts)


def anchor_rule(config: GearConfig, fields: Sequence[ResolvedField]) -> AnchorRule:
    """Return the rule of which steps the sampler admits as anchors."""
    anchors = config.item_sampler.anchors
    if anchors == "fits":
        n = config.n_step.n if config.n_step is not None else 0
        windows = []
        for field in fields:
            if field.column is not None and field.column.rows == "1":
                continue
            extra = 1 if field.column is not None and field.column.rows == "T+1" else 0
            offset = field.first + (n if field.follows else 0)
            windows.append(WindowSpan(offset, field.length or 1, extra))
        return AnchorRule.fits(windows)
    if isinstance(anchors, str):
        rules = {"all": AnchorRule(), "start": AnchorRule(most=1), "end": AnchorRule(most=1, from_end=1)}
        return rules[anchors]
    return AnchorRule(stride=anchors.every)

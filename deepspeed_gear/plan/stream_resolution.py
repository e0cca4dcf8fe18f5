"""Resolution of batch streams: their splits, samplers, and options of items and anchors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField, SamplerOptions
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.config.sampler_options import AnchorsConfig, MixtureSampler, WhereConfig
from deepspeed_gear.config.table_checks import refuse_split
from deepspeed_gear.config.table_options import GroupConfig
from deepspeed_gear.config.types import dotted
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.distributed.shard_placement import ShardPlacement
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import most_mass_bits
from deepspeed_gear.plan.table_sizes import num_items_of
from deepspeed_gear.sampling.batch_sizes import TRAIN, BatchInfo
from deepspeed_gear.sampling.conditions import Condition
from deepspeed_gear.sampling.mass_rules import AnchorRule, MassRule, check_finite, random_key_of
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.kinds import EvaluationPass, sampler_for, schedule
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.schema import Schema

SPARE_SELECTIONS = 4  # by which a rank may trail the fastest one of its node
MIN_LOG_SIZE = 1 << 16  # priority updates that may wait on a rank


def mixture_of(config: GearConfig, info: BatchInfo) -> Mixture | None:
    """Return the mixture of a config with several tables; None with one."""
    sampler = config.sampler
    if not isinstance(sampler, MixtureSampler):
        return None
    shares = [
        schedule(share, f"gear.sampler.shares.{table}") for table, share in sampler.shares.items()
    ]
    return Mixture(config.sampled_tables, shares, info.global_batch)


def split_of(config: GearConfig, table: str, dataset: Dataset | None) -> dict[str, float]:
    """Return the split of a table: that of the config, else that of its data set."""
    data = config.resolved_tables[table].data
    given = dict(data.split) if data is not None else {}
    return given or ({} if dataset is None else dict(dataset.split))


def streams_of(
    config: GearConfig,
    name: str,
    schema: Schema,
    dataset: Dataset | None,
    fields: Sequence[ResolvedField],
    info: BatchInfo,
    placement: ShardPlacement | None,
    weight_total: float,
) -> dict[str, StreamSpec]:
    """Return the training stream and an evaluation stream per split of a sampled table, by name.

    Args:
        placement: Shards of the tables; None: every replica samples from a table of its own.
        weight_total: Sum of the item weights over all nodes; 0: not known yet.
    Raises:
        ConfigError: The table has groups and a split.
    """
    options = config.sampler_of(name)
    table = config.resolved_tables[name]
    admitted = admission(config, name, schema, fields, dataset)
    split = admitted.split
    if table.group is not None and split:
        refuse_split(f"gear.tables.{name}", split)
    sampler = sampler_for(options)
    waiting = 4 * info.micro * info.accumulation * (config.prefetch + 2)
    bits = most_mass_bits(num_items_of(config, name, schema, dataset))
    scope = SamplerScope(admitted, config.prefetch, max(MIN_LOG_SIZE, waiting), bits, weight_total)
    sampling = sampler.spec(scope)
    is_spread = False
    num_holders = 1
    if placement is not None:
        is_spread = name in placement.spread
        num_holders = len(placement.order)
    num_shards = num_holders if is_spread else 1
    is_replicated = num_holders > 1 and not is_spread
    mixture = mixture_of(config, info)
    index = config.sampled_tables.index(name)
    stream = partial(StreamSpec, seed=config.seed, num_shards=num_shards)
    train = stream(
        name=TRAIN,
        sampler=sampler,
        sampling=sampling,
        random_key=random_key_of(name, TRAIN),
        batch=info.global_batch,
        depth=config.prefetch + SPARE_SELECTIONS,
        count=None if mixture is None else partial(mixture.count, index),
        # Beside a table with prompts, whose batches do not wait for it, this one gives its share as
        # soon as it has groups.
        is_optional=table.prompts is None
        and any(t.prompts for t in config.resolved_tables.values()),
        count_draws=config.count_draws,
        together=is_spread or (is_replicated and sampling.priorities is not None),
        offset=None if mixture is None else partial(mixture.offset, index),
        rate_timeout_s=config.items_timeout_s(name),
        most_trajectories=table.most_trajectories,
    )
    specs = {TRAIN: train}
    for number, part in enumerate(sorted(split)):
        passes = EvaluationPass()
        of_part = replace(admitted, split_index=number + 1)
        specs[part] = stream(
            name=part,
            sampler=passes,
            sampling=passes.spec(replace(scope, admitted=of_part)),
            random_key=random_key_of(name, part),
            batch=info.micro * info.data_world,
            depth=SPARE_SELECTIONS,
            together=is_spread,
        )
    return specs


def conditions_of(where: Mapping[str, WhereConfig], schema: Schema) -> tuple[Condition, ...]:
    """Return the conditions of an option `where`, in the dtypes of the columns."""
    conditions = []
    for name, bounds in where.items():
        nearest = schema[name].nearest
        low = None if bounds.min is None else nearest(bounds.min)
        high = None if bounds.max is None else nearest(bounds.max)
        among = None if bounds.in_ is None else tuple(map(nearest, bounds.in_))
        conditions.append(Condition(name, low, high, among))
    return tuple(conditions)


def admission(
    config: GearConfig,
    table: str,
    schema: Schema,
    fields: Sequence[ResolvedField],
    dataset: Dataset | None,
) -> MassRule:
    """Return the rule for the trajectories and anchors that a table's config admits."""
    options = config.sampler_of(table)
    return MassRule(
        unit=options.unit,
        by_length=False,
        anchors=anchor_rule(config, fields),
        where=conditions_of(options.where, schema),
        split=split_of(config, table, dataset),
        late=read_columns(options, fields, config.resolved_tables[table].group),
    )


def read_columns(
    options: SamplerOptions, fields: Sequence[ResolvedField], group: GroupConfig | None
) -> tuple[str, ...]:
    """Return the columns that batches read or groups need: late ones must be filled first."""
    columns = (
        column for field in read_fields(fields) for column in (field.column, field.hindsight)
    )
    read = {column.name for column in columns if column is not None}
    read.update((*options.where, *options.columns.values()))
    if group is not None:
        read.update((*group.needs, *group.where))
    return tuple(sorted(read))


def weight_total(
    config: GearConfig, fields: Sequence[ResolvedField], table: str, dataset: Dataset
) -> float:
    """Return the sum of a data set's item weights; 0 if the sampler has no weights.

    Raises:
        DataError: A weight is negative or not finite.
    """
    column = config.sampler_of(table).columns.get("weight")
    if column is None:
        return 0.0
    admitted = admission(config, table, dataset.schema, fields, dataset)
    weights = as_numbers(dataset.columns[column], dataset.schema[column])
    check_finite(f"table {dataset.path}: column {column}: weight", weights)
    anchors = admitted.anchors.num_anchors(dataset.lengths)
    counts = anchors if admitted.unit == "step" else (anchors > 0).astype(np.int64)
    return float(weights.astype(np.float64) @ counts)


def check_compressed(
    config: GearConfig, datasets: Mapping[str, Dataset], spread: Iterable[str]
) -> None:
    """Raise ConfigError unless compressed columns are read only by windows on a host."""
    remedy = (
        "make the data set without --compress; on several nodes replicate it, or divide it by "
        "gear split"
    )
    for name, dataset in datasets.items():
        if not dataset.compressed:
            continue
        at = dotted("gear", "tables", name)
        on_device = config.resolved_tables[name].placement == "device"
        checks = [
            (f"{at}.placement", 'must be "host"', on_device),
            (f"{at}.data.replicate", "must be true on several nodes", name in spread),
            ("gear.pack", "must not be given", config.pack is not None),
            ("gear.hindsight", "must not be given", config.hindsight is not None),
        ]
        for option, must, is_wrong in checks:
            if is_wrong:
                columns = list(dataset.compressed)
                raise ConfigError(option, f"{must} for compressed columns", columns, remedy)


def anchor_rule(config: GearConfig, fields: Sequence[ResolvedField]) -> AnchorRule:
    """Return the rule for the steps that may be anchors."""
    anchors = config.item_sampler.anchors
    if anchors == "fits":
        anchors = AnchorsConfig(pad_before=0, pad_after=0)
    if isinstance(anchors, AnchorsConfig):
        n = config.n_step.n if config.n_step is not None else 0
        windows = []
        for field in fields:
            if field.column is not None and field.column.rows == "1":
                continue
            # Windows [0, 4) of a column with T+1 rows fit at every anchor up to step T - 3.
            extra = 1 if field.column is not None and field.column.rows == "T+1" else 0
            offset = field.first + (n if field.follows else 0)
            windows.append((offset, field.length or 1, extra))
        return AnchorRule.bounded(windows, anchors.pad_before, anchors.pad_after, anchors.every)
    rules = {
        "all": AnchorRule(),
        "start": AnchorRule(most=1),
        "end": AnchorRule(most=1, from_end=1),
    }
    return rules[anchors]

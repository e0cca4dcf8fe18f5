"""Specification of a batch stream, from which its memory is laid out; from the config, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from deepspeed_gear.config import GearConfig, MixtureSampler, ResolvedField, SamplerOptions
from deepspeed_gear.config.cross_checks import refuse_split
from deepspeed_gear.config.table_options import GroupConfig
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.ops.constants import most_mass_bits
from deepspeed_gear.sampling.anchors import AnchorRule, WindowSpan
from deepspeed_gear.sampling.batch_info import TRAIN, BatchInfo
from deepspeed_gear.sampling.mass_rules import Condition, MassRule, PriorityRule, check_weights, key_of
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.samplers import sampler_for
from deepspeed_gear.sampling.samplers.base import NativeDraw, Sampler, SamplerScope, SamplerSpec
from deepspeed_gear.sampling.samplers.epoch import EvaluationPass
from deepspeed_gear.sampling.samplers.prioritized import schedule
from deepspeed_gear.timeouts import DEFAULT_TIMEOUT_S

FAILURE_WORDS = 256  # of the record of a failed selection, with its text


@dataclass(frozen=True)
class StreamSpec:
    """A batch stream: the global batches of one purpose, sampled from one table."""

    name: str  # "train", or the name of a split
    sampler: Sampler
    sampling: SamplerSpec  # masses and draw of the sampler
    seed: int
    key: int  # 32-bit key of table and stream, a part of the counter of every random word
    batch: int  # samples of a global batch, which are items
    depth: int  # selections that the ring keeps
    # Samples of a global batch by its number, at most `batch`; None: always `batch`.
    count: Callable[[int], int] | None = None
    count_draws: bool = False  # count how often each item was drawn
    num_shards: int = 1  # nodes over which the table is spread
    together: bool = False  # whether several nodes make its selections together
    # By global batch, index of its first sample among those of all tables; None: 0.
    offset: Callable[[int], int] | None = None
    rate_timeout_s: float = DEFAULT_TIMEOUT_S  # longest wait for the rate limiter
    most_trajectories: int = 1  # of an item: more than 1 where items are groups

    @property
    def rule(self) -> MassRule:
        """Masses of the items."""
        return self.sampling.rule

    @property
    def priorities(self) -> PriorityRule | None:
        """How masses follow priorities; None: masses are those of the rule."""
        return self.sampling.priorities

    @property
    def is_stratified(self) -> bool:
        """Whether sample j of B is drawn from the j-th of B equal parts of the total mass."""
        return self.sampling.native is NativeDraw.STRATIFIED

    @property
    def by_age(self) -> bool:
        """Whether masses are kept in the order of age."""
        return self.sampling.by_age or self.rule.window is not None

    @property
    def by_group(self) -> bool:
        """Whether items are groups."""
        return self.rule.unit == "group"

    @property
    def most_records(self) -> int:
        """Trajectories that a selection holds at most."""
        return self.batch * self.most_trajectories

    @property
    def at(self) -> str:
        """Prefix of the names of its regions."""
        return f"stream/{self.name}/"

    def num_samples(self, key: int) -> int:
        """Return the samples of a global batch."""
        return self.batch if self.count is None else self.count(key)

    def describe(self) -> dict[str, Any]:
        """Return the description of the stream for readers of the store; JSON-able."""
        most_bits = {} if self.priorities is None else {"most_bits": self.priorities.most_bits}
        kind = self.sampler.kind if self.count is None else f"mixture of {self.sampler.kind}"
        sampler = {"kind": kind, "walks": self.sampler.walks}
        return {**sampler, **self.rule.describe(), **most_bits}


SPARE_SELECTIONS = 4  # by which a rank may trail the fastest one of its node
MIN_LOG_SIZE = 1 << 16  # priority updates that may wait on a rank


def mixture_of(config: GearConfig, info: BatchInfo) -> Mixture | None:
    """Return the mixture of a config with several tables; None with one."""
    sampler = config.sampler
    if not isinstance(sampler, MixtureSampler):
        return None
    shares = [schedule(share, f"gear.sampler.shares.{table}") for table, share in sampler.shares.items()]
    return Mixture(config.sampled_tables, shares, info.global_batch)


@dataclass(frozen=True)
class SampledTable:
    """A table that is sampled, as an input of its streams' specs."""

    name: str
    split: Mapping[str, float]  # fractions of the splits
    dataset: Dataset | None  # this node's part of the table's data set; None: the table has a capacity
    num_items: int  # most items that the table ever holds, all nodes together
    num_shards: int = 1  # nodes over which the table is spread
    # Sum of the weights of all items where this node has only a part; None: it has all.
    weight_total: float | None = None
    replicated: bool = False  # whether several nodes hold the whole table


def stream_specs(
    config: GearConfig,
    table: SampledTable,
    fields: Sequence[ResolvedField],
    info: BatchInfo,
    mixture: Mixture | None = None,
) -> list[StreamSpec]:
    """Return the training stream and one evaluation stream per split of a sampled table.

    Raises:
        DataError: The data set's weights are negative, infinite or NaN.
        ConfigError: The table has groups and a split.
    """
    options = config.item_sampler
    group = config.resolved_tables[table.name].group
    admitted = _admitted(config, fields, table.split, group)

    def total_weight(column: str) -> float:
        if table.weight_total is not None:
            return table.weight_total
        return 0.0 if table.dataset is None else sum_of_weights(column, admitted, table.dataset)

    if group is not None and table.split:
        refuse_split(f"gear.tables.{table.name}", dict(table.split))
    sampler, waiting = sampler_for(options), 4 * info.micro * info.accumulation * (config.prefetch + 2)
    bits = most_mass_bits(table.num_items)
    scope = SamplerScope(admitted, config.prefetch, max(MIN_LOG_SIZE, waiting), bits, total_weight)
    sampling, rate = sampler.spec(scope), config.resolved_tables[table.name].rate_limiter
    spread, index = table.num_shards > 1, 0 if mixture is None else config.sampled_tables.index(table.name)
    train = StreamSpec(
        name=TRAIN,
        sampler=sampler,
        sampling=sampling,
        seed=config.seed,
        key=key_of(table.name, TRAIN),
        batch=info.global_batch,
        depth=config.prefetch + SPARE_SELECTIONS,
        count=None if mixture is None else partial(mixture.count, index),
        count_draws=config.count_draws,
        num_shards=table.num_shards,
        together=spread or (table.replicated and sampling.priorities is not None),
        offset=None if mixture is None else partial(mixture.offset, index),
        rate_timeout_s=config.timeout_s if rate is None else rate.timeout_s,
        most_trajectories=1 if group is None else group.max_trajectories or group.size,
    )
    specs = [train]
    for number, name in enumerate(sorted(table.split)):
        passes = EvaluationPass()
        split = replace(admitted, split_index=number + 1)
        specs.append(
            StreamSpec(
                name=name,
                sampler=passes,
                sampling=passes.spec(replace(scope, admitted=split)),
                seed=config.seed,
                key=key_of(table.name, name),
                batch=info.micro * info.data_world,
                depth=SPARE_SELECTIONS,
                num_shards=table.num_shards,
                together=spread,
            )
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


def weight_total(
    config: GearConfig, fields: Sequence[ResolvedField], split: Mapping[str, float], dataset: Dataset
) -> float:
    """Return the sum of the weights of the items of a data set, or of a part; 0 without weights."""
    column = config.item_sampler.weight_column
    return 0.0 if column is None else sum_of_weights(column, _admitted(config, fields, split), dataset)


def sum_of_weights(column: str, admitted: MassRule, dataset: Dataset) -> float:
    """Return the sum of the weights of all items; raise a DataError if they are no weights."""
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
        return {"all": AnchorRule.all, "start": AnchorRule.start, "end": AnchorRule.end}[anchors]()
    return AnchorRule.every(anchors.every)

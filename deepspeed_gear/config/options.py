"""Options of the `gear` section and their defaults; their texts make docs/reference/config*.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field, field_validator, model_validator

from deepspeed_gear.config import types as t
from deepspeed_gear.config.sampler_options import (
    ItemSampler,
    MixtureSampler,
    SamplerConfig,
    UniformSampler,
)
from deepspeed_gear.config.table_options import DataConfig, TableConfig
from deepspeed_gear.timeouts import DEFAULT_TIMEOUT_S


class FieldConfig(t.GearModel):
    """One entry of a batch: a column seen through a window that stands at the sample's anchor."""

    column: t.Name | None = None
    """The stored column. null: the column with the field's name."""
    derived: Literal["return_to_go", "timestep", "position", "advantage", "value_target"] | None = (
        None
    )
    """A quantity that is computed during the gather, in place of a stored column: the sum of the
    rewards from a step on, the number of each step in its trajectory, its place in the window (0 to
    length - 1, padding included), or what `gear.advantage` estimates. A field with one of these
    names is derived by default if the table has no such column. A column of the role return_to_go
    or timestep is read instead of deriving it.
    """
    offset: t.Offset | None = None
    """First step of the window, relative to the anchor. "n_step" is the step that an n-step return
    bootstraps from: `n_step.n` steps later, or fewer where the trajectory ends before; the column
    must have T+1 rows, or next observations, whose row of the same state is taken. null: 0. In
    packed batches of a table with tokens, null is 1 for its other columns with a row per step, so
    that they stand where the token is predicted.
    """
    length: t.Steps | None = None
    """Steps of the window. null: a single step, without a time axis."""
    align: Literal["in_place", "left", "right"] = "in_place"
    """Where the real steps stand in a window that extends beyond its trajectory: at their own
    places, or moved to the left or right end.
    """
    pad: t.Pad = "zero"
    """Value of the padded steps: "zero", "edge" (the nearest real step), or a number in the units
    of the batch.
    """
    absent: t.Number | None = None
    """In a packed mixture, the value in trajectories of tables that do not have the column, in the
    units of the batch. null: every table has it.
    """
    normalize: Literal["mean_std", "min_max", "quantile"] | None = None
    """"mean_std" normalises to mean 0 and deviation 1, "min_max" to [-1, 1]; "quantile" maps the 1%
    and 99% quantiles to -1 and 1, without clipping. The statistics are those of the training split;
    for a table without a data set, those of all rows ever added, as of each global batch (not for
    "quantile").
    """
    scale: t.Float = 1.0
    """Factor that is applied after normalisation."""
    hindsight: t.Name | None = None
    """Makes the field a goal: in samples that `gear.hindsight` relabels, it holds the drawn row of
    this column, converted in the same way. The column has the same dtype and shape; the field has
    no `length`.
    """
    dtype: t.DtypeName | None = Field(default=None, alias="as")
    """Type in the batch. "engine" is the type that the engine computes in; it is not admitted for
    rewards, returns, flags and derived fields, which losses are computed from and which keep at
    least float32, nor for integers that are neither normalised nor scaled. null: the column's own
    type, but float32 for float64, and for integers that are normalised or scaled.
    """


class NStepConfig(t.GearModel):
    """N-step returns: adds `return_n`, `discount` and `steps_n` to the batch."""

    n: t.Steps
    """Number of rewards that are summed; fewer where the trajectory ends before."""
    gamma: t.Gamma
    """Discount per step."""


class AdvantageConfig(t.GearModel):
    """Estimation of the fields `advantage` and `value_target` of windows, by GAE or V-trace.

    Returns beyond a window are bootstrapped: after its last step, at a truncation and at the end of
    a trajectory, by the value of the state after the step. After a termination they are 0. Source:
    Schulman et al., "High-Dimensional Continuous Control Using GAE", 2016; Espeholt et al.,
    "IMPALA", 2018.
    """

    kind: Literal["gae", "vtrace"]
    """"gae": generalised advantage estimation; the value target is advantage + value, the
    lambda-return. "vtrace": clipped ratios of probabilities correct both for the policy that acted.
    """
    value: t.Name
    """The column of state values. It has T+1 rows, the last one for the state after the last step;
    or T rows, with `next_value`.
    """
    next_value: t.Name | None = None
    """Where `value` has T rows, the column with the value of the state after each step."""
    gamma: t.Gamma
    """Discount per step."""
    lam: t.Gamma = 1.0
    """Lambda, by which the weight of longer returns decays. 1: they do not decay."""
    log_prob: t.Name | None = None
    """With "vtrace": the column of the actions' log-probabilities under the policy that is trained,
    such as a late column.
    """
    behaviour_log_prob: t.Name | None = None
    """With "vtrace": the column of the actions' log-probabilities under the policy that acted."""
    rho_bar: t.Positive = 1.0
    """With "vtrace": upper bound of the ratio that multiplies a step's own error."""
    c_bar: t.Positive = 1.0
    """With "vtrace": upper bound of the ratio that multiplies the errors of the steps after it."""

    @model_validator(mode="after")
    def _suits_its_kind(self) -> Any:
        defaults = {"log_prob": None, "behaviour_log_prob": None, "rho_bar": 1.0, "c_bar": 1.0}
        for option, default in defaults.items():
            value = getattr(self, option)
            if self.kind == "gae" and value != default:
                raise t.conflict('must not be given with "kind": "gae"', "drop it", option, value)
            if self.kind == "vtrace" and value is None:
                raise t.conflict(
                    'must be given with "kind": "vtrace"',
                    "V-trace needs the log-probabilities of both policies",
                    option,
                )
        return self

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """Gamma, lambda, rho_bar and c_bar, as the op `advantages_` takes them."""
        return self.gamma, self.lam, self.rho_bar, self.c_bar


class HindsightConfig(t.GearModel):
    """Hindsight relabelling: samples whose goal is replaced by one that their trajectory achieved.

    Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.
    """

    strategy: Literal["future", "final", "episode"] = "future"
    """Row of the achieved goals that a relabelled sample takes: "future", any row after the
    anchor's, all equally likely (a sample without one keeps its goal); "final", the last row;
    "episode", any row.
    """
    fraction: t.Gamma = 0.8
    """Probability that a sample is relabelled; the sample number keys the draw."""
    reward: Annotated[t.Text, t.Words('"module:function"')] | None = None
    """"module:function", importable on every rank. It is called with each batch and returns the new
    values of the field of the reward column.
    """


class PipelineConfig(t.GearModel):
    """The fields that the first and the last stage of a pipeline read.

    A name is that of a field, of what `n_step` adds, `mask.<field>`, `learns.<field>` (see
    `burn_in`), or one of `is_weight`, `trajectory_id`, `anchor`, `sample_number`, `sample_index`,
    `probability`, `epoch`, `valid`, `relabelled` and `goal_step`.
    """

    inputs: Annotated[list[t.Text], MinLen(1)]
    """Inputs of the first stage's layers: one tensor, or a tuple of them in this order."""
    labels: Annotated[list[t.Text], MinLen(1)]
    """Inputs of the loss function on the last stage: one tensor, or a tuple of them."""


class PackPadConfig(t.GearModel):
    """Padding at the end of a micro batch."""

    to: Literal["multiple", "step", "budget"] = "multiple"
    """"multiple": pad to the next multiple; "step": to the same length on all ranks in each micro
    step, which DeepSpeed's experts need; "budget": to `gear.pack.tokens`, rounded down to a
    multiple, for compiled models.
    """
    multiple: Annotated[t.Int, Ge(1), Le(1 << 20)] = 128
    """The length of every micro batch is a multiple of this number."""


class PackConfig(t.GearModel):
    """Packed micro batches: whole trajectories in one sequence, without padding between them."""

    tokens: t.Steps
    """Most steps of a micro batch, including its padding."""
    # The costs of a batch are summed in 62 bits.
    cost: Annotated[
        list[Annotated[t.Int, Ge(0), Lt(2**32)]], t.Words("two whole numbers [c1, c2]")
    ] = Field(default=[1, 0])
    """Cost of training a trajectory of l steps, c1 * l + c2 * l * l, by which micro batches are
    balanced. For a transformer of hidden size h: [6 * h, 1].
    """
    pad: PackPadConfig = PackPadConfig()
    """Padding at the end of a micro batch."""
    max_trajectories: Annotated[t.Int, Ge(1), Lt(1 << 31)] | None = None
    """Most trajectories of a micro batch; 1 for models that carry state from one trajectory of a
    pack to the next, such as Mamba. null: as many as fit into `tokens`.
    """
    plan_width: t.Count | None = None
    """Number of ranks that packs are planned for, a multiple of the replicas. Packs are then equal
    for any number of replicas that divides it. null: the number of replicas.
    """
    too_long: Literal["refuse", "truncate"] = "refuse"
    """Treatment of trajectories longer than `tokens`. "refuse": the table needs a `max_length`, so
    that a writer gets the error. "truncate": their first steps are trained, and
    `rollout.advantages` bootstraps after them.
    """

    prefix: Literal["own", "share"] = "own"
    """First steps that trajectories of a group have in common, in a micro batch. "own": each
    trajectory has all of its steps. "share": equal steps before a trajectory's first loss token,
    such as the prompt or an agent's context, are there once, and all that have them attend to them;
    `micro.model_inputs` has the mask.
    """

    @field_validator("cost")
    @classmethod
    def _two(cls, cost: list[int]) -> list[int]:
        if len(cost) != 2 or not any(cost):
            raise t.refuse("must be two whole numbers [c1, c2], not both 0", "use [1, 0]")
        return cost

    @property
    def room(self) -> int:
        """Most steps of trajectories in a micro batch: `tokens`, rounded down to a multiple."""
        return self.tokens // self.pad.multiple * self.pad.multiple


class BatchSizeConfig(t.GearModel):
    """The size of a batch in groups or trajectories, and optionally in steps."""

    groups: t.Count | None = None
    """Groups per batch, where the sampler has `"unit": "group"`. In a mixture, a trajectory of a
    table with the unit "trajectory" counts like a group.
    """
    trajectories: t.Count | None = None
    """Trajectories per batch, where the sampler has `"unit": "trajectory"`."""

    tokens: t.Steps | None = None
    """Most steps of a batch. The groups or trajectories are selected at once; a batch takes those
    that fit, in order and at least one, and the others begin the next batch. null: a batch is
    everything that is selected at once.
    """

    @model_validator(mode="after")
    def _one_unit(self) -> Any:
        if (self.groups is None) == (self.trajectories is None):
            raise t.conflict(
                "must have one of groups and trajectories",
                "they are selected at once, and a batch has no more of them"
                if self.tokens
                else "drop one"
                if self.groups
                else 'for example "groups": 64',
            )
        return self

    @property
    def unit(self) -> Literal["groups", "trajectories"]:
        return "trajectories" if self.groups is None else "groups"

    @property
    def size(self) -> int:
        """Number of groups or trajectories."""
        size: int = getattr(self, self.unit)
        return size


class RolloutConfig(BatchSizeConfig):
    """The size of a rollout batch: selected once, trained for several optimizer steps."""

    minibatches: t.Count = 1
    """Optimizer steps per epoch; the items are divided among them."""
    epochs: t.Count = 1
    """Number of times that every item of the rollout batch is trained."""
    partial: Literal["spread", "drop"] = "spread"
    """Treatment of a remainder when the items are divided into minibatches: "spread" makes some
    minibatches one item larger, "drop" leaves the last items of the shuffled order out of the
    epoch.
    """
    shuffle: t.Flag = True
    """Shuffle the items before each epoch. The seed decides the order."""


class ConstantConfig(t.GearModel):
    """Normalisation of each sequence's sum by a constant."""

    constant: t.Positive
    """Divisor of the sum over a sequence."""


Normalization = Annotated[
    Literal["token", "sequence", "group"] | ConstantConfig,
    t.Words('"token"', '"sequence"', '"group"', '{"constant": c}'),
]


class TableLossConfig(t.GearModel):
    """The part of a table in the loss of a mixture. A plain number is short for its weight."""

    weight: Annotated[t.Float, Ge(0)] = 1.0
    """Factor of the mean over the table's trajectories."""
    normalize: Normalization | None = None
    """The mean over the table's trajectories. null: that of `loss.normalize`."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return {"weight": value} if is_number else value


class LossConfig(t.GearModel):
    """The mean that the loss, summed over all ranks and micro batches, equals."""

    normalize: Normalization = "token"
    """Mean over the batch of an optimizer step: "token", over all tokens (DAPO); "sequence", over
    sequences, of the means over their tokens (GRPO); "group", over groups, of the means over their
    tokens; {"constant": c}, over sequences, of their sums / c (Dr. GRPO).
    """
    count_masked: t.Flag = False
    """Whether sequences and groups without a token in the loss mask, such as overlong ones, count
    in the mean and in the baselines of `rollout.advantages()`.
    """
    by: Literal["trajectory", "member"] = "trajectory"
    """What a sequence is: one trajectory, or all trajectories of one member of a group."""
    by_table: dict[t.Name, Annotated[TableLossConfig, t.Words("a number", "an object")]] = Field(
        default={}
    )
    """Means by table of a mixture, each with a weight: the loss is the sum over the tables of
    weight * mean over the table's trajectories in the batch of an optimizer step. A table without
    loss tokens there adds nothing. All tables of the mixture are named. Empty: one mean over the
    trajectories of all tables.
    """

    def of_tables(self, names: Sequence[str]) -> list[tuple[float, LossConfig]]:
        """Return the weight and the mean of each table; [] if there is one mean over all."""
        if not self.by_table:
            return []
        parts = []
        for name in names:
            part = self.by_table[name]
            normalize = self.normalize if part.normalize is None else part.normalize
            parts.append((part.weight, self.model_copy(update={"normalize": normalize})))
        return parts


class SharedMemoryConfig(t.GearModel):
    """Shared memory that all processes of a node use."""

    prefix: t.Name32 = "gear"
    """First part of the names in /dev/shm."""
    huge_pages: t.Flag = True
    """Ask for huge pages where the system grants them."""
    run: t.Name64 | None = None
    """Name of the run, by which actors select it where several runs of one config share a node.
    null: the value of GEAR_RUN in rank 0's environment, if it is set. The run's id can be used as a
    name too.
    """
    keep: t.Flag = False
    """Whether the store of a table with `prompts` remains when the job ends, however it ends. The
    next job with this config and `run`, on the same number of nodes, continues with its groups;
    `gear clean --kept` removes it.
    """


class TransferConfig(t.GearModel):
    """The way of batches from shared memory to a GPU. Every choice gives the same batches.

    A field whose column CUDA cannot read in place (a mapped file, memory that is not registered, a
    goal of hindsight) is always staged.
    """

    way: Literal["auto", "direct", "staged"] = "auto"
    """"direct": kernels read shared memory in place. "staged": CPU threads gather into pinned
    memory, and one copy moves it to the GPU. "auto": direct where the memory can be registered with
    CUDA, else staged. Without a GPU, "auto" gathers in place; the other two run their code on the
    CPU, for tests.
    """
    register_bytes: Annotated[t.Int, Ge(0), Lt(2**62)] | None = None
    """Most bytes of shared memory that a rank registers with CUDA, whole columns in the order of
    the fields. Each GB takes about 0.1 s and 6 MB of kernel memory. null: all columns that fields
    sample from.
    """


class GearOptions(t.GearModel):
    """The options of the section, each checked by itself."""

    seed: Annotated[t.Int, Ge(0), Lt(2**63)] = 0
    """Seed of all random choices. Equal seeds give equal batches on any number of ranks."""
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ops run: on the CPU only ("cpu"), also on a GPU, which must exist ("cuda"), or on a
    GPU if there is one ("auto"). All give the same batches.
    """
    recipe: Literal["grpo"] | None = None
    """A set of options that your section overrides (objects merge, null removes). "grpo" fills in
    the table, columns, groups, sampler, fields and sizes, given a table with a `max_length`. `gear
    preview` prints the result.
    """
    data: Annotated[DataConfig | None, t.Words("a path", "an object")] = None
    """The data set to train on. Short for `tables: {"main": {"data": ...}}`."""
    tables: dict[t.Name, TableConfig] = Field(default={})
    """The tables by name."""
    sampler: SamplerConfig = UniformSampler()
    """How samples are selected."""
    fields: dict[t.Name, FieldConfig] = Field(default={})
    """The fields of a batch by name. Empty: every column of the table but `source`, at the anchor.
    """
    n_step: NStepConfig | None = None
    """N-step returns."""
    advantage: AdvantageConfig | None = None
    """How the fields `advantage` and `value_target` are estimated."""
    hindsight: HindsightConfig | None = None
    """Relabelling of goals: achieved ones in place of those that were pursued."""
    burn_in: Annotated[t.Int, Ge(0), Lt(2**31)] = 0
    """Number of steps that only warm up a recurrent state, counted from the first step of the
    earliest window. `batch.learns(field)` is the mask of the other steps, over which [B, T]
    priorities are reduced.
    """
    prefetch: Annotated[t.Int, Ge(0), Le(64)] = 0
    """Global batches that a background thread prepares before they are needed."""
    exchange: Literal["host", "device"] = "host"
    """Transport of rows between nodes: "host", gloo, between host memories; "device", that of the
    ranks' devices, which is NCCL for GPUs. All other messages use gloo.
    """
    batch_size: t.Count | None = None
    """Samples of a global batch over all ranks. Only without an engine."""
    micro_batch_size: t.Count | None = None
    """Samples that one `sample()` returns on a rank. Only without an engine. null: `batch_size`
    divided by ranks and accumulation steps.
    """
    gradient_accumulation_steps: t.Count = 1
    """Micro batches of a global batch on each rank. Only without an engine."""
    pack: PackConfig | None = None
    """Packed batches of whole trajectories, for sequence models: `engine.gear_step()` and
    `engine.gear_rollout()` instead of `gear_sample()`. null: batches of windows."""
    batch: BatchSizeConfig | None = None
    """Size of the batch of one optimizer step, for `gear_step()`. With `pack`."""
    rollout: RolloutConfig | None = None
    """Size of a batch for several optimizer steps, for `gear_rollout()`. With `pack`, instead of
    `batch`.
    """
    loss: LossConfig = LossConfig()
    """Normalisation of a packed loss. With `pack`."""
    pipeline: PipelineConfig | None = None
    """The fields that the first and the last stage of a pipeline read."""
    count_draws: t.Flag = False
    """Count how often each item was drawn, for `statistics()` and `gear inspect --living`. Takes 4
    bytes per item and a few microseconds per global batch.
    """
    verify_every: Annotated[t.Int, Ge(0)] = 0
    """Number of global batches between two comparisons of ids and anchors inside each replica; each
    also writes a digest of the global batch to the log. 0: never.
    """
    shared_memory: SharedMemoryConfig = SharedMemoryConfig()
    """Shared memory of a node."""
    transfer: TransferConfig = TransferConfig()
    """The way of batches from shared memory to a GPU."""
    timeout_s: t.Timeout = 60.0
    """Seconds after which a wait for another rank is an error; at most 7 days. Ranks may generate
    for longer with `pack`, and in `can_sample()` and `missing_groups()`; the limit there is the
    largest `rate_limiter.timeout_s` (600 without a rate limiter), if that is longer. Without a rate
    limiter it is also the longest wait for items and for room in a table, with `pack` at least 600.
    """
    threads: Annotated[t.Int, Ge(1), Le(1024)] = 1
    """Threads that copy one batch. Where all cores are busy with ranks, one thread is fastest."""
    metrics: t.Flag = True
    """Report times, bytes and padding to DeepSpeed's monitor."""

    @cached_property
    def resolved_tables(self) -> dict[str, TableConfig]:
        """All tables by name; the short form `data` is the table "main"."""
        return {"main": TableConfig(data=self.data)} if self.data is not None else dict(self.tables)

    @property
    def rollout_timeout_s(self) -> float:
        """Longest wait for a rank that generates or computes rewards, in seconds.

        It is that of the sampled tables' rate limiters, or `timeout_s` if that is longer.
        """
        rates = [self.resolved_tables[name].rate_limiter for name in self.sampled_tables]
        limits = [DEFAULT_TIMEOUT_S if rate is None else rate.timeout_s for rate in rates]
        return max(self.timeout_s, *limits)

    def items_timeout_s(self, table: str) -> float:
        """Return the longest wait for items of a table or for room in it, in seconds."""
        rate = self.resolved_tables[table].rate_limiter
        if rate is not None:
            return rate.timeout_s
        return self.timeout_s if self.pack is None else max(self.timeout_s, DEFAULT_TIMEOUT_S)

    @property
    def rollout_size(self) -> RolloutConfig | None:
        """Size of a packed batch: `rollout`, or `batch` as one minibatch of one epoch, or None."""
        if self.batch is None:
            return self.rollout
        return RolloutConfig(**self.batch.model_dump(), shuffle=False)

    @property
    def on_device(self) -> bool:
        """Whether batches come from a table in the memory of the ranks' own devices."""
        return self.resolved_tables[self.sampled_tables[0]].placement == "device"

    @property
    def normalizes_online(self) -> bool:
        """Whether fields are normalised by added rows, since no sampled table is a data set."""
        return all(self.resolved_tables[name].data is None for name in self.sampled_tables)

    @property
    def item_sampler(self) -> ItemSampler:
        """The sampler of one table; in a mixture, `of`, whose unit and anchors are those of all."""
        return self.sampler.of if isinstance(self.sampler, MixtureSampler) else self.sampler

    @property
    def has_group_items(self) -> bool:
        """Whether the items of some sampled table are groups."""
        return any(self.sampler_of(name).unit == "group" for name in self.sampled_tables)

    def sampler_of(self, table: str) -> ItemSampler:
        """Return the sampler of a table."""
        own = self.sampler.by_table if isinstance(self.sampler, MixtureSampler) else {}
        return own.get(table, self.item_sampler)

    def share_of(self, table: str) -> float | None:
        """Return a table's share of each global batch; None if it has none, or a schedule."""
        if not isinstance(self.sampler, MixtureSampler):
            return 1.0
        share = self.sampler.shares.get(table)
        return share if isinstance(share, (int, float)) else None

    @property
    def sampled_tables(self) -> tuple[str, ...]:
        """Names of the tables that batches are sampled from."""
        if isinstance(self.sampler, MixtureSampler):
            return tuple(self.sampler.shares)
        return (self.sampler.table or next(iter(self.resolved_tables)),)

    def to_json(self) -> dict[str, Any]:
        """Return the section with all defaults; `parse` turns it back into an equal config."""
        return self.model_dump(mode="json", by_alias=True)

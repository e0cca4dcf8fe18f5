"""The options of the `gear` section. Their descriptions are the source of
docs/reference/config.md.
"""

from __future__ import annotations

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
    """The stored column. null: the one of the field's name."""
    derived: Literal["return_to_go", "timestep", "position", "advantage", "value_target"] | None = (
        None
    )
    """A quantity computed while gathering instead of a stored column: the sum of the rewards from a
    step on, the number of each step in its trajectory, its place in the window (0 to length - 1,
    also where that is padded), or what `gear.advantage` estimates. A field of this name whose table
    has no such column is derived by itself. A column of the role return_to_go or timestep takes its
    place.
    """
    offset: t.Offset | None = None
    """First step of the window, relative to the anchor; "n_step" is the step that an n-step return
    bootstraps from: `n_step.n` later, or fewer where the trajectory ends before (of a column of
    next observations, the row that is the same state); the column has T+1 rows or next
    observations. null: 0; in packed batches of a table with tokens 1 for its other columns of a row
    per step, so that they stand where the token is predicted.
    """
    length: t.Steps | None = None
    """Steps of the window. null: one step without a time axis."""
    align: Literal["in_place", "left", "right"] = "in_place"
    """Where the real steps of a window stand that leaves the trajectory: at their own places, or
    pushed to the left or right end.
    """
    pad: t.Pad = "zero"
    """What fills the rest: "zero", "edge" (the nearest real step) or a number, in units of the
    output.
    """
    normalize: Literal["mean_std", "min_max"] | None = None
    """"mean_std" to mean 0 and deviation 1, "min_max" to [-1, 1], with the statistics of the
    training split, or those of all rows that were ever added to a table without a data set, as of
    each global batch.
    """
    scale: t.Float = 1.0
    """Factor applied after normalisation."""
    hindsight: t.Name | None = None
    """Makes the field a goal: in samples that `gear.hindsight` relabels it holds the drawn row of
    this column, converted alike. Of the same dtype and shape; no `length`.
    """
    dtype: t.DtypeName | None = Field(default=None, alias="as")
    """Type in the batch; "engine" is the type the engine computes in: not for rewards, returns,
    flags and derived fields, from which losses are computed and which keep at least float32, nor
    for integers that are neither normalised nor scaled. null: the column's own, or float32 where it
    is float64, or where a column of integers is normalised or scaled.
    """


class NStepConfig(t.GearModel):
    """N-step returns: adds `return_n`, `discount` and `steps_n` to the batch."""

    n: t.Steps
    """Rewards summed; fewer where the trajectory ends before."""
    gamma: t.Gamma
    """Discount per step."""


class AdvantageConfig(t.GearModel):
    """Advantages and value targets of windows, by GAE or V-trace: the fields `advantage` and
    `value_target`.

    What a window does not hold is bootstrapped: after its last step, at a truncation and at the end
    of a trajectory by the value of the state after the step; not after a termination. Source:
    Schulman et al., "High-Dimensional Continuous Control Using GAE", 2016; Espeholt et al.,
    "IMPALA", 2018.
    """

    kind: Literal["gae", "vtrace"]
    """"gae": generalised advantage estimation; the value target is advantage + value, the
    lambda-return. "vtrace": both are corrected for the policy that has acted, by clipped ratios of
    probabilities.
    """
    value: t.Name
    """The column of the states' values: of T+1 rows, the last one that of the state after the last
    step, or of T rows with `next_value`.
    """
    next_value: t.Name | None = None
    """The column of the values of the states after each step, where `value` has T rows."""
    gamma: t.Gamma
    """Discount per step."""
    lam: t.Gamma = 1.0
    """Lambda: the weight of longer returns decays by it. 1: none is preferred."""
    log_prob: t.Name | None = None
    """With "vtrace": the column of the actions' log-probabilities under the policy that is trained,
    such as a late column.
    """
    behaviour_log_prob: t.Name | None = None
    """With "vtrace": likewise under the policy that has acted."""
    rho_bar: t.Positive = 1.0
    """With "vtrace": the largest ratio that a step's own error is multiplied with."""
    c_bar: t.Positive = 1.0
    """With "vtrace": the largest ratio that what follows is multiplied with."""

    @model_validator(mode="after")
    def _suits_its_kind(self) -> Any:
        defaults = {"log_prob": None, "behaviour_log_prob": None, "rho_bar": 1.0, "c_bar": 1.0}
        for option, default in defaults.items():
            value = getattr(self, option)
            if self.kind == "gae" and value != default:
                raise t.conflict('must not be given with "kind": "gae"', "drop it", option, value)
            if self.kind == "vtrace" and value is None:
                remedy = "V-trace needs the log-probabilities of both policies"
                raise t.conflict('must be given with "kind": "vtrace"', remedy, option)
        return self

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """As the op `advantages_` takes them."""
        return self.gamma, self.lam, self.rho_bar, self.c_bar


class HindsightConfig(t.GearModel):
    """Hindsight relabelling: samples whose goal is one that their own trajectory has achieved.

    Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.
    """

    strategy: Literal["future", "final", "episode"] = "future"
    """Which row of the achieved goals a relabelled sample takes: "future", one after the anchor's,
    each with the same probability (a sample without one keeps its goal); "final", the last one;
    "episode", any one.
    """
    fraction: t.Gamma = 0.8
    """Probability that a sample is relabelled, drawn for each by its number."""
    reward: Annotated[t.Text, t.Words('"module:function"')] | None = None
    """"module:function", importable on every rank: called with each batch, it returns what the
    field of the reward column then holds.
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
    """Inputs of the loss function on the last stage, likewise."""


class PackPadConfig(t.GearModel):
    """How far a micro batch is padded at its end."""

    to: Literal["multiple", "step", "budget"] = "multiple"
    """"multiple": to the next multiple; "step": to the same length on all ranks in each micro step,
    which DeepSpeed's experts need; "budget": to `gear.pack.tokens`, down to a multiple, for
    compiled models.
    """
    multiple: Annotated[t.Int, Ge(1), Le(1 << 20)] = 128
    """The length of every micro batch is a multiple of it."""


class PackConfig(t.GearModel):
    """Packed micro batches: whole trajectories one after the other, without padding
    between them.
    """

    tokens: t.Steps
    """Most steps of a micro batch, its padding included."""
    # The costs of a batch are summed in 62 bits.
    cost: Annotated[
        list[Annotated[t.Int, Ge(0), Lt(2**32)]], t.Words("two whole numbers [c1, c2]")
    ] = Field(default=[1, 0])
    """What a trajectory of l steps costs to train, c1 * l + c2 * l * l: micro batches are balanced
    by it. A transformer of hidden size h: [6 * h, 1].
    """
    pad: PackPadConfig = PackPadConfig()
    """Padding at the end of a micro batch."""
    max_trajectories: Annotated[t.Int, Ge(1), Lt(1 << 31)] | None = None
    """Most trajectories of a micro batch; 1 for models that carry state from one trajectory of a
    pack to the next, such as Mamba. null: as many as `tokens` hold.
    """
    plan_width: t.Count | None = None
    """Number of ranks that packs are planned for, a multiple of the replicas: packs are then the
    same on any such number of replicas. null: the number of replicas.
    """
    too_long: Literal["refuse", "truncate"] = "refuse"
    """Trajectories longer than `tokens`: "refuse" asks for a `max_length` of the table, so that a
    writer gets the error; "truncate" trains their first steps, after which `rollout.advantages`
    bootstraps.
    """

    prefix: Literal["own", "share"] = "own"
    """The prompts of a group's trajectories in a micro batch: "own", one each; "share", once where
    their tokens are equal, so that all their responses attend to it: `micro.model_inputs` has the
    mask.
    """

    @field_validator("cost")
    @classmethod
    def _two(cls, cost: list[int]) -> list[int]:
        if len(cost) != 2 or not any(cost):
            raise t.refuse("must be two whole numbers [c1, c2], not both 0")
        return cost

    @property
    def room(self) -> int:
        """Most steps of trajectories in a micro batch, whose length is a multiple."""
        return self.tokens // self.pad.multiple * self.pad.multiple


class BatchSizeConfig(t.GearModel):
    """The size of a batch: in its unit, and where tokens are given also in steps."""

    groups: t.Count | None = None
    """Groups; with `"unit": "group"` of the sampler."""
    trajectories: t.Count | None = None
    """Trajectories; with `"unit": "trajectory"` of the sampler."""

    tokens: t.Steps | None = None
    """Most steps of a batch. The groups or trajectories are then selected at once, and a batch
    takes those that fit, in their order, at least one: the others begin the next batch. null: a
    batch is what is selected at once.
    """

    @model_validator(mode="after")
    def _one_unit(self) -> Any:
        if (self.groups is None) == (self.trajectories is None):
            remedy = "they are selected at once, and a batch has no more of them"
            raise t.conflict(
                "must have one of groups and trajectories", remedy if self.tokens else ""
            )
        return self

    @property
    def unit(self) -> Literal["groups", "trajectories"]:
        return "trajectories" if self.groups is None else "groups"

    @property
    def size(self) -> int:
        """In its unit."""
        found: int = getattr(self, self.unit)
        return found


class RolloutConfig(BatchSizeConfig):
    """A rollout batch: selected once, trained for several optimizer steps."""

    minibatches: t.Count = 1
    """Optimizer steps of an epoch: the items are divided among them."""
    epochs: t.Count = 1
    """How often every item of the rollout batch is trained."""
    partial: Literal["spread", "drop"] = "spread"
    """Where the items do not divide by the minibatches: "spread" makes some of them one item
    larger, "drop" leaves the last items of the shuffled order out of the epoch.
    """
    shuffle: t.Flag = True
    """Shuffle the items before each epoch, by the seed."""


class ConstantConfig(t.GearModel):
    """The sum of each sequence divided by a constant."""

    constant: t.Positive
    """What the sum over a sequence is divided by."""


class LossConfig(t.GearModel):
    """Of what the summed loss of all ranks and micro batches is the mean."""

    normalize: Annotated[
        Literal["token", "sequence", "group"] | ConstantConfig,
        t.Words('"token"', '"sequence"', '"group"', '{"constant": c}'),
    ] = "token"
    """Over the optimizer step's batch: "token", the mean over tokens (DAPO); "sequence", the mean
    over sequences of the mean over their tokens (GRPO); "group", the mean over groups of the mean
    over their tokens; {"constant": c}, the mean over sequences of their sum / c (Dr. GRPO).
    """
    count_masked: t.Flag = False
    """Whether sequences and groups count that have no token of the loss mask, such as overlong
    ones; also in the baselines of `rollout.advantages()`.
    """
    by: Literal["trajectory", "member"] = "trajectory"
    """What a sequence is: a trajectory, or all trajectories of one member of a group."""


class SharedMemoryConfig(t.GearModel):
    """The memory that all processes of a node share."""

    prefix: t.Name32 = "gear"
    """First part of the names in /dev/shm."""
    huge_pages: t.Flag = True
    """Ask for huge pages where the system grants them."""
    run: t.Name64 | None = None
    """Name of the run, by which actors select it where several runs of one config share a node.
    null: the environment's GEAR_RUN on rank 0, else none; the run's id is a name as well.
    """
    keep: t.Flag = False
    """Whether the store of a table with `prompts` stays when the job ends, however it ends. The
    next job of this config and `run`, on as many nodes, holds the groups in it; `gear clean --kept`
    removes it.
    """


class TransferConfig(t.GearModel):
    """How batches get from shared memory to a GPU. Every choice gives the same batches.

    A field whose column CUDA cannot read in place (a mapped file, memory that is not registered, a
    goal of hindsight) is staged in any case.
    """

    way: Literal["auto", "direct", "staged"] = "auto"
    """"direct": kernels read shared memory in place; "staged": threads of the CPU gather into
    pinned memory, and one copy moves it to the GPU; "auto": direct where the memory can be
    registered with CUDA, else staged. On the CPU "auto" gathers in place, and a named way runs its
    code there, for tests.
    """
    register_bytes: Annotated[t.Int, Ge(0), Lt(2**62)] | None = None
    """Most bytes of shared memory that a rank registers with CUDA, whole columns in the order of
    the fields; about 0.1 s and 6 MB of kernel memory a GB. null: all that is sampled from.
    """


class GearOptions(t.GearModel):
    """The options of the section, each checked by itself."""

    seed: Annotated[t.Int, Ge(0), Lt(2**63)] = 0
    """Decides every random choice; equal seeds give equal batches on any number of ranks."""
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ops run: on the CPU ("cpu"), also on a GPU, which must be there ("cuda"), or on a
    GPU if there is one ("auto"). All give the same batches.
    """
    recipe: Literal["grpo"] | None = None
    """Options that the section need not give, but may (objects merge, null removes): "grpo" fills
    table, columns, groups, sampler, fields and sizes for a table with a `max_length`. `gear
    preview` prints all.
    """
    data: Annotated[DataConfig | None, t.Words("a path", "an object")] = None
    """The data set to train on: short for `tables: {"main": {"data": ...}}`."""
    tables: dict[t.Name, TableConfig] = Field(default={})
    """The tables by name."""
    sampler: SamplerConfig = UniformSampler()
    """How samples are selected."""
    fields: dict[t.Name, FieldConfig] = Field(default={})
    """What a batch holds, by name. Empty: every column of the table, at the anchor, but `source`.
    """
    n_step: NStepConfig | None = None
    """N-step returns."""
    advantage: AdvantageConfig | None = None
    """How the fields `advantage` and `value_target` are estimated."""
    hindsight: HindsightConfig | None = None
    """Goals that were achieved instead of those that were pursued."""
    burn_in: Annotated[t.Int, Ge(0), Lt(2**31)] = 0
    """Steps that only warm up a recurrent state: the first ones, from the earliest window's first
    step on. `batch.learns(field)` is the mask of the others; [B, T] priorities are reduced over
    these.
    """
    prefetch: Annotated[t.Int, Ge(0), Le(64)] = 0
    """Global batches that a background thread prepares before they are needed."""
    exchange: Literal["host", "device"] = "host"
    """How rows travel between nodes: "host", over gloo, from memory to memory; "device", over the
    transport of the ranks' devices, which is NCCL between GPUs. Everything else uses gloo.
    """
    batch_size: t.Count | None = None
    """Samples of a global batch, all ranks together. Only without an engine."""
    micro_batch_size: t.Count | None = None
    """Samples of one `sample()` of one rank. Only without an engine. null: `batch_size` divided by
    ranks and accumulation steps.
    """
    gradient_accumulation_steps: t.Count = 1
    """Micro batches of a global batch on each rank. Only without an engine."""
    pack: PackConfig | None = None
    """Packed batches of whole trajectories, for sequence models: `engine.gear_step()` and
    `engine.gear_rollout()` instead of `gear_sample()`. null: batches of windows."""
    batch: BatchSizeConfig | None = None
    """Size of the batch of one optimizer step, `gear_step()`. With `pack`."""
    rollout: RolloutConfig | None = None
    """Size of a batch for several optimizer steps, `gear_rollout()`. With `pack`, instead of
    `batch`.
    """
    loss: LossConfig = LossConfig()
    """Of what a packed loss is the mean. With `pack`."""
    pipeline: PipelineConfig | None = None
    """What the first and the last stage of a pipeline read."""
    count_draws: t.Flag = False
    """Count how often each item was drawn, for `statistics()` and `gear inspect --living`: 4 bytes
    an item and a few microseconds a global batch.
    """
    verify_every: Annotated[t.Int, Ge(0)] = 0
    """Compare ids and anchors inside each replica every so many global batches, and write a digest
    of the global batch to the log. 0: never.
    """
    shared_memory: SharedMemoryConfig = SharedMemoryConfig()
    """Shared memory of a node."""
    transfer: TransferConfig = TransferConfig()
    """How batches get from shared memory to a GPU."""
    timeout_s: t.Timeout = 60.0
    """Seconds after which a wait for another rank is an error; at most 7 days. Where ranks may
    generate (with `pack`, and in `can_sample()` and `missing_groups()`) the largest
    `rate_limiter.timeout_s` counts if it is larger, without a rate limiter 600. Without a rate
    limiter it is also the longest wait for items and for room in a table, with `pack` at least 600.
    """
    threads: Annotated[t.Int, Ge(1), Le(1024)] = 1
    """Threads that copy one batch. Ranks on busy cores are fastest with one."""
    metrics: t.Flag = True
    """Report times, bytes and padding to DeepSpeed's monitor."""

    @cached_property
    def resolved_tables(self) -> dict[str, TableConfig]:
        """All tables by name; the short form `data` is the table "main"."""
        return {"main": TableConfig(data=self.data)} if self.data is not None else dict(self.tables)

    @property
    def rollout_timeout_s(self) -> float:
        """Longest wait for a rank that generates or computes rewards, as for items: of the rate
        limiters.
        """
        rates = [self.resolved_tables[name].rate_limiter for name in self.sampled_tables]
        limits = [DEFAULT_TIMEOUT_S if rate is None else rate.timeout_s for rate in rates]
        return max(self.timeout_s, *limits)

    def items_timeout_s(self, table: str) -> float:
        """Longest wait for items of a table, or of a writer for room in it: of its rate limiter, if
        any.
        """
        rate = self.resolved_tables[table].rate_limiter
        if rate is not None:
            return rate.timeout_s
        return self.timeout_s if self.pack is None else max(self.timeout_s, DEFAULT_TIMEOUT_S)

    @property
    def rollout_size(self) -> RolloutConfig | None:
        """Of a packed batch: `rollout`, or `batch` as one minibatch of one epoch; None without
        `pack`.
        """
        if self.batch is None:
            return self.rollout
        return RolloutConfig(**self.batch.model_dump(), shuffle=False)

    @property
    def on_device(self) -> bool:
        """Whether batches come from a table in the memory of the ranks' own devices."""
        return self.resolved_tables[self.sampled_tables[0]].placement == "device"

    @property
    def normalizes_online(self) -> bool:
        """Whether fields are normalised with what was ever added: no sampled table holds a data
        set.
        """
        return all(self.resolved_tables[name].data is None for name in self.sampled_tables)

    @property
    def item_sampler(self) -> ItemSampler:
        """How the samples of one table are selected: unit and anchors are those of all tables."""
        return self.sampler.of if isinstance(self.sampler, MixtureSampler) else self.sampler

    def sampler_of(self, table: str) -> ItemSampler:
        """Return how the samples of a table are selected."""
        own = self.sampler.by_table if isinstance(self.sampler, MixtureSampler) else {}
        return own.get(table, self.item_sampler)

    def share_of(self, table: str) -> float | None:
        """Return the part of each global batch that comes from a table; None: none, or it is a
        schedule.
        """
        if not isinstance(self.sampler, MixtureSampler):
            return 1.0
        share = self.sampler.shares.get(table)
        return share if isinstance(share, (int, float)) else None

    @property
    def sampled_tables(self) -> tuple[str, ...]:
        """Names of the tables that batches come from."""
        if isinstance(self.sampler, MixtureSampler):
            return tuple(self.sampler.shares)
        return (self.sampler.table or next(iter(self.resolved_tables)),)

    def to_json(self) -> dict[str, Any]:
        """Return the section with all defaults filled in; `parse` reads it back to an
        equal config.
        """
        return self.model_dump(mode="json", by_alias=True)

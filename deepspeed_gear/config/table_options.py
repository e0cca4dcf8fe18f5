"""Options of tables and their defaults: data sets on disk, and tables with a capacity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field, Strict, field_validator, model_validator

from deepspeed_gear.config import types as t
from deepspeed_gear.config.sampler_options import WhereConfig
from deepspeed_gear.schema import Role, Rows, Schema

Writers = Annotated[t.Int, Ge(0), Le(1024)]
EVICTION_POLICIES = ("none", "fifo", "lifo", "uniform", "lowest_priority", "keep_best")
_POLICY_WORDS = (*(f'"{name}"' for name in EVICTION_POLICIES), '"module:Class"')


class RateLimiterConfig(t.GearModel):
    """Limits under which writers or samplers block, to keep samples per added item near a ratio.

    The sampler's `unit` defines the items, and those of all nodes count. With I items ever added
    and S samples ever drawn, I * samples_per_insert - S stays within `error_buffer` of its value at
    `min_size` items.

    Source: Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.3.
    """

    min_size: t.Count = 1
    """Items that the table must hold before any is sampled. This many may be added at any time."""
    samples_per_insert: t.Positive | None = None
    """Samples that are drawn for each added item. null: no limit."""
    error_buffer: Annotated[t.Float, Ge(0)] | None = None
    """Largest difference from the ratio in either direction, in samples. It must be at least half
    of a global batch plus half of what the longest trajectory adds, and at least what the longest
    trajectory adds without one item. null: `min_size` times `samples_per_insert`, or that minimum
    if it is more.
    """
    queue: t.Count | None = None
    """Makes the table a queue, in which each trajectory is drawn once, in the order of addition;
    the number is the most that may wait. With the sampler "fifo", and without the other options of
    the rate limiter.
    """
    timeout_s: t.Timeout = 600.0
    """Seconds after which the wait of a sampler or a writer is an error; at most 7 days."""


class VersionConfig(t.GearModel):
    """Limit of a trajectory's lag: the learner's policy version minus the trajectory's own.

    The learner's version is set by `Replay.set_policy_version`; that of a trajectory is the oldest
    one in it.
    """

    column: t.Name
    """The integer column with the policy version of each step."""
    max_lag: Annotated[t.Int, Ge(0)]
    """Largest lag of a trajectory, in versions."""
    on_stale: Literal["drop", "wait"] = "drop"
    """Treatment of trajectories beyond `max_lag`. "drop": they are evicted, and counted by length.
    "wait": setting a new version blocks while it would evict an open trajectory; complete ones are
    evicted.
    """


MOST_REMEMBERED = 4096  # groups that have left a table: the most by default


class GroupConditionConfig(t.GearModel):
    """Conditions on a per-trajectory column over the members of a group; all of them must hold.

    For a member of several trajectories, the value of the last one counts. Statistics and bounds
    are compared in the precision of the column, so that a float32 mean of 0.8 satisfies `"max":
    0.8`.
    """

    std: t.RangeConfig | None = None
    """Standard deviation, divided by the number of members - 1."""
    mean: t.RangeConfig | None = None
    """Mean."""
    min: t.RangeConfig | None = None
    """Smallest value."""
    max: t.RangeConfig | None = None
    """Largest value."""
    sum: t.RangeConfig | None = None
    """Sum."""

    @model_validator(mode="after")
    def _not_empty(self) -> Any:
        if not self.model_dump(exclude_none=True):
            raise t.conflict(
                f"must have one of {', '.join(type(self).model_fields)}",
                'for example {"min": 0}',
            )
        return self


class GroupConfig(t.GearModel):
    """Groups of trajectories that are sampled, trained and evicted together.

    A group, such as the responses to a prompt, can be sampled once it has all its members, and
    these have all late columns that `needs`, `where`, the fields and the sampler name.
    """

    column: t.Name
    """The per-trajectory column of integers with the number of the group, which all its
    trajectories share and no other group in the table has.
    """
    size: t.Count
    """Members of a group. Members that arrive after it is complete are evicted, and counted."""
    member: t.Name | None = None
    """The per-trajectory column of integers with the number of the member, where a member may have
    several trajectories. With `prompts`, `lease.commit` fills it in; otherwise name a late column
    in `needs`, and fill it when the member has all of them. null: each trajectory is a member.
    """
    max_trajectories: t.Count | None = None
    """Most trajectories of a group; given with `member`, and only then. One more is refused."""
    needs: list[t.Name] = Field(default=[])
    """Late columns that every trajectory of a group must have, such as rewards."""
    after_s: t.Timeout | None = None
    """Seconds after a group's latest trajectory, or latest `fill`, at which it is complete with at
    least `min_size` members. null: never.
    """
    min_size: t.Count | None = None
    """Least number of members with which a group becomes complete after `after_s`. With `prompts`,
    without `after_s`: least number of members that `lease.commit` takes. null: `size`.
    """
    remember: Annotated[int, Strict(), Ge(0), Lt(2**31)] | None = None
    """Number of groups that each node remembers after they left the table (trained, rejected or
    evicted), latest first: further trajectories with their numbers are evicted, and counted. null:
    with `after_s` as many groups as the table holds, at most 4096; else 0.
    """
    where: dict[t.Name, GroupConditionConfig] = Field(default={})
    """Conditions by per-trajectory column. A complete group that fails one is evicted, and counted.
    `{"reward": {"std": {"min": 1e-6}}}` leaves out groups of equal rewards.
    """


class PromptsConfig(t.GearModel):
    """Prompts that rollout workers lease; each is trained once per epoch, or dropped for a reason.

    `lease.commit` fills in the `column` of the table's group: the number of the prompt, which is
    epoch * prompts + its place in the order of the epoch.
    """

    data: t.Text
    """Folder of a data set without a split, each of whose trajectories is a prompt; or a file with
    one prompt per row (JSONL, Parquet), which is ingested beside itself once, and again after it
    has changed. The path is absolute or relative to the working directory. The order of an epoch
    follows from `gear.seed`.
    """
    where: dict[t.Name, WhereConfig] = Field(default={})
    """Conditions on per-trajectory columns of the data set, such as
    `{"difficulty": {"min": 0.2, "max": 0.8}}`. Prompts that fail one are never leased, and an epoch
    has the others. A run resumes with the conditions that it was saved with.
    """
    column: t.Name | None = None
    """A per-trajectory column of int64 in which `lease.commit` fills in the place of the prompt in
    `data`, as `lease.index`. In training it names the prompt of each group. null: none.
    """
    shared_columns: list[t.Name] = Field(default=[])
    """Columns of steps that nothing reads before the first token of the loss mask, such as the
    log-probabilities of a server. The store holds a prompt once for the trajectories of a group if
    all other columns agree at its tokens; there these columns have the values of the trajectory
    that holds the prompt.
    """
    sampler: Literal["epoch", "prioritized", "prioritized_epoch"] = "epoch"
    """Which prompt is leased next. "epoch": each once an epoch, in an order that follows from
    `gear.seed`. "prioritized": any, in proportion to the priorities of
    `replay.set_prompt_priorities`, which are 1 at first. "prioritized_epoch": each once an epoch;
    the next one is drawn by priority among those that the epoch has left. Each of several nodes
    draws from a random part of the epoch's prompts.
    """
    lease_s: t.Timeout = 600.0
    """Seconds after its start or latest heartbeat at which a lease expires; its prompt is then
    leased again.
    """
    attempts: t.Count = 3
    """Leases of a prompt that may end without a commit before it is dropped."""
    max_lag: Annotated[t.Int, Ge(0), Le(1 << 16)] = 2
    """Most rollout batches that are trained between the lease of a group and its own batch. A
    prompt is leased only if it can stay within the limit when no group is slow.
    """
    order: Literal["lease", "completion"] = "lease"
    """"lease": groups are trained in the order of their numbers, which does not bias lengths.
    "completion": groups are trained as they become complete, before a slow one that can still be
    trained within `max_lag`.
    """
    late: Literal["wait", "drop"] = "wait"
    """Treatment of a slow group that no later batch could train within `max_lag`. "wait": the batch
    waits for it, so no group is dropped for its age. "drop", with `"order": "completion"`: it is
    dropped, and counted by length.
    """

    keep_bytes: Annotated[t.Int, Ge(0), Le(1 << 30)] = 0
    """Bytes that a lease may keep (`lease.keep`) for the next lease of its prompt, such as finished
    turns. Twice as many are stored for each of (max_lag + 1) * groups prompts.
    """


class DataConfig(t.GearModel):
    """A data set on disk, made by `gear ingest`. A plain string is short for its path."""

    path: t.Text
    """Folder of the data set, absolute or relative to the working directory."""
    split: dict[t.Name, t.Fraction] = Field(default={})
    """Fraction of the trajectories in each split that is held out of training. A keyed hash of the
    trajectory id assigns them, so a split is the same for every seed. Empty: the split that the
    data set was ingested with.
    """
    load: Literal["mmap", "memory"] = "mmap"
    """"mmap" reads the files in place, so the data may be larger than memory. "memory" copies all
    but compressed columns into shared memory, once per node.
    """
    read_ahead: t.Flag | None = None
    """Whether mapped files are read ahead: the rows of a batch are requested from the disk together
    before they are copied, and with them those of the next batch where it is known. null: where
    the data exceed the memory that is left. Batches are the same either way.
    """
    replicate: t.Flag = False
    """Whether every node holds the whole data set, as one logical shard, so that no rows travel
    between nodes. It must fit into every node's memory.
    """

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("split")
    @classmethod
    def _leaves_some(cls, split: dict[str, float]) -> dict[str, float]:
        if "train" in split:
            raise t.conflict(
                "must not be given",
                "what the other splits leave is for training",
                "train",
                split["train"],
            )
        if sum(split.values()) >= 1:
            raise t.refuse("must sum to less than 1", "lower them: the rest is for training")
        return split


class ColumnConfig(t.GearModel):
    """One stored quantity."""

    dtype: t.ColumnDtype
    """Type of the elements. "bytes" and "json" are opaque values, one per trajectory, with `rows`
    "1" and `max_bytes`; a batch holds them as a list if a field names the column."""
    shape: list[t.Steps] = Field(default=[])
    """Shape of one row, without the time axis. Opaque columns have none."""
    role: Role = "other"
    """Meaning of the column for derived fields and `as`. Writers of environments fill timestep and
    return_to_go. "media", int64, holds the number of the item (`media` of the table) that a step
    names, and 0 where it names none.
    """
    rows: Rows = "T"
    """Rows of a trajectory of T steps: one per step, one more (observations), or a single one."""
    late: t.Flag = False
    """Whether it may be written once after the trajectory was added (`Replay.fill`). Batches that
    read the column contain only trajectories that have it.
    """

    allow_nan: t.Flag = False
    """Whether a floating column may hold NaN and infinities. Otherwise adding them is an error that
    names the step; values in tables on devices are not checked.
    """
    max_bytes: t.Steps | None = None
    """Bytes of the longest value of an opaque column (JSON as UTF-8). Each value takes this much
    room in the table, and a longer one is refused.
    """
    max_values: t.Steps | None = None
    """Most values of a step in a ragged column, whose steps have different numbers of values. They
    are in the memory of `ragged` of the table; `shape` and `rows` are left out.
    """


class SchemaConfig(t.GearModel):
    """The columns of a table that holds no data set."""

    columns: Annotated[dict[t.Name, ColumnConfig], MinLen(1)]
    """The columns by name."""

    @model_validator(mode="after")
    def _fits_together(self) -> SchemaConfig:
        self.build()
        return self

    def build(self) -> Schema:
        return Schema.from_json(self.model_dump(exclude_none=True))


class MediaColumnConfig(t.GearModel):
    """One quantity of a media item, with any number of rows."""

    dtype: t.StoredDtype
    """Type of the elements."""
    shape: list[t.Steps] = Field(default=[])
    """Shape of one row."""
    allow_nan: t.Flag = False
    """Whether a floating column may hold NaN and infinities."""


class MediaConfig(t.GearModel):
    """Media items, such as images, which steps name in the column of the role media.

    A node stores equal items once. An item stays while a trajectory names it, and then until other
    items need its memory.
    """

    columns: Annotated[dict[t.Name, MediaColumnConfig], MinLen(1)]
    """The quantities of an item by name."""
    capacity_bytes: t.Count
    """Memory for items on each node."""
    page_bytes: Annotated[t.Int, Ge(512), Le(1 << 30)] = 1 << 16
    """Bytes of a page, rounded up to a multiple of 8. An item takes whole pages."""


class RaggedConfig(t.GearModel):
    """Memory for the values of ragged columns: those of a trajectory take whole pages."""

    capacity_bytes: t.Count
    """Memory for values and counts on each node. In a table with `media` both share the sum of
    their memory, in pages of `media.page_bytes`.
    """
    page_bytes: Annotated[t.Int, Ge(512), Le(1 << 30)] = 4096
    """Bytes of a page, rounded up to a multiple of 8."""


class TableConfig(t.GearModel):
    """A named set of trajectories: a data set on disk, or those that are added while training."""

    data: Annotated[DataConfig | None, t.Words("a path", "an object")] = None
    """The data set that the table holds."""
    capacity_steps: t.Count | None = None
    """Capacity of a table without data, in steps over all nodes. Each of n nodes that consume has
    1/n of it, rounded up.
    """
    capacity_bytes: t.Count | None = None
    """Capacity in bytes, in place of `capacity_steps`: as many steps as fit into it."""
    capacity_trajectories: t.Count | None = None
    """Capacity in trajectories over all nodes, divided among them like `capacity_steps`. null: one
    per 16 steps, at least 1,024.
    """
    max_length: t.Steps | None = None
    """Steps of the longest trajectory that can be added; it must fit into one node's share. A
    writer of environments stores a longer episode as several trajectories; it raises an error where
    a field return_to_go or timestep needs whole episodes because no column has that role. null:
    `capacity_steps`.
    """
    num_envs: t.Count | None = None
    """Number of environments per replica whose steps are added one by one (`add_steps_`) to a table
    on devices. Each environment has a part of the rows for its trajectories. null: whole
    trajectories are added.
    """
    writers: Writers = 0
    """Processes besides the ranks (actors) that may write into a node's store at the same time. If
    there are any, the store keeps its name in /dev/shm until the last process detaches.
    """
    remove: Annotated[t.Text, t.Words(*_POLICY_WORDS)] = "none"
    """Eviction policy of a full table: the oldest trajectory goes ("fifo"), the newest ("lifo"),
    any ("uniform"), the one of the lowest priority ("lowest_priority"), or the one with the lowest
    value in the column `keep_best` ("keep_best"). "none": adding to a full table is an error.
    "module:Class": a subclass of EvictionPolicy, importable in every process that writes.
    """
    keep_best: t.Name | None = None
    """The per-trajectory column whose lowest values are evicted first."""
    max_times_sampled: Annotated[t.Int, Ge(0), Lt(2**31)] = 0
    """Number of draws after which a trajectory is evicted. In a table on devices its rows are
    reused only when the ring reaches them. 0: never.
    """
    max_age: Annotated[t.Int, Ge(0)] = 0
    """Global batches after its addition at which a trajectory is evicted. 0: never."""
    version: VersionConfig | None = None
    """Limit of the lag of the steps' policy versions. null: no limit."""
    group: GroupConfig | None = None
    """Groups of trajectories, where `sampler.unit` is "group". null: no groups."""
    prompts: PromptsConfig | None = None
    """The prompts of a table of groups, leased by rollout workers (`RolloutWorker`). null:
    processes add groups of their own choice.
    """
    media: MediaConfig | None = None
    """The items that the column of the role media names. null: there is no such column."""
    ragged: RaggedConfig | None = None
    """Memory for the values of columns with `max_values`. null: there are no such columns."""
    rate_limiter: RateLimiterConfig | None = None
    """Limits under which writers or samplers block. null: samplers wait for the first item only."""
    placement: Literal["host", "device"] = "host"
    """Memory of the table. "host": memory that all processes of a node share. "device": memory of
    each rank's own accelerator, where drawing, training step and updates can be one CUDA graph.
    There each replica has its own table of the whole capacity, and draws from it; for one exact
    distribution over all replicas use "host".
    """
    rows: Literal["device", "host"] = "device"
    """Memory of the rows of a table on devices: "device"; or "host", host memory of each rank that
    its device reads and writes in place, for tables larger than the device. Slots, tree and
    priorities stay on the device.
    """
    schema_: SchemaConfig | None = Field(default=None, alias="schema")
    """Columns of a table without data. null: the program gives them to `Replay(schemas=...)`."""

    @model_validator(mode="after")
    def _is_made_of_something(self) -> Any:
        if self.data is None and (self.capacity_steps is None) == (self.capacity_bytes is None):
            raise t.conflict(
                "must have one of data, capacity_steps and capacity_bytes",
                "give the one that the table is made of",
            )
        return self

    @field_validator("remove")
    @classmethod
    def _known_policy(cls, remove: str) -> str:
        if remove not in EVICTION_POLICIES and ":" not in remove:
            raise t.refuse(f"must be {', '.join(_POLICY_WORDS[:-1])} or {_POLICY_WORDS[-1]}")
        return remove

    @property
    def schema(self) -> Schema | None:  # type: ignore[override]  # pydantic's is deprecated
        """The columns as the config gives them, or None."""
        return None if self.schema_ is None else self.schema_.build()

    @property
    def most_trajectories(self) -> int:
        """Most trajectories of a group; 1 without groups."""
        if self.group is None:
            return 1
        return self.group.max_trajectories or self.group.size

    def num_steps(self, schema: Schema) -> int:
        """Return the capacity in steps of a table without data; 0 if its bytes hold none."""
        return self.capacity_steps or (self.capacity_bytes or 0) // schema.row_bytes


# Defaults of the options that a writer depends on; a config may leave them out, so stores compare
# them filled in (`store.writer_options`).
DEFAULTS = {
    "table": t.defaults_of(TableConfig),
    "rate_limiter": t.defaults_of(RateLimiterConfig),
    "version": t.defaults_of(VersionConfig),
    "group": t.defaults_of(GroupConfig),
    "prompts": t.defaults_of(PromptsConfig),
    "media": t.defaults_of(MediaConfig),
    "ragged": t.defaults_of(RaggedConfig),
}

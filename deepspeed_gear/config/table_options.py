"""The options of tables: data sets on disk, and tables with a capacity. Part of the
`gear` section.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import Field, Strict, field_validator, model_validator

from deepspeed_gear.config import types as t
from deepspeed_gear.schema import Schema

Writers = Annotated[t.Int, Ge(0), Le(1024)]
EVICTION_POLICIES = ("none", "fifo", "lifo", "uniform", "lowest_priority", "keep_best")
_POLICY_WORDS = (*(f'"{name}"' for name in EVICTION_POLICIES), '"module:Class"')


class RateLimiterConfig(t.GearModel):
    """When writers or samplers must block, so that samples per added item stay near a given ratio.

    The sampler's `unit` defines the items. With I items ever added and S samples ever drawn, I *
    samples_per_insert - S stays within `error_buffer` of its value at `min_size` items. The items
    of all nodes count.

    Source: Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.3.
    """

    min_size: t.Count = 1
    """Nothing is sampled while fewer items are held; so many may be added at any time."""
    samples_per_insert: t.Positive | None = None
    """Samples drawn for each item added. null: no limit."""
    error_buffer: Annotated[t.Float, Ge(0)] | None = None
    """Largest difference, in samples, from the given ratio, either way. At least half of a global
    batch and of what the longest trajectory adds, and what this adds without one item. null:
    `min_size` times `samples_per_insert`, or that minimum if it is more.
    """
    queue: t.Count | None = None
    """Each trajectory is drawn once, in the order of addition; this is the most that may wait. With
    the sampler "fifo"; without the other options of the rate limiter.
    """
    timeout_s: t.Timeout = 600.0
    """Seconds after which a wait of a sampler or a writer is an error; at most 7 days."""


class VersionConfig(t.GearModel):
    """Largest lag of a trajectory: the learner's policy version (`Replay.set_policy_version`) minus
    its own.

    The version of a trajectory is the oldest one in it.
    """

    column: t.Name
    """The integer column that holds the policy's version of each step."""
    max_lag: Annotated[t.Int, Ge(0)]
    """Largest lag of a trajectory, in versions."""
    on_stale: Literal["drop", "wait"] = "drop"
    """Treatment of trajectories beyond `max_lag`. "drop": they are evicted, and counted by length.
    "wait": a new version blocks while it would evict an open trajectory; complete ones are evicted.
    """


MOST_REMEMBERED = 4096  # groups that have left a table, by default


class GroupConditionConfig(t.GearModel):
    """Conditions on a per-trajectory column over the members of a group; all given ones must hold.

    Of a member of several trajectories, the last one's value counts. Statistic and bounds are
    compared as precisely as the column stores numbers: a float32 mean of 0.8 is within `"max":
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
            raise t.conflict(f"must have one of {', '.join(type(self).model_fields)}")
        return self


class GroupConfig(t.GearModel):
    """Groups: trajectories that are sampled, trained and evicted together, such as the responses to
    a prompt.

    A group can be sampled once all members are there, with all late columns that `needs`, `where`,
    fields and sampler name.
    """

    column: t.Name
    """The per-trajectory column of integers whose value the trajectories of a group share; unique
    among the groups in the table.
    """
    size: t.Count
    """Members of a group. Those that come when it is complete are evicted, and counted."""
    member: t.Name | None = None
    """The per-trajectory column of integers that tells the members of a group apart, where a member
    may be several trajectories. Then name a late column in `needs`, filled when the member has all
    of them. null: each trajectory is a member.
    """
    max_trajectories: t.Count | None = None
    """Most trajectories of a group; with `member`, and only then. One more is refused."""
    needs: list[t.Name] = Field(default=[])
    """Late columns that every trajectory of a group must have, such as rewards."""
    after_s: t.Timeout | None = None
    """Seconds after its latest trajectory, or the latest `fill` of one, at which a group of at
    least `min_size` members is complete without the others. null: never.
    """
    min_size: t.Count | None = None
    """Members of such a group, at least."""
    remember: Annotated[int, Strict(), Ge(0), Lt(2**31)] | None = None
    """Groups that have left the table (trained, rejected or evicted), the latest so many on each
    node: trajectories with the number of one are evicted, and counted. null: with `after_s` as many
    groups as the table holds, at most 4096; else 0.
    """
    where: dict[t.Name, GroupConditionConfig] = Field(default={})
    """Conditions by per-trajectory column. A group that fails one is evicted once it is complete,
    and counted: `{"reward": {"std": {"min": 1e-6}}}` leaves out groups of equal rewards.
    """


class PromptsConfig(t.GearModel):
    """Prompts that rollout workers lease: each is trained once in an epoch, or dropped for a named
    reason.

    The `column` of the table's group has the number of a prompt, epoch * prompts + place in the
    order of the epoch, which `lease.commit` fills in.
    """

    data: t.Text
    """Folder of a data set, absolute or relative to the working directory, without a split: each of
    its trajectories is a prompt. Or a file with a prompt a row (JSONL, Parquet), which is ingested
    beside it once, and again where it has changed. The order of an epoch follows from `gear.seed`.
    """
    lease_s: t.Timeout = 600.0
    """Seconds after its begin or latest heartbeat at which a lease returns: its prompt is leased
    again.
    """
    attempts: t.Count = 3
    """Leases of a prompt that end without a commit, after which it is dropped."""
    max_lag: Annotated[t.Int, Ge(0), Le(1 << 16)] = 2
    """Most rollout batches that are trained between the lease of a group and its own batch. No
    prompt is leased that could exceed it if none is slow.
    """
    order: Literal["lease", "completion"] = "lease"
    """Groups are trained in the order of their numbers, so lengths are not biased; or "completion":
    as they are complete, before a slow one that may still come within `max_lag`.
    """
    late: Literal["wait", "drop"] = "wait"
    """A batch waits for a slow group that could not be in a later one within `max_lag`, so nothing
    is dropped for its age; or "drop", with the order of completion: it is dropped, and counted by
    length.
    """

    keep_bytes: Annotated[t.Int, Ge(0), Le(1 << 30)] = 0
    """Bytes that a lease may keep (`lease.keep`) for the next one of its prompt, such as turns that
    are done; twice as many are stored for each of (max_lag + 1) * groups prompts.
    """


class DataConfig(t.GearModel):
    """A data set on disk, made by `gear ingest`. A plain string is short for its path."""

    path: t.Text
    """Folder of the data set, absolute or relative to the working directory."""
    split: dict[t.Name, t.Fraction] = Field(default={})
    """Trajectories held out of training, as a fraction per split. They are chosen by a keyed hash
    of the trajectory id, so a split is the same for every seed. Empty: the split that the data set
    was ingested with.
    """
    load: Literal["mmap", "memory"] = "mmap"
    """"mmap" reads the files in place, so the data may be larger than memory; "memory" copies them
    into shared memory once per node, compressed columns excepted.
    """
    replicate: t.Flag = False
    """Every node holds the whole data set, as one logical shard: no rows travel between nodes. Only
    where it fits every node's memory.
    """

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("split")
    @classmethod
    def _leaves_some(cls, split: dict[str, float]) -> dict[str, float]:
        if "train" in split:
            remedy = "what the other splits leave is for training"
            raise t.conflict("must not be given", remedy, "train", split["train"])
        if sum(split.values()) >= 1:
            raise t.refuse("must sum to less than 1", "nothing is left for training")
        return split


class ColumnConfig(t.GearModel):
    """One stored quantity."""

    dtype: t.ColumnDtype
    """Type of its elements. "bytes" and "json": an opaque value per trajectory, with `rows` "1" and
    `max_bytes`, that batches hold as a list if a field names it."""
    shape: list[t.Steps] = Field(default=[])
    """Shape of one row, without the time axis; not of an opaque column."""
    role: (
        Literal[
            "observation",
            "next_observation",
            "action",
            "reward",
            "terminated",
            "truncated",
            "return",
        ]
        | Literal["length", "token", "loss_mask", "timestep", "return_to_go", "media", "other"]
    ) = "other"
    """What it means to derived fields and to `as`; writers of environments fill timestep and
    return_to_go. "media", int64: the number of the item (`media` of the table) that a step names, 0
    where it names none.
    """
    rows: Literal["T", "T+1", "1"] = "T"
    """Rows of a trajectory of T steps: one a step, one more (observations), or one per trajectory.
    """
    late: t.Flag = False
    """It may be written after the trajectory was added, once (`Replay.fill`). Batches that read it
    hold only trajectories that have it.
    """

    allow_nan: t.Flag = False
    """A floating column may hold NaN and infinities. Without it, adding them is an error that names
    the step; values in tables on devices are not checked.
    """
    max_bytes: t.Steps | None = None
    """Bytes of the longest value of an opaque column (JSON as UTF-8), for each of which the table
    has room. A longer one is refused.
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
    """One quantity of an item of media, with any number of rows."""

    dtype: t.StoredDtype
    """Type of its elements."""
    shape: list[t.Steps] = Field(default=[])
    """Shape of one row."""
    allow_nan: t.Flag = False
    """As of a column of the table."""


class MediaConfig(t.GearModel):
    """Media, such as images, that steps name by the column of the role media; a node keeps equal
    ones once.

    An item stays while a trajectory names it, and after that until others need its memory.
    """

    columns: Annotated[dict[t.Name, MediaColumnConfig], MinLen(1)]
    """What an item consists of, by name."""
    capacity_bytes: t.Count
    """Memory for items on each node."""
    page_bytes: Annotated[t.Int, Ge(512), Le(1 << 30)] = 1 << 16
    """An item has whole pages of so many bytes, rounded up to a multiple of 8."""


class TableConfig(t.GearModel):
    """A named set of trajectories: a data set on disk, or a capacity for those added while
    training.
    """

    data: Annotated[DataConfig | None, t.Words("a path", "an object")] = None
    """The data set that the table holds."""
    capacity_steps: t.Count | None = None
    """Capacity in steps, in a table without data; all nodes together. Each of n nodes that consume
    has 1/n of them, rounded up.
    """
    capacity_bytes: t.Count | None = None
    """In place of `capacity_steps`: as many steps as fit into so many bytes."""
    capacity_trajectories: t.Count | None = None
    """Capacity in trajectories, all nodes together, divided likewise. null: one per 16 steps, at
    least 1,024.
    """
    max_length: t.Steps | None = None
    """Steps of the longest trajectory that can be added; it must fit into one node's share. A
    writer of environments stores a longer episode as several trajectories, or raises where a field
    return_to_go or timestep needs whole ones, without a column of that role. null:
    `capacity_steps`.
    """
    num_envs: t.Count | None = None
    """Environments whose steps are added one by one (`add_steps_`) to a table on devices, by each
    replica. Each environment has a part of the rows for its trajectories. null: whole trajectories
    are added.
    """
    writers: Writers = 0
    """Processes besides the ranks that may write into a node's store at once: actors. The store
    then keeps its name in /dev/shm until the last process detaches.
    """
    remove: Annotated[t.Text, t.Words(*_POLICY_WORDS)] = "none"
    """What is evicted when there is no room: the oldest trajectory ("fifo"), the newest ("lifo"),
    any one ("uniform"), the one of the lowest priority, or of the lowest value of the column
    `keep_best`. "none": adding to a full table is an error. "module:Class": a subclass of
    EvictionPolicy, importable in every process that writes.
    """
    keep_best: t.Name | None = None
    """The per-trajectory column whose lowest values are evicted first."""
    max_times_sampled: Annotated[t.Int, Ge(0), Lt(2**31)] = 0
    """A trajectory is evicted when it was drawn so often; in a table on devices its rows are used
    again when they would have been evicted. 0: never.
    """
    max_age: Annotated[t.Int, Ge(0)] = 0
    """A trajectory is evicted so many global batches after it was added. 0: never."""
    version: VersionConfig | None = None
    """Largest lag of the steps' policy version. null: no limit."""
    group: GroupConfig | None = None
    """Groups of trajectories, where `sampler.unit` is "group". null: there are none."""
    prompts: PromptsConfig | None = None
    """The prompts of a table of groups, leased by rollout workers (`RolloutWorker`). null:
    processes add the groups that they choose.
    """
    media: MediaConfig | None = None
    """What the column of the role media names. null: there is no such column."""
    rate_limiter: RateLimiterConfig | None = None
    """When writers or samplers block. null: only for the first item."""
    placement: Literal["host", "device"] = "host"
    """Where the table lies: "host", in memory that all processes of a node share; "device", in the
    memory of each rank's own accelerator, where drawing, training step and updates can be one CUDA
    graph. On devices each replica has and draws from its own table, of the whole capacity; for one
    exact distribution over all replicas use "host".
    """
    rows: Literal["device", "host"] = "device"
    """Where the rows of a table on devices lie: "device"; or "host", host memory of each rank that
    its device reads and writes in place, for tables larger than the device. Slots, tree and
    priorities are on the device.
    """
    schema_: SchemaConfig | None = Field(default=None, alias="schema")
    """Columns of a table without data. null: the program gives it to `Replay(schemas=...)`."""

    @model_validator(mode="after")
    def _is_made_of_something(self) -> Any:
        if self.data is None and (self.capacity_steps is None) == (self.capacity_bytes is None):
            rule = "must have one of data, capacity_steps and capacity_bytes"
            raise t.conflict(rule, "give the one that the table is made of")
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


# Of options that a writer depends on, which a config may leave out: see `store.writer_options`.
DEFAULTS = {
    "table": t.defaults_of(TableConfig),
    "rate_limiter": t.defaults_of(RateLimiterConfig),
    "version": t.defaults_of(VersionConfig),
    "group": t.defaults_of(GroupConfig),
    "prompts": t.defaults_of(PromptsConfig),
    "media": t.defaults_of(MediaConfig),
}

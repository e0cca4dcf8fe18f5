"""The options of samplers: how the samples of a global batch are selected, a model per kind.

The class that samples for a kind is in sampling/samplers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator

from deepspeed_gear.config import types as t
from deepspeed_gear.config.schedules import Schedule, imported
from deepspeed_gear.errors import ConfigError

_NAMES = Field(description="Names the sampler.")
SHARES_TOLERANCE = 1e-6  # of the sum of the shares of a mixture


class AnchorsConfig(t.GearModel):
    """Anchors at every k-th step whose windows have at most so much padding, in steps.

    With `"pad_before": 0, "pad_after": 0` they are those of "fits".
    """

    every: t.Steps = 1
    """Steps from one anchor to the next, from the first admitted one on."""
    pad_before: Annotated[t.Int, Ge(0)] | None = None
    """Most steps of padding at the beginning of any window. null: any number."""
    pad_after: Annotated[t.Int, Ge(0)] | None = None
    """Most steps of padding at the end of any window. null: any number."""

    @model_validator(mode="after")
    def _chooses(self) -> Any:
        if not self.model_fields_set:
            raise t.conflict("must have every, pad_before or pad_after", 'for all steps use "all"')
        return self

    @property
    def bounds_padding(self) -> bool:
        """Whether some anchors are left out for the padding of their windows."""
        return self.pad_before is not None or self.pad_after is not None


class WhereConfig(t.RangeConfig):
    """Condition on the values of a per-trajectory column: a range, or a list of values."""

    in_: Annotated[list[t.Scalar], MinLen(1)] | None = Field(default=None, alias="in")
    """The admitted values, compared in the dtype of the column."""

    @model_validator(mode="after")
    def _range_or_list(self) -> Any:
        if self.in_ is not None and (self.min is not None or self.max is not None):
            raise t.conflict("must have min and max, or in, not both", "drop one")
        return self


class SamplerOptions(t.GearModel):
    """Options of all samplers."""

    has_priorities: ClassVar[bool] = False
    on_device: ClassVar[bool] = False  # for tables in a GPU's memory

    unit: Literal["trajectory", "step", "group"] = "trajectory"
    """What an item is. A "group" stands for all trajectories of one group (`tables.<name>.group`);
    its weights, priorities and values for `where` are those of its newest trajectory."""
    table: t.Name | None = None
    """The table to sample. null: the only one."""
    anchors: Annotated[
        Literal["all", "fits", "start", "end"] | AnchorsConfig,
        t.Words('"all"', '"fits"', '"start"', '"end"', '{"every": k}', '{"pad_after": n}'),
    ] = "all"
    """Steps at which windows may stand: "all" of them; "fits", those where every window lies inside
    the trajectory; "start", the first step; "end", the last one; every k-th step; or those whose
    windows have at most so much padding. A trajectory without an anchor is never drawn.
    """
    where: dict[t.Name, WhereConfig] = Field(default={})
    """Conditions on per-trajectory columns. Trajectories that fail one are never drawn."""

    @property
    def columns(self) -> dict[str, str]:
        """Per-trajectory columns that the sampler reads, by the option that names each."""
        return {}


class DrawingOptions(SamplerOptions):
    """Options of samplers with random draws."""

    stratified: t.Flag = False
    """Draw sample j of a global batch of B from the j-th of B equal parts of the total mass. The
    probabilities are the same with less variance, but samples are no longer independent.
    """


class UniformSampler(DrawingOptions):
    """Draws every item with the same probability, independently and with replacement."""

    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["uniform"], _NAMES] = "uniform"


class LengthSampler(DrawingOptions):
    """Draws trajectories, or groups, in proportion to their number of steps."""

    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["length"], _NAMES]

    @model_validator(mode="after")
    def _whole_trajectories(self) -> Any:
        if self.unit == "step":
            raise t.conflict(
                'must be "trajectory" or "group" where {at}.kind is "length"',
                'uniform steps have the same effect: "kind": "uniform", "unit": "step"',
                "unit",
                self.unit,
            )
        return self


class WeightedSampler(DrawingOptions):
    """Draws trajectories, or their steps, in proportion to a given weight of the trajectory."""

    kind: Annotated[Literal["weighted"], _NAMES]
    weight: t.Name
    """The per-trajectory column of weights, finite and at least 0; items of weight 0 are never
    drawn. Where the unit is a step, every step of a trajectory has the trajectory's weight.
    """

    @property
    def columns(self) -> dict[str, str]:
        return {"weight": self.weight}


class CustomSampler(DrawingOptions):
    """Draws from integer masses that a user's class gives the trajectories."""

    kind: Annotated[Literal["custom"], _NAMES]
    masses: Annotated[t.Text, t.Words('"module:Class"')]
    """"module:Class", importable on every rank. An instance is called with NumPy arrays of ids [n]
    and numbers of steps [n], and a function that returns the values of a per-trajectory column [n].
    It returns masses [n], integers in [0, 2^40], which depend on nothing else. Where the unit is a
    step, every step of a trajectory has the trajectory's mass.
    """
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""


class PriorityOptions(t.GearModel):
    """Options of samplers by priority."""

    initial: t.Positive | None = None
    """Priority of new items. null: the highest priority reported up to the latest batch, 1 at
    first.
    """
    reduce: Literal["max", "mean", "mix"] = "mix"
    """Reduction of [B, T] priorities to [B] over the steps of the mask: "max", "mean", or "mix",
    eta * max + (1 - eta) * mean (Kapturowski et al. 2019, R2D2).
    """
    eta: t.Gamma = 0.9
    """Weight of the maximum where `reduce` is "mix"."""


class PrioritizedSampler(DrawingOptions, PriorityOptions):
    """Draws in proportion to priority ** alpha (Schaul et al. 2016), with importance weights."""

    has_priorities: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["prioritized"], _NAMES]
    alpha: Schedule = 0.6
    """Exponent of the priorities; 0 is uniform. A number or a schedule."""
    alpha_every: t.Count = 1000
    """Global batches between updates of a scheduled alpha. Each update computes all masses again
    from the stored priorities.
    """
    beta: Schedule = 0.4
    """Exponent of the importance weights (N * probability) ** -beta. A number or a schedule. For a
    table on devices, a function takes and returns a tensor [], float64.
    """
    decay: Annotated[t.Number, Ge(1)] | None = None
    """Global batches in which a priority falls by the factor e. `initial` and reported priorities
    are multiplied by exp(-age / decay), where age counts global batches since the item could first
    be drawn. null: priorities do not decay.
    """
    normalize: Literal["batch", "table"] | None = "batch"
    """Divisor of the importance weights: the largest weight in the global batch ("batch"), the
    largest that any item of the table would have ("table"), or none (null).
    """


class TopKSampler(SamplerOptions, PriorityOptions):
    """Selects the items of highest priority, lowest id first among equal ones, once per batch."""

    has_priorities: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["top_k"], _NAMES]


class EpochSampler(SamplerOptions):
    """Selects every item once per epoch, in an order given by the seed; new items join the next."""

    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["epoch"], _NAMES]
    tail: Literal["wrap", "drop"] = "wrap"
    """Treatment of an epoch that ends inside a global batch: "wrap" continues with the next epoch,
    "drop" leaves the last items out and begins the next epoch with the next batch.
    """


class FifoSampler(SamplerOptions):
    """Selects the oldest items, each once per global batch, oldest first."""

    kind: Annotated[Literal["fifo"], _NAMES]


class LifoSampler(SamplerOptions):
    """Selects the newest items, each once per global batch, newest first."""

    kind: Annotated[Literal["lifo"], _NAMES]


class WithinConfig(t.GearModel):
    """A window on a per-trajectory column that grows with time, up to its largest value."""

    column: t.Name
    """The column, such as a policy version or a time of collection."""
    distance: Annotated[t.Number, t.Words("a finite number")]
    """Length of the window: values of at least the largest one minus this number are admitted."""


class RecentSampler(DrawingOptions):
    """Draws every item in a window of the newest ones with the same probability."""

    kind: Annotated[Literal["recent"], _NAMES]
    newest: t.Count | None = None
    """Trajectories, or steps, in the window. If it begins inside a trajectory, all steps of that
    one are admitted.
    """
    within: WithinConfig | None = None
    """Window by age or policy version."""

    @property
    def columns(self) -> dict[str, str]:
        return {} if self.within is None else {"within.column": self.within.column}

    @model_validator(mode="after")
    def _has_a_window(self) -> Any:
        if self.newest is None and self.within is None:
            raise t.conflict(
                "or {at}.within must be given", 'without a window use "kind": "uniform"', "newest"
            )
        return self


class ExternalSampler(DrawingOptions):
    """A user's sampler: a subclass of `Sampler` with its own config model."""

    kind: Annotated[t.Text, t.Words('"module:Class"')]
    """"module:Class", importable on every rank and named by its module."""
    options: dict[str, Any] = Field(default={})
    """Options of the class, as its `Options` admits."""

    @property
    def made_options(self) -> Any:
        """An instance of the class's `Options`, made from `options`; ConfigError if it has none."""
        model = getattr(imported(self.kind, "gear.sampler.kind"), "Options", None)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise ConfigError(
                "gear.sampler.kind",
                "must name a class with a pydantic model `Options`",
                self.kind,
                "derive it from GearModel",
            )
        try:
            return model(**self.options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(["gear.sampler.options", *map(str, first["loc"])])
            raise ConfigError(
                name,
                first["msg"],
                first["input"],
                "correct it as the sampler's Options class defines it",
            ) from None

    @model_validator(mode="after")
    def _admits_options(self) -> Any:
        assert self.made_options is not None
        return self


def _kind_of(value: Any) -> Any:
    kind = value.get("kind", "uniform") if isinstance(value, dict) else getattr(value, "kind", None)
    return "module:Class" if isinstance(kind, str) and ":" in kind else kind


ItemSampler = (
    Annotated[UniformSampler, Tag("uniform")]
    | Annotated[LengthSampler, Tag("length")]
    | Annotated[WeightedSampler, Tag("weighted")]
    | Annotated[CustomSampler, Tag("custom")]
    | Annotated[PrioritizedSampler, Tag("prioritized")]
    | Annotated[TopKSampler, Tag("top_k")]
    | Annotated[EpochSampler, Tag("epoch")]
    | Annotated[FifoSampler, Tag("fifo")]
    | Annotated[LifoSampler, Tag("lifo")]
    | Annotated[RecentSampler, Tag("recent")]
    | Annotated[ExternalSampler, Tag("module:Class")]
)


class MixtureSampler(t.GearModel):
    """Draws samples of several tables in given shares, in every global batch."""

    kind: Annotated[Literal["mixture"], _NAMES]
    shares: Annotated[dict[t.Name, Schedule], MinLen(1)]
    """Share of a global batch by table, numbers or schedules; at any time they sum to 1. Remainders
    of rounding to whole samples are carried to the next batches, so over all batches each table is
    within one sample of its share.
    """
    of: Annotated[ItemSampler, Discriminator(_kind_of)] = UniformSampler()
    """The sampler of each table."""
    by_table: dict[t.Name, Annotated[ItemSampler, Discriminator(_kind_of)]] = Field(default={})
    """Samplers of tables that do not use `of`; their `anchors` are those of `of`, and so is their
    `unit`. In packed batches, some tables may have the unit "group" and others "trajectory".
    """

    @model_validator(mode="after")
    def _whole(self) -> Any:
        numbers = [share for share in self.shares.values() if isinstance(share, (int, float))]
        if len(numbers) == len(self.shares) and abs(sum(numbers) - 1) > SHARES_TOLERANCE:
            raise t.conflict("must sum to 1", "correct them", "shares", self.shares)
        every = [self.by_table.get(name, self.of) for name in self.shares]
        given = [(one.reduce, one.eta) for one in every if isinstance(one, PriorityOptions)]
        if any(one != given[0] for one in given):  # one reduction applies to a whole batch
            raise t.conflict(
                "must have one reduce and eta in all samplers",
                "one reduction applies to a whole batch",
                "by_table",
                given,
            )
        for name, sampler in self.by_table.items():
            if name not in self.shares:
                raise t.conflict(
                    "must name tables of {at}.shares", "give the table a share", "by_table", name
                )
            for option in ("unit", "anchors", "table"):
                own = getattr(sampler, option)
                common = getattr(self.of, option)
                are_whole = option == "unit" and {own, common} == {"group", "trajectory"}
                if own != common and not are_whole:
                    raise t.conflict(
                        f"must have in table {name} the {option} of {{at}}.of ({common})",
                        "change one of them",
                        "by_table",
                        own,
                    )
        return self


SamplerConfig = Annotated[
    ItemSampler | Annotated[MixtureSampler, Tag("mixture")], Discriminator(_kind_of)
]

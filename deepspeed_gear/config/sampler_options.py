"""The config of the samplers: how the samples of a global batch are selected. One model for each
kind.

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


class EveryConfig(t.GearModel):
    """Anchors at the steps 0, k, 2k, ... of a trajectory."""

    every: t.Steps
    """Distance of two anchors in steps."""


class WhereConfig(t.RangeConfig):
    """Which values of a per-trajectory column are admitted; all given conditions must hold."""

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
    """What an item is. A "group" is all trajectories of one group (`tables.<name>.group`); weights,
    priorities and the conditions of `where` are those of its newest trajectory."""
    table: t.Name | None = None
    """The table to sample. null: the only one."""
    anchors: Annotated[
        Literal["all", "fits", "start", "end"] | EveryConfig,
        t.Words('"all"', '"fits"', '"start"', '"end"', '{"every": k}'),
    ] = "all"
    """Steps at which windows may stand: "all"; "fits", where every window lies inside the
    trajectory; "start", the first step; "end", the last one; or every k-th step. A trajectory
    without one is never drawn.
    """
    where: dict[t.Name, WhereConfig] = Field(default={})
    """Conditions on per-trajectory columns. Trajectories that fail one are never drawn."""

    @property
    def columns(self) -> dict[str, str]:
        """The per-trajectory columns of numbers that the sampler reads, by the option that names
        each.
        """
        return {}


class DrawingOptions(SamplerOptions):
    """Options of samplers with random draws."""

    stratified: t.Flag = False
    """Draw sample j of a global batch of B from the j-th of B equal parts of the total mass: the
    same probabilities with less variance, no longer independent.
    """


class UniformSampler(DrawingOptions):
    """Every item with the same probability, independently, with replacement."""

    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["uniform"], _NAMES] = "uniform"


class LengthSampler(DrawingOptions):
    """Trajectories, or groups, in proportion to their number of steps."""

    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["length"], _NAMES]

    @model_validator(mode="after")
    def _whole_trajectories(self) -> Any:
        if self.unit == "step":
            remedy = 'uniform steps have the same effect: "kind": "uniform", "unit": "step"'
            rule = 'must be "trajectory" or "group" where {at}.kind is "length"'
            raise t.conflict(rule, remedy, "unit", self.unit)
        return self


class WeightedSampler(DrawingOptions):
    """Trajectories, or their steps, in proportion to a given weight of the trajectory."""

    kind: Annotated[Literal["weighted"], _NAMES]
    weight: t.Name
    """The per-trajectory column of weights: finite, at least 0; 0 is never drawn. Where the unit is
    a step, every step of a trajectory has the trajectory's weight.
    """

    @property
    def columns(self) -> dict[str, str]:
        return {"weight": self.weight}


class CustomSampler(DrawingOptions):
    """A user's class that gives each trajectory an integer mass; samples are drawn from these
    masses.
    """

    kind: Annotated[Literal["custom"], _NAMES]
    masses: Annotated[t.Text, t.Words('"module:Class"')]
    """"module:Class", importable on every rank. Its instances are called with ids [n], numbers of
    steps [n] and a function that gives the values of a per-trajectory column [n], as NumPy arrays;
    they return masses [n], integers in [0, 2^40], a pure function of these. Where the unit is a
    step, every step of a trajectory has its mass.
    """
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the class."""


class PriorityOptions(t.GearModel):
    """Options of samplers by priority."""

    initial: t.Positive | None = None
    """Priority of new items. null: the highest reported, as of the latest batch; 1 at first."""
    reduce: Literal["max", "mean", "mix"] = "mix"
    """How priorities of shape [B, T] become [B], over the steps of the mask: the highest, the mean,
    or "mix": eta * max + (1 - eta) * mean (Kapturowski et al. 2019, R2D2).
    """
    eta: t.Gamma = 0.9
    """Part of the maximum where `reduce` is "mix"."""


class PrioritizedSampler(DrawingOptions, PriorityOptions):
    """In proportion to priority ** alpha (Schaul et al. 2016), with importance weights."""

    has_priorities: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["prioritized"], _NAMES]
    alpha: Schedule = 0.6
    """Exponent of the priorities: 0 is uniform. A number or a schedule."""
    alpha_every: t.Count = 1000
    """Global batches between updates of a scheduled alpha; each computes all masses again from the
    stored priorities.
    """
    beta: Schedule = 0.4
    """Exponent of the importance weights (N * probability) ** -beta. A number or a schedule; of a
    table on devices a function takes and returns a tensor [], float64.
    """
    decay: Annotated[t.Number, Ge(1)] | None = None
    """Global batches in which a priority falls by the factor e: a new item's is `initial` times
    exp(-age / decay), a reported one likewise, where age is counted in global batches since the
    item could first be drawn. null: priorities do not decay.
    """
    normalize: Literal["batch", "table"] | None = "batch"
    """What divides the importance weights: the largest one of the global batch, the largest one
    that any item of the table would have, or nothing (null).
    """


class TopKSampler(SamplerOptions, PriorityOptions):
    """The items of highest priority, each once in a global batch; of equal ones those with the
    lowest id.
    """

    has_priorities: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    kind: Annotated[Literal["top_k"], _NAMES]


class EpochSampler(SamplerOptions):
    """Every item once, in an order given by the seed, then again. New items join the next epoch."""

    kind: Annotated[Literal["epoch"], _NAMES]
    tail: Literal["wrap", "drop"] = "wrap"
    """Where an epoch ends inside a global batch: "wrap" continues with the next epoch, "drop"
    leaves the last items out and begins the next epoch with the next batch.
    """


class FifoSampler(SamplerOptions):
    """The oldest items, each once in a global batch, oldest first."""

    kind: Annotated[Literal["fifo"], _NAMES]


class LifoSampler(SamplerOptions):
    """The newest items, each once in a global batch, newest first."""

    kind: Annotated[Literal["lifo"], _NAMES]


class WithinConfig(t.GearModel):
    """A per-trajectory column that grows with time, and how far a value may lie below the largest
    one.
    """

    column: t.Name
    """The column: a policy version, or a time of collection."""
    distance: Annotated[t.Number, t.Words("a finite number")]
    """Admitted are values of at least the largest one minus this."""


class RecentSampler(DrawingOptions):
    """Every item of a window of the newest ones with the same probability."""

    kind: Annotated[Literal["recent"], _NAMES]
    newest: t.Count | None = None
    """Items in the window: trajectories, or steps, of which those of the trajectory in which the
    window begins are all admitted.
    """
    within: WithinConfig | None = None
    """A limit of age or policy version."""

    @property
    def columns(self) -> dict[str, str]:
        return {} if self.within is None else {"within.column": self.within.column}

    @model_validator(mode="after")
    def _has_a_window(self) -> Any:
        if self.newest is None and self.within is None:
            remedy = 'without a window use "kind": "uniform"'
            raise t.conflict("or {at}.within must be given", remedy, "newest")
        return self


class ExternalSampler(DrawingOptions):
    """A user's sampler: a subclass of `Sampler` with its own config model."""

    kind: Annotated[t.Text, t.Words('"module:Class"')]
    """"module:Class", importable on every rank and named by its module."""
    options: dict[str, Any] = Field(default={})
    """Options of the class, as its `Options` admits."""

    @property
    def made_options(self) -> Any:
        """The instance of the class's `Options` made from `options`; ConfigError where there is
        none.
        """
        model = getattr(imported(self.kind, "gear.sampler.kind"), "Options", None)
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            rule = "must name a class with a pydantic model `Options`"
            raise ConfigError("gear.sampler.kind", rule, self.kind, "derive it from GearModel")
        try:
            return model(**self.options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(["gear.sampler.options", *map(str, first["loc"])])
            raise ConfigError(name, first["msg"], first["input"]) from None

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
    """Samples of several tables in given shares, in every global batch."""

    kind: Annotated[Literal["mixture"], _NAMES]
    shares: Annotated[dict[t.Name, Schedule], MinLen(1)]
    """Part of a global batch by table, numbers or schedules; at any time they sum to 1. What
    rounding to whole samples leaves is carried to the next batches, so each table has its share
    within one.
    """
    of: Annotated[ItemSampler, Discriminator(_kind_of)] = UniformSampler()
    """How the samples of each table are selected."""
    by_table: dict[t.Name, Annotated[ItemSampler, Discriminator(_kind_of)]] = Field(default={})
    """Tables whose samples are selected otherwise, with the `unit` and `anchors` of `of`."""

    @model_validator(mode="after")
    def _whole(self) -> Any:
        numbers = [share for share in self.shares.values() if isinstance(share, (int, float))]
        if len(numbers) == len(self.shares) and abs(sum(numbers) - 1) > SHARES_TOLERANCE:
            raise t.conflict("must sum to 1", option="shares", value=self.shares)
        every = [self.by_table.get(name, self.of) for name in self.shares]
        given = [(one.reduce, one.eta) for one in every if isinstance(one, PriorityOptions)]
        if any(one != given[0] for one in given):  # a batch's priorities are reduced in one way
            raise t.conflict(
                "must have one reduce and eta in all samplers", option="by_table", value=given
            )
        for name, sampler in self.by_table.items():
            if name not in self.shares:
                raise t.conflict("must name tables of {at}.shares", option="by_table", value=name)
            for option in ("unit", "anchors", "table"):
                own = getattr(sampler, option)
                common = getattr(self.of, option)
                if own != common:
                    rule = f"must have in table {name} the {option} of {{at}}.of ({common})"
                    raise t.conflict(rule, option="by_table", value=own)
        return self


SamplerConfig = Annotated[
    ItemSampler | Annotated[MixtureSampler, Tag("mixture")], Discriminator(_kind_of)
]

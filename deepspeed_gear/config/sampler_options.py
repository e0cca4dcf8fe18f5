"""The samplers: how the samples of a global batch are selected. One model a kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Discriminator, Field

from deepspeed_gear.config.schedules import Schedule
from deepspeed_gear.config.types import (
    Count,
    Flag,
    Gamma,
    GearModel,
    Name,
    Number,
    Positive,
    Scalar,
    Steps,
    Text,
    Words,
)


class EveryConfig(GearModel):
    """Anchors at the steps 0, k, 2k, ... of a trajectory."""

    every: Steps = Field(description="Distance of two anchors in steps.")


class WhereConfig(GearModel):
    """Which values of a per-trajectory column are admitted; all given conditions must hold."""

    min: Number | None = Field(default=None, description="Smallest admitted value.")
    max: Number | None = Field(default=None, description="Largest admitted value.")
    in_: Annotated[list[Scalar], MinLen(1)] | None = Field(
        default=None, alias="in", description="The admitted values, compared exactly."
    )


class Sampler(GearModel):
    """What all samplers have."""

    unit: Literal["trajectory", "step"] = Field(default="trajectory", description="What an item is.")
    table: Name | None = Field(default=None, description="The table to sample. null: the only one.")
    anchors: Annotated[
        Literal["all", "fits", "start", "end"] | EveryConfig,
        Words('"all"', '"fits"', '"start"', '"end"', '{"every": k}'),
    ] = Field(
        default="all",
        description=(
            'Steps at which windows may stand: "all"; "fits", where every window lies inside the '
            'trajectory; "start", the first step; "end", the last one; or every k-th step. A trajectory'
            " without one is never drawn."
        ),
    )
    where: dict[Name, WhereConfig] = Field(
        default={},
        description="Conditions on per-trajectory columns. Trajectories that fail one are never drawn.",
    )


class DrawingSampler(Sampler):
    """What samplers with random draws have."""

    stratified: Flag = Field(
        default=False,
        description=(
            "Draw sample j of a global batch of B from the j-th of B equal parts of the total mass: the "
            "same probabilities with less variance, no longer independent."
        ),
    )


class UniformSampler(DrawingSampler):
    """Every item with the same probability, independently, with replacement."""

    kind: Literal["uniform"] = Field(default="uniform", description="Names the sampler.")


class LengthSampler(DrawingSampler):
    """Trajectories in proportion to their number of steps."""

    kind: Literal["length"] = Field(description="Names the sampler.")


class WeightedSampler(DrawingSampler):
    """Trajectories, or their steps, in proportion to a given weight of the trajectory."""

    kind: Literal["weighted"] = Field(description="Names the sampler.")
    weight: Name = Field(
        description=(
            "The per-trajectory column of weights: finite, at least 0; 0 is never drawn. Where the unit is "
            "a step, every step of a trajectory has the trajectory's weight."
        )
    )


class CustomSampler(DrawingSampler):
    """A class of one's own that gives each trajectory an integer mass: the sampler is drawn from these."""

    kind: Literal["custom"] = Field(description="Names the sampler.")
    masses: Annotated[Text, Words('"module:Class"')] = Field(
        description=(
            '"module:Class", importable on every rank. Its instances are called with ids [n], numbers of '
            "steps [n] and a function that gives the values of a per-trajectory column [n], as NumPy arrays; "
            "they return masses [n], integers in [0, 2^40], a pure function of these. Where the unit is a "
            "step, every step of a trajectory has its mass."
        )
    )
    options: dict[str, Any] = Field(default={}, description="Keyword arguments of the class.")


class PriorityModel(GearModel):
    """What samplers by priority have."""

    initial: Positive | None = Field(
        default=None,
        description="Priority of new items. null: the highest that was ever reported, 1 at the beginning.",
    )
    reduce: Literal["max", "mean", "mix"] = Field(
        default="mix",
        description=(
            "How priorities of shape [B, T] become [B], over the steps of the mask: the highest, the mean, "
            'or "mix": eta * max + (1 - eta) * mean (Kapturowski et al. 2019, R2D2).'
        ),
    )
    eta: Gamma = Field(default=0.9, description='Part of the maximum where `reduce` is "mix".')


class PrioritizedSampler(DrawingSampler, PriorityModel):
    """In proportion to priority ** alpha (Schaul et al. 2016), with importance weights."""

    kind: Literal["prioritized"] = Field(description="Names the sampler.")
    alpha: Schedule = Field(
        default=0.6, description="Exponent of the priorities: 0 is uniform. A number or a schedule."
    )
    alpha_every: Count = Field(
        default=1000,
        description=(
            "Global batches after which a scheduled alpha takes its new value; all masses are then computed "
            "again from the stored priorities."
        ),
    )
    beta: Schedule = Field(
        default=0.4,
        description="Exponent of the importance weights (N * probability) ** -beta. A number or a schedule.",
    )
    normalize: Literal["batch", "table"] | None = Field(
        default="batch",
        description=(
            "What divides the importance weights: the largest one of the global batch, the largest one that "
            "any item of the table would have, or nothing (null)."
        ),
    )


class TopKSampler(Sampler, PriorityModel):
    """The items of highest priority, each once in a global batch; of equal ones those with the lowest id."""

    kind: Literal["top_k"] = Field(description="Names the sampler.")


class EpochSampler(Sampler):
    """Every item once, in an order given by the seed, then again. New items join the next epoch."""

    kind: Literal["epoch"] = Field(description="Names the sampler.")
    tail: Literal["wrap", "drop"] = Field(
        default="wrap",
        description=(
            'Where an epoch ends inside a global batch: "wrap" goes on with the next epoch, "drop" leaves '
            "the last items out and begins the next epoch with the next batch."
        ),
    )


class FifoSampler(Sampler):
    """The oldest items, each once in a global batch, oldest first."""

    kind: Literal["fifo"] = Field(description="Names the sampler.")


class LifoSampler(Sampler):
    """The newest items, each once in a global batch, newest first."""

    kind: Literal["lifo"] = Field(description="Names the sampler.")


class WithinConfig(GearModel):
    """A per-trajectory column that grows with time, and how far a value may lie below the largest one."""

    column: Name = Field(description="The column: a policy version, or a time of collection.")
    distance: Annotated[Number, Words("a finite number")] = Field(
        description="Admitted are values of at least the largest one minus this."
    )


class RecentSampler(DrawingSampler):
    """Every item of a window of the newest ones with the same probability."""

    kind: Literal["recent"] = Field(description="Names the sampler.")
    newest: Count | None = Field(
        default=None,
        description=(
            "Items in the window: trajectories, or steps, of which those of the trajectory in which the "
            "window begins are all admitted."
        ),
    )
    within: WithinConfig | None = Field(default=None, description="A limit of age or policy version.")


def _named(value: Any) -> Any:
    """Read a sampler without a kind as a uniform one."""
    return {"kind": "uniform", **value} if isinstance(value, dict) and "kind" not in value else value


ItemSampler = (
    UniformSampler
    | LengthSampler
    | WeightedSampler
    | CustomSampler
    | PrioritizedSampler
    | TopKSampler
    | EpochSampler
    | FifoSampler
    | LifoSampler
    | RecentSampler
)


class MixtureSampler(GearModel):
    """Samples of several tables in given shares, in every global batch."""

    kind: Literal["mixture"] = Field(description="Names the sampler.")
    shares: Annotated[dict[Name, Schedule], MinLen(1)] = Field(
        description="Part of a global batch by table, numbers or schedules; at any time they sum to 1."
    )
    exact: Flag = Field(
        default=True,
        description=(
            "Every global batch holds the shares rounded to whole samples (largest remainders first). "
            "false: the table of each sample is drawn, so that the shares hold in expectation."
        ),
    )
    of: Annotated[ItemSampler, Discriminator("kind"), BeforeValidator(_named)] = Field(
        default=UniformSampler(), description="How the samples of each table are selected."
    )


SamplerConfig = Annotated[ItemSampler | MixtureSampler, Discriminator("kind"), BeforeValidator(_named)]

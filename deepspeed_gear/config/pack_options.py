"""The options of packed batches: `gear.pack`, `gear.batch`, `gear.rollout` and `gear.loss`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field, field_validator, model_validator

from deepspeed_gear.config.types import Count, Flag, GearModel, Int, Positive, Steps, Words, conflict, refuse

MOST_COST = 1 << 32  # of either factor; the costs of a batch are summed in 62 bits


class PackPadConfig(GearModel):
    """How far a micro batch is padded at its end."""

    to: Literal["multiple", "step", "budget"] = "multiple"
    """"multiple": to the next multiple; "step": to the same length on all ranks in each micro step, which
    DeepSpeed's experts need; "budget": to `gear.pack.tokens`, down to a multiple, for compiled models."""
    multiple: Annotated[Int, Ge(1), Le(1 << 20)] = 128
    """The length of every micro batch is a multiple of it."""


class PackConfig(GearModel):
    """Packed micro batches: whole trajectories one after the other, without padding between them."""

    tokens: Steps
    """Most steps of a micro batch, its padding included."""
    cost: Annotated[list[Annotated[Int, Ge(0), Lt(MOST_COST)]], Words("two whole numbers [c1, c2]")] = Field(
        default=[1, 0]
    )
    """What a trajectory of l steps costs to train, c1 * l + c2 * l * l: micro batches are balanced by it. A
    transformer of hidden size h: [6 * h, 1]."""
    pad: PackPadConfig = PackPadConfig()
    """Padding at the end of a micro batch."""
    max_trajectories: Annotated[Int, Ge(1), Lt(1 << 31)] | None = None
    """Most trajectories of a micro batch; 1 for models that carry state from one trajectory of a pack to the
    next, such as Mamba. null: as many as `tokens` hold."""
    plan_width: Count | None = None
    """Number of ranks that packs are planned for, a multiple of the replicas: packs are then the same on any
    such number of replicas. null: the number of replicas."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """Trajectories longer than `tokens`: "refuse" asks for a `max_length` of the table, so that a writer gets
    the error; "truncate" trains their first steps, after which `rollout.advantages` bootstraps."""

    prefix: Literal["own", "share"] = "own"
    """The prompts of a group's trajectories in a micro batch: "own", one each; "share", once where their
    tokens are equal, so that all their responses attend to it: `micro.model_inputs` has the mask."""

    @field_validator("cost")
    @classmethod
    def _two(cls, cost: list[int]) -> list[int]:
        if len(cost) != 2 or not any(cost):
            raise refuse("must be two whole numbers [c1, c2], not both 0")
        return cost


def room(pack: PackConfig) -> int:
    """Return the most steps of trajectories in a micro batch, whose length is a multiple."""
    return pack.tokens // pack.pad.multiple * pack.pad.multiple


class BatchSizeConfig(GearModel):
    """The size of a batch: in its unit, and where tokens are given also in steps."""

    groups: Count | None = None
    """Groups; with `"unit": "group"` of the sampler."""
    trajectories: Count | None = None
    """Trajectories; with `"unit": "trajectory"` of the sampler."""

    tokens: Steps | None = None
    """Most steps of a batch. The groups or trajectories are then selected at once, and a batch takes those
    that fit, in their order, at least one: the others begin the next batch. null: a batch is what is selected
    at once."""

    @model_validator(mode="after")
    def _one_unit(self) -> Any:
        if (self.groups is None) == (self.trajectories is None):
            remedy = "they are selected at once, and a batch has no more of them"
            raise conflict("must have one of groups and trajectories", remedy if self.tokens else "")
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

    minibatches: Count = 1
    """Optimizer steps of an epoch: the items are divided among them."""
    epochs: Count = 1
    """How often every item of the rollout batch is trained."""
    partial: Literal["spread", "drop"] = "spread"
    """Where the items do not divide by the minibatches: "spread" makes some of them one item larger, "drop"
    leaves the last items of the shuffled order out of the epoch."""
    shuffle: Flag = True
    """Shuffle the items before each epoch, by the seed."""


class ConstantConfig(GearModel):
    """The sum of each sequence divided by a constant."""

    constant: Positive
    """What the sum over a sequence is divided by."""


class LossConfig(GearModel):
    """Of what the summed loss of all ranks and micro batches is the mean."""

    normalize: Annotated[
        Literal["token", "sequence", "group"] | ConstantConfig,
        Words('"token"', '"sequence"', '"group"', '{"constant": c}'),
    ] = "token"
    """Over the optimizer step's batch: "token", the mean over tokens (DAPO); "sequence", the mean over
    sequences of the mean over their tokens (GRPO); "group", the mean over groups of the mean over their
    tokens; {"constant": c}, the mean over sequences of their sum / c (Dr. GRPO)."""
    count_masked: Flag = False
    """Whether sequences and groups count that have no token of the loss mask, such as overlong ones; also in
    the baselines of `rollout.advantages()`."""
    by: Literal["trajectory", "member"] = "trajectory"
    """What a sequence is: a trajectory, or all trajectories of one member of a group."""

"""Rollout context: how a rank makes its packs, and what its rollout batches share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from deepspeed_gear.batching.loss_weights import GradientDivisor
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.options import LossConfig, PackConfig, RolloutConfig
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.sequence_sum import SequenceSum
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.replay.metrics import LossWarning, Metrics
from deepspeed_gear.schema import Schema

# what is gathered and is no field of a micro batch
TARGETS = "\0targets"
MASK = "\0mask"
StepObserver = Callable[[Any], None]  # takes a TrainStep
T = TypeVar("T")


@dataclass(frozen=True)
class PackSettings:
    """How this rank's packs are made. Pure."""

    pack: PackConfig
    loss: LossConfig
    size: RolloutConfig
    random_keys: tuple[int, int]  # seed and random key of the shuffled orders
    place: RankCoordinates
    device: torch.device
    schema: Schema  # of the first table; all have the fields of a pack
    fields: tuple[ResolvedField, ...]
    opaque: tuple[ResolvedField, ...] = ()
    #: The column with a number for each member of a group; None: each trajectory is one.
    member: str | None = None
    #: The sum over the ranks that share this rank's sequences; None: there are no others.
    ranks: SequenceSum | None = None

    @cached_property
    def token(self) -> str | None:
        """The name of the field with the tokens; None: there is none."""
        return next(
            (f.name for f in self.fields if f.column is not None and f.column.role == "token"), None
        )

    @cached_property
    def media(self) -> str | None:
        """The name of the field with the numbers of media; None: there is none."""
        return next(
            (f.name for f in self.fields if f.column is not None and f.column.role == "media"), None
        )

    @property
    def predicts(self) -> bool:
        """Whether columns stand where the token is predicted."""
        return self.schema.role("token") is not None

    def gathered(self) -> list[ResolvedField]:
        """Return the fields that packs are gathered with: those of a micro batch, and targets."""
        found = []
        for one in self.fields:  # tokens become int64, which every embedding takes
            is_token = one.column is not None and one.column.role == "token"
            unchanged = one.column is not None and one.dtype == one.column.dtype
            found.append(replace(one, dtype="int64") if is_token and unchanged else one)
        token = self.schema.role("token")
        if token is not None:
            found.append(ResolvedField(TARGETS, token, offset=1, dtype="int64"))
        return found


@dataclass(frozen=True)
class RolloutContext:
    """What the rollout batches of a rank share: the loader makes it, and passes it down."""

    settings: PackSettings
    control_plane: ControlPlane
    barrier: BatchBarrier | None  # of ranks that train together; None: they need not
    is_spread: bool  # nodes exchange rows: values of all trajectories are then collective
    divisor: GradientDivisor
    metrics: Metrics = field(default_factory=Metrics)
    loss_warning: LossWarning | None = None  # of rank 0
    #: An engine's: called with each train step before its first micro batch. All ranks raise
    #: errors.
    observers: list[StepObserver] = field(default_factory=list)

    def agree(self, action: Callable[[], T]) -> T:
        """Run an action after the batch barrier and return its result; all ranks raise an error."""
        if self.barrier is not None:
            return self.barrier.agree(action)
        if self.is_spread:  # nodes exchange rows: ranks must not use them before or after
            return self.control_plane.attempt("a rollout batch", action)
        return action()

    def check_same(
        self, what: str, value: object, check: Callable[[], None] = lambda: None
    ) -> None:
        """Check on all ranks that they give the same value; only where nodes exchange rows.

        Args:
            what: Name of the value in errors.
            value: The value of this rank.
            check: Called first; its error is raised on all ranks.
        """
        if self.is_spread:
            self.agree(check)
            self.control_plane.compare(what, value)

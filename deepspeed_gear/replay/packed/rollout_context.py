"""Settings of a rank's packs, and the context of its rollout batches: how its ranks agree."""

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
from deepspeed_gear.distributed.sequence_sum import SequenceSum, sequence_sum
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay.log_warnings import EqualRewardsWarning, LossWarning
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.sampling.mass_rules import random_key_of
from deepspeed_gear.schema import Schema

# Gathered with the fields of a pack, and returned as `targets` and `loss_mask` of a micro batch.
TARGETS = "\0targets"
MASK = "\0mask"
READ = "the columns of a rollout batch that are read"  # what ranks compare, in errors
StepObserver = Callable[[Any], None]  # takes a TrainStep
T = TypeVar("T")


@dataclass(frozen=True)
class PackSettings:
    """Settings of this rank's packs: config, fields, and the rank's place in its replica."""

    pack: PackConfig
    loss: LossConfig
    size: RolloutConfig
    random_keys: tuple[int, int]  # seed and random key of the shuffled orders
    place: RankCoordinates
    device: torch.device
    schema: Schema  # of the first table; all have the fields of a pack
    fields: tuple[ResolvedField, ...]
    opaque: tuple[ResolvedField, ...] = ()
    ragged: tuple[ResolvedField, ...] = ()
    member: str | None = None  # column that names a group's members; None: each trajectory is one
    # Weight and mean of each table of a mixture; empty: there is one mean over all.
    table_losses: tuple[tuple[float, LossConfig], ...] = ()
    ranks: SequenceSum | None = None  # sum over the ranks of one sequence; None: there is one

    @classmethod
    def of(cls, plan: Resolved, device: torch.device) -> PackSettings:
        """Return the settings that follow from a replay's plan, which has packs. Collective."""
        config = plan.config
        assert config.pack is not None
        assert config.rollout_size is not None
        tables = config.sampled_tables
        groups = [config.resolved_tables[name].group for name in tables]
        return cls(
            pack=config.pack,
            loss=config.loss,
            size=config.rollout_size,
            random_keys=(config.seed, random_key_of(tables[0], "minibatches")),
            place=plan.topology.place,
            device=device,
            schema=plan.schemas[tables[0]],
            fields=tuple(plan.needs.fields),
            opaque=tuple(field for field in plan.needs.opaque if not field.is_ragged),
            ragged=tuple(field for field in plan.needs.opaque if field.is_ragged),
            member=next((group.member for group in groups if group is not None), None),
            table_losses=tuple(config.loss.of_tables(tables)),
            ranks=sequence_sum(
                plan.topology, device, config.timeout_s, plan.group, plan.control_plane
            ),
        )

    @cached_property
    def field_by_role(self) -> dict[str | None, str]:
        """The first field of a column of each role: `field_by_role.get("token")`."""
        fields = reversed(self.fields)  # of fields of one role the first one is set last
        return {one.column.role: one.name for one in fields if one.column is not None}

    @property
    def predicts(self) -> bool:
        """Whether columns stand where the token is predicted."""
        return self.schema.role("token") is not None

    def gathered(self) -> list[ResolvedField]:
        """Return the fields that packs are gathered with: those of a micro batch, and targets."""
        gathered = []
        for one in self.fields:
            column = one.column
            if column is not None and column.role == "token" and one.dtype == column.dtype:
                # The config names no type: all embeddings take int64.
                one = replace(one, dtype="int64")
            gathered.append(one)
        token = self.schema.role("token")
        if token is not None:
            gathered.append(ResolvedField(TARGETS, token, offset=1, dtype="int64"))
        return gathered


@dataclass(frozen=True)
class RolloutContext:
    """Context of a rank's rollout batches. Its loader makes it and passes it down."""

    settings: PackSettings
    control_plane: ControlPlane
    barrier: BatchBarrier | None  # None: ranks do not train together
    is_spread: bool  # nodes exchange rows, so reading values of all trajectories is collective
    divisor: GradientDivisor
    metrics: Metrics = field(default_factory=Metrics)
    loss_warning: LossWarning | None = None  # of rank 0
    rewards_warning: EqualRewardsWarning | None = None  # of rank 0
    #: Functions of an engine, called with each train step before its first micro batch. An error
    #: is raised on all ranks.
    observers: list[StepObserver] = field(default_factory=list)

    def agree(self, action: Callable[[], T]) -> T:
        """Run an action on all ranks and pass a barrier; return the result of this rank's action.

        An error of one rank is raised on all. No rank returns before all have run the action: so
        rows that it moves are not read before they are there, nor overwritten while they are read.
        A rank that neither trains with others nor exchanges rows just runs the action.
        """
        if self.barrier is not None:
            return self.barrier.agree(action)
        if self.is_spread:
            return self.control_plane.attempt("a rollout batch", action)
        return action()

    def check_same(
        self, what: str, value: object, check: Callable[[], object] | None = None
    ) -> None:
        """Raise PeerError unless all ranks give the same value, where nodes exchange rows.

        Args:
            what: Name of the value in errors.
            value: The value of this rank.
            check: Called first; its error is raised on all ranks.
        """
        if self.is_spread:
            if check is not None:
                self.agree(check)
            self.control_plane.compare(what, value)

"""The interface of a sampler: the strategy that selects the items of a global batch.

A sampler has two methods. `spec` returns the masses of the items and how they are drawn; it is
called once. `sample` returns the coordinates of a global batch's samples in the total mass. Where
`spec` names a native draw, the native op replaces `sample`, which is then its reference: both give
the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

import torch

from deepspeed_gear.sampling.mass_rules import MassRule, PriorityRule


class NativeDraw(Enum):
    """Draws that one native op makes."""

    RANDOM = "random"  # independent draws from the total mass
    STRATIFIED = "stratified"  # sample j of B from the j-th of B equal parts of the total mass


@dataclass
class Draw:
    """The input of `Sampler.sample`: a table's masses and random draws. Equal on every rank, on any
    nodes.

    A coordinate is a number in [0, total): the item in whose mass it falls is the sample. Masses
    lie in the order of trajectories in the store, node by node.
    """

    selector: Any  # the stream's Selector
    count: int  # samples to draw
    first: int  # sample number of the first one
    total: int  # sum of all masses; in epochs, the number of items of this epoch
    epoch: int = 0  # number of the epoch, where the sampler `walks`
    at: int = 0  # index in the epoch of the first sample

    def random(self) -> torch.Tensor:
        """Return independent random coordinates, keyed by seed, stream and sample number. [count],
        int64.
        """
        spec = self.selector.spec
        coordinates = torch.empty(self.count, dtype=torch.int64)
        self.selector.state.ops.draw_(
            coordinates, spec.seed, spec.random_key, self.first, self.total
        )
        return coordinates

    def permuted(self) -> torch.Tensor:
        """Return indices at .. at + count of a random order of [0, total), keyed by the epoch.
        [count].
        """
        spec = self.selector.spec
        coordinates = torch.empty(self.count, dtype=torch.int64)
        self.selector.state.ops.permute_(
            coordinates, spec.seed, spec.random_key, self.epoch, self.at, self.total
        )
        return coordinates

    def highest_priorities(self) -> torch.Tensor:
        """Return the items of highest priority, the highest first; or fewer. [n], int64."""
        return torch.as_tensor(self.selector.highest(self.count))

    def oldest(self) -> torch.Tensor:
        """Return the oldest items, the oldest first; or fewer than `count`. [n], int64."""
        return torch.as_tensor(self.selector.extreme(self.count, newest=False))

    def newest(self) -> torch.Tensor:
        """Return the newest items, the newest first; or fewer than `count`. [n], int64."""
        return torch.as_tensor(self.selector.extreme(self.count, newest=True))


@dataclass(frozen=True)
class SamplerScope:
    """The table that a sampler samples from, and how batches are made."""

    admitted: MassRule  # which trajectories and anchors the config admits, each with mass 1
    prefetch: int  # global batches that are prefetched
    max_waiting_updates: int  # priority updates of one rank that may wait for a selection
    max_mass_bits: int  # log2 of the largest mass of an item
    total_weight: float  # sum of the weights of all items; 0: not known yet

    def priority_rule(
        self,
        initial: float | None,
        alpha: Callable[[int], float] = lambda _: 1.0,
        beta: Callable[[int], float] = lambda _: 0.0,
        normalize: Literal["batch", "table"] | None = None,
    ) -> PriorityRule:
        """Return how priorities become masses and importance weights in this table."""
        log_size = self.max_waiting_updates
        most_bits = self.max_mass_bits
        return PriorityRule(alpha, beta, initial, normalize, self.prefetch, log_size, most_bits)


@dataclass(frozen=True)
class SamplerSpec:
    """The masses and the draw of a sampler, for `select`."""

    rule: MassRule  # masses of the items
    native: NativeDraw | None = None  # the native draw; None: `sample` is called
    # How masses follow priorities; None: they are those of the rule.
    priorities: PriorityRule | None = None
    # Keep the items in the order of their age, for `Draw.oldest` and `Draw.newest`.
    by_age: bool = False


class Sampler(ABC):
    """Strategy that selects the items of each global batch; made from its part of the config on
    every rank.

    A sampler has no state: what `sample` returns follows from its `options`, an instance of
    `Options`, and from the draw.
    """

    Options: ClassVar[type[Any]]  # the config model
    # Samples epochs, every item once in each, without draws from the masses.
    walks: ClassVar[bool] = False
    each_once: ClassVar[bool] = False  # an item is at most once in a global batch
    is_pass: ClassVar[bool] = False  # one epoch for each evaluation pass, padded at its end
    # An epoch's last items are left out where they do not fill a global batch.
    drops_tail: bool = False

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def kind(self) -> str:
        """Its name in the config: "module:Class" of a class whose options have no `kind`."""
        own = type(self)
        return str(getattr(self.options, "kind", f"{own.__module__}:{own.__qualname__}"))

    @abstractmethod
    def spec(self, scope: SamplerScope) -> SamplerSpec:
        """Return the sampler's masses and draw.

        Raises:
            ConfigError: The options do not suit the table.
        """

    @abstractmethod
    def sample(self, draw: Draw) -> torch.Tensor:
        """Return the coordinates of the next samples: `draw.count`, or fewer if there are no more
        items.

        Returns:
            [n], int64, each in [0, draw.total).
        """

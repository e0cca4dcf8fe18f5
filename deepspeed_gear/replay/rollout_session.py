"""Rollout session: what the ranks that train rollout batches decide and compute together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_gear.replay.builder import ReplayParts

StepObserver = Callable[[Any], None]  # takes a TrainStep


class RolloutSession:
    """The ranks of a replay with packed batches. Its methods are collective.

    Args:
        divisor: Returns what the framework divides the sum of all ranks' gradients by.
    """

    def __init__(self, parts: ReplayParts, divisor: Callable[[], float]) -> None:
        self._exchange, self._barrier, self._divisor = parts.plan.exchange, parts.barrier, divisor
        self._is_spread = bool(parts.exchange.trajectories)
        #: Called with each train step before its first micro batch; all ranks raise their errors.
        self.observers: list[StepObserver] = []

    @property
    def divisor(self) -> float:
        """What the framework divides the sum of all ranks' gradients by."""
        return self._divisor()

    def agree(self, action: Callable[[], None]) -> None:
        """Pass the batch barrier of the ranks after an action: an error of one rank is raised on all."""
        if self._barrier is not None:
            self._barrier.agree(action)
        elif self._is_spread:  # nodes exchange rows: ranks must not use them before or after
            self._exchange.agree("a rollout batch", action)
        else:
            action()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks."""
        return self._exchange.sum(tensor)

    def compare(self, what: str, value: object) -> None:
        """Raise on all ranks unless every rank gives an equal value.

        Args:
            what: The value's name in the error.
        Raises:
            PeerError: Two ranks have different ones.
        """
        self._exchange.compare(what, value)

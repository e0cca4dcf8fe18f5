"""Groups of responses that a rollout worker commits, each under a lease of its prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

PROMPT = 100  # tokens
TOKENS = 500  # of a response, its prompt included
MEMBERS = 8  # responses of a group


def group(as_lists: bool) -> list[dict[str, Any]]:
    """Return the responses to a prompt: NumPy arrays, or lists and Python numbers, which the JSON
    of a rollout server becomes.
    """
    random = np.random.default_rng(6)
    responses: list[dict[str, Any]] = [
        {
            "tokens": random.integers(0, 1000, TOKENS).astype(np.int32),
            "loss_mask": np.arange(TOKENS) >= PROMPT,
            "logp": -random.random(TOKENS, np.float32),
            "reward": np.float32(member),
        }
        for member in range(MEMBERS)
    ]
    if as_lists:
        responses = [{name: v.tolist() for name, v in one.items()} for one in responses]
    return responses


class Leases(ABC):
    """A system whose rollout workers commit groups under leases."""

    @abstractmethod
    def lease(self, count: int) -> list[Any]:
        """Return leases of so many prompts."""

    @abstractmethod
    def commit(self, lease: Any, responses: list[dict[str, Any]]) -> None:
        """Store the group of a lease."""

    @abstractmethod
    def consume(self) -> None:
        """Take all committed groups out, as a training step does."""

    @abstractmethod
    def check(self, responses: list[dict[str, Any]]) -> None:
        """Raise unless every committed group that is held has these responses; consume them."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

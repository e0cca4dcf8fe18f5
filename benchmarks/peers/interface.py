"""What a benchmark asks of a replay system: single transitions, or windows of trajectories. NumPy only.

One adapter per system (`gear.py`, `torchrl.py`, ...) fills these classes in with the code that its user would
write. It runs in an environment of its own, so this file imports nothing but NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


class NotOfferedError(Exception):
    """The system has nothing of this kind."""


@dataclass(frozen=True)
class Steps:
    """A buffer of single transitions.

    Args:
        capacity: Transitions.
        num_envs: N, environments that add at the same time.
        batch: B.
        prioritized: Whether items have priorities; else the draws are uniform.
        alpha, beta: Exponents of priorities and of weights.
        normalize: What divides weights: the largest of the batch, or of the table.
        n_step: Steps of a return.
        gamma: Discount of a step.
    """

    capacity: int
    num_envs: int = 1
    batch: int = 64
    prioritized: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    normalize: str = "batch"
    n_step: int = 1
    gamma: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Windows:
    """A buffer of trajectories that is sampled as windows of steps.

    Args:
        capacity: Steps.
        length: Steps of a window.
        whole: Whether windows lie inside a trajectory; else short ones are padded.
    """

    capacity: int
    length: int
    batch: int = 64
    whole: bool = True
    seed: int = 0


@dataclass
class Sampled:
    """A batch, as arrays.

    Args:
        obs, next_obs: Observations before and after the (last) step; each is a number. [B].
        reward: The reward, or the n-step return. [B].
        discount: What the value of `next_obs` is multiplied by: 0 where the episode terminated. [B].
        weight: Importance weights. [B].
        handle: What the system needs to update the priorities of these samples.
    """

    obs: Array
    next_obs: Array
    reward: Array
    discount: Array
    weight: Array
    handle: Any = None


@dataclass(frozen=True)
class Moment:
    """One step of N environments. Each field is [N]; observations are numbers.

    Args:
        next_obs: Where an episode ends, its last observation.
    """

    obs: Array
    next_obs: Array
    reward: Array
    terminated: Array
    truncated: Array

    @classmethod
    def of(
        cls, obs: Any, next_obs: Any = None, reward: Any = None, terminated: Any = None, truncated: Any = None
    ) -> Moment:
        """Return a moment; by default the next observation is 1 more, the reward is 0, and nothing ends."""
        before = np.atleast_1d(np.asarray(obs, np.float32))
        none = np.zeros(len(before), bool)
        return cls(
            before,
            before + 1 if next_obs is None else np.atleast_1d(np.asarray(next_obs, np.float32)),
            np.zeros_like(before) if reward is None else np.atleast_1d(np.asarray(reward, np.float32)),
            none if terminated is None else np.atleast_1d(np.asarray(terminated, bool)),
            none if truncated is None else np.atleast_1d(np.asarray(truncated, bool)),
        )


class StepBuffer(ABC):
    """Single transitions of one system."""

    @abstractmethod
    def add(self, moment: Moment) -> None:
        """Add a transition of every environment."""

    @abstractmethod
    def sample(self) -> Sampled:
        """Return a batch."""

    def update(self, sampled: Sampled, priorities: Array) -> None:
        """Set the priorities of a batch. [B]."""
        raise NotOfferedError

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent of the priorities."""
        raise NotOfferedError

    def __len__(self) -> int:
        """Return the number of transitions that are held."""
        raise NotOfferedError

    def save(self, folder: Path) -> None:
        """Write everything that a new process needs to go on."""
        raise NotOfferedError

    def load(self, folder: Path) -> None:
        """Go on from a save; the buffer may hold something."""
        raise NotOfferedError

    def close(self) -> None:  # noqa: B027  (most need none)
        """End it."""


@dataclass
class Window:
    """A batch of windows.

    Args:
        obs: [B, L].
        mask: Which steps are real. [B, L], bool.
    """

    obs: Array
    mask: Array


class WindowBuffer(ABC):
    """Trajectories of one system."""

    @abstractmethod
    def add(self, obs: Array) -> None:
        """Add a trajectory, which terminates with its last step. [T], float32."""

    @abstractmethod
    def sample(self) -> Window:
        """Return a batch."""

    def close(self) -> None:  # noqa: B027  (most need none)
        """End it."""


class Pack(NamedTuple):
    """Several sequences in one row of N tokens.

    Args:
        number: The sequence that each token is of; -1 for padding. [N].
        position: The position of each token that the model gets. [N].
        bounds: First token of each sequence (padding is one), and N: `cu_seqlens` of a flash attention.
    """

    number: Array
    position: Array
    bounds: Array


class System(ABC):
    """A replay system. A method that it does not have raises NotOfferedError."""

    name = ""
    forks = True  # whether the workers of a DataLoader may have a copy of a buffer

    @abstractmethod
    def version(self) -> str:
        """Return its version."""

    def steps(self, need: Steps) -> StepBuffer:
        """Return a buffer of transitions."""
        raise NotOfferedError

    def windows(self, need: Windows) -> WindowBuffer:
        """Return a buffer of trajectories."""
        raise NotOfferedError

    def vector_steps(self, need: Steps, autoreset: str) -> StepBuffer:
        """Return a buffer of what environments with this autoreset mode of gymnasium return, as it comes."""
        raise NotOfferedError

    def goals(self, episodes: list[Array], batch: int) -> Mapping[str, Array]:
        """Return hindsight samples of episodes: `obs` and the `goal` of each. [B]."""
        raise NotOfferedError

    def epoch(self, count: int, batch: int, ranks: int, used: int, workers: int = 0) -> list[list[int]]:
        """Return the items that each rank gets in an epoch of `count`, resumed after `used` batches.

        With `workers` through a DataLoader that has as many.
        """
        raise NotOfferedError

    def restart(self) -> list[list[int]]:
        """Begin an epoch of 10 items on two ranks, kill both, and return an epoch of a restart at once."""
        raise NotOfferedError

    def shared(self, priorities: Array, processes: int, batches: int) -> list[Array]:
        """Return the items that several processes draw from one prioritized buffer, by process."""
        raise NotOfferedError

    def token_weights(self, lengths: Array, tokens: int) -> Array:
        """Return the sum of each trajectory's loss weights where packs hold so many tokens. [n]."""
        raise NotOfferedError

    def packs(self, lengths: Array, tokens: int, ranks: int = 1) -> list[list[Pack]]:
        """Return the packs that each rank gets of sequences with these lengths."""
        raise NotOfferedError

    def advantages(self, rewards: Array, groups: Array) -> Array:
        """Return the advantage of each response against its group, as GRPO without a deviation. [n]."""
        raise NotOfferedError

    def incomplete_group(self) -> bool:
        """Return whether a batch of two groups comes, without a hang, where a third one lacks a member."""
        raise NotOfferedError

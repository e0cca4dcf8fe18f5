"""What a benchmark asks of a replay system: buffers of transitions, of trajectories, of goals.
NumPy only.

One adapter per system (`gear.py`, `torchrl.py`, ...) fills these classes in with the code that its
user would write. It runs in an environment of its own, so this file imports nothing but NumPy.
`conformance/` asks for small buffers whose answers are known, `speed/` for large ones that it fills
with the same data and times.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Rows = dict[str, Array]


class NotOfferedError(Exception):
    """The system has nothing of this kind, or needs hours for it."""


def moment(
    obs: Any,
    next_obs: Any = None,
    reward: Any = None,
    terminated: Any = None,
    truncated: Any = None,
) -> Rows:
    """Return a step of N environments whose observations are numbers, as rows to add.

    By default the next observation is 1 more, the reward is 0, and nothing ends. Where an episode
    ends, `next_obs` is its last observation. [N] each.
    """
    before = np.atleast_1d(np.asarray(obs, np.float32))
    none = np.zeros(len(before), bool)
    after = before + 1 if next_obs is None else np.atleast_1d(np.asarray(next_obs, np.float32))
    return {
        "observation": before[:, None],
        "next_observation": after[:, None],
        "action": np.zeros((len(before), 1), np.float32),
        "reward": np.zeros_like(before)
        if reward is None
        else np.atleast_1d(np.asarray(reward, np.float32)),
        "done": none if terminated is None else np.atleast_1d(np.asarray(terminated, bool)),
        "truncated": none if truncated is None else np.atleast_1d(np.asarray(truncated, bool)),
    }


def fresh_priorities(batch: int, count: int = 64) -> Array:
    """Return new priorities of some batches. [count, B], float32, in (0, 1]."""
    return 1 - np.random.default_rng(2).random((count, batch), np.float32)


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
        seed: Of the draws; None for the system's own.
        autoreset: What environments return at an episode's end, as gymnasium names it.
        columns: Rows like those that will be added. [n, ...] each.
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
    seed: int | None = 0
    autoreset: str = "disabled"
    columns: Rows = field(default_factory=lambda: moment([0]))


@dataclass(frozen=True)
class Windows:
    """A buffer of trajectories that is sampled as windows of steps.

    Args:
        capacity: Steps.
        length: Steps of a window.
        whole: Whether windows lie inside a trajectory; else short ones are padded.
        columns: Rows like those that will be added. [n, ...] each.
    """

    capacity: int
    length: int
    batch: int = 64
    whole: bool = True
    seed: int | None = 0
    columns: Rows = field(default_factory=lambda: {"observation": np.zeros(1, np.float32)})


class Buffer(ABC):
    """Content of a system that is sampled. What `sample` returns is up to the system."""

    count: int | None = None  # items that it holds, where it is given fewer than others

    def add(self, rows: Rows) -> None:
        """Add a step of every environment, or steps of one, or a trajectory that ends with its last
        step.

        Args:
            rows: observation, next_observation, action, reward, done (whether the episode
                terminated) and perhaps truncated, [n, ...] each; of windows, the columns that were
                asked for.
        """
        raise NotOfferedError

    def add_call(
        self,
        obs: Array,
        next_obs: Array,
        action: int,
        reward: float,
        terminated: bool,
        truncated: bool,
    ) -> None:
        """Add a step of one environment as gymnasium returns it: no leading axis, Python numbers.

        Here for systems that take arrays of N environments: what their user writes.
        """
        self.add(
            {
                "observation": obs[None],
                "next_observation": next_obs[None],
                "action": np.array([action]),
                "reward": np.array([reward], np.float32),
                "done": np.array([terminated]),
                "truncated": np.array([truncated]),
            }
        )

    def can_sample(self) -> bool:
        """Return whether there is a batch, where a system wants to be asked."""
        return True

    @abstractmethod
    def sample(self) -> Any:
        """Return a batch, as the system's user gets it."""

    @abstractmethod
    def rows(self, found: Any) -> Rows:
        """Return a batch as NumPy arrays by column. [B, ...] or [B, L, ...].

        Also "weight" of prioritized draws; "return" and "discount" (of the value of
        `next_observation`) where n-step returns were asked for; "goal"; and "mask", which steps of
        padded windows are real.
        """

    def keep(self, found: Any) -> Any:
        """Return what `update` needs of a batch when others have come since."""
        return found

    def update(self, found: Any, priorities: Array) -> None:
        """Set the priorities of a batch. [B], float32."""
        raise NotOfferedError

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent of the priorities."""
        raise NotOfferedError

    def __len__(self) -> int:
        """Return the number of transitions that are held."""
        raise NotOfferedError

    def held(self) -> int:
        """Return the number of transitions that can be sampled."""
        return len(self)

    def save(self, folder: Path) -> None:
        """Write everything that a new process needs to go on."""
        raise NotOfferedError

    def load(self, folder: Path) -> None:
        """Go on from a save; the buffer may hold something."""
        raise NotOfferedError

    def close(self) -> None:  # noqa: B027  (most need none)
        """End it."""


class Pack(NamedTuple):
    """Several sequences in one row of N tokens.

    Args:
        number: The sequence that each token is of; -1 for padding. [N].
        position: The position of each token that the model gets. [N].
        bounds: First token of each sequence (padding is one), and N: `cu_seqlens` of a flash
            attention.
    """

    number: Array
    position: Array
    bounds: Array


class System:
    """A replay system. A method that it does not have raises NotOfferedError.

    Args:
        package: What pip calls it.
        **own: What makes its buffers for kinds of timed work that it has a way of its own for.
    """

    name = ""  # of its module
    forks = True  # whether the workers of a DataLoader may have a copy of a buffer
    fills = (
        100_000  # rows of an add that fills a buffer: environments, of a system that counts them
    )
    most_items: int | None = None  # more of them take minutes to add one by one
    #: Kinds of timed work that `speed/contents.py` makes of `steps`, `windows` and `goals`.
    kinds: frozenset[str] = frozenset()

    def __init__(self, package: str, **own: Callable[..., Any]) -> None:
        self.package = package
        self.own = own

    def version(self) -> str:
        """Return its version."""
        return importlib.metadata.version(self.package)

    def offers(self, kind: str) -> bool:
        """Return whether a kind of work is timed."""
        return kind in self.kinds or kind in self.own

    def steps(self, need: Steps) -> Buffer:
        """Return a buffer of transitions."""
        raise NotOfferedError

    def windows(self, need: Windows) -> Buffer:
        """Return a buffer of trajectories."""
        raise NotOfferedError

    def vector_steps(self, need: Steps) -> Buffer:
        """Return a buffer of what environments with another autoreset mode return, as it comes."""
        raise NotOfferedError

    def goals(self, episodes: Iterable[Rows], count: int, batch: int) -> Buffer:
        """Return a buffer that relabels goals by hindsight, of episodes of equal length.

        Args:
            episodes: observation and achieved, [T + 1, ...]; action and done, [T, ...]; pursued,
                [...].
            count: Their steps.
            batch: B.
        """
        raise NotOfferedError

    def epoch(
        self, count: int, batch: int, ranks: int, used: int, workers: int = 0
    ) -> list[list[int]]:
        """Return the items that each rank gets in an epoch of `count`, resumed after `used`
        batches.

        With `workers` through a DataLoader that has as many.
        """
        raise NotOfferedError

    def restart(self) -> list[list[int]]:
        """Begin an epoch of 10 items on two ranks, kill both, and return an epoch of a restart at
        once.
        """
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
        """Return the advantage of each response against its group, as GRPO without a deviation.
        [n].
        """
        raise NotOfferedError

    def incomplete_group(self) -> bool:
        """Return whether a batch of two groups comes, without a hang, where a third one lacks a
        member.
        """
        raise NotOfferedError


def load(name: str) -> System:
    """Return the system of a module of this folder."""
    found: System = importlib.import_module(f"peers.{name}").SYSTEM
    found.name = name
    return found

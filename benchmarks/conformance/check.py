"""Cases by name, and the checks that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from peers.interface import Array, Buffer, Rows, Steps, Windows, load, moment

MOST_DEVIATION = (
    6.0  # standard deviations of a chi-square statistic: right answers fail once in 10^8
)


@dataclass
class Sampled:
    """A batch, as arrays.

    Args:
        obs, next_obs: Observations before and after the (last) step; each is a number. [B].
        reward: The reward, or the n-step return. [B].
        discount: What the value of `next_obs` is multiplied by: 0 where the episode terminated.
            [B].
        weight: Importance weights. [B].
        handle: What the system needs to update the priorities of these samples.
    """

    obs: Array
    next_obs: Array
    reward: Array
    discount: Array
    weight: Array
    handle: Any = None


class StepBuffer:
    """Single transitions of one system, as cases see them; what is not here is the system's own."""

    def __init__(self, need: Steps, made: Buffer) -> None:
        self._need = need
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def sample(self) -> Sampled:
        """Return a batch."""
        if not self._made.can_sample():
            raise ValueError("can_sample is false")
        found = self._made.sample()
        rows = {
            name: values.reshape(len(values)) for name, values in self._made.rows(found).items()
        }
        return Sampled(
            rows["observation"],
            rows["next_observation"],
            rows["return" if "return" in rows else "reward"],
            rows["discount"] if "discount" in rows else self._need.gamma * (1 - rows["done"]),
            rows.get("weight", np.ones(len(rows["observation"]))),
            self._made.keep(found),
        )

    def update(self, sampled: Sampled, priorities: Array) -> None:
        """Set the priorities of a batch. [B]."""
        self._made.update(sampled.handle, priorities.astype(np.float32))

    def __len__(self) -> int:
        return len(self._made)


@dataclass
class Window:
    """A batch of windows.

    Args:
        obs: [B, L].
        mask: Which steps are real. [B, L], bool.
    """

    obs: Array
    mask: Array


class WindowBuffer:
    """Trajectories of one system, as cases see them."""

    def __init__(self, made: Buffer) -> None:
        self._made = made

    def add(self, obs: Array) -> None:
        """Add a trajectory, which terminates with its last step. [T], float32."""
        self._made.add({"observation": obs})

    def sample(self) -> Window:
        """Return a batch."""
        if not self._made.can_sample():
            raise ValueError("can_sample is false")
        rows = self._made.rows(self._made.sample())
        obs = rows["observation"]
        return Window(obs, rows.get("mask", np.ones(obs.shape, bool)))


class System:
    """A system as cases see it: observations are numbers."""

    def __init__(self, name: str) -> None:
        self._system = load(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def steps(self, need: Steps) -> StepBuffer:
        """Return a buffer of transitions."""
        return StepBuffer(need, self._system.steps(need))

    def vector_steps(self, need: Steps) -> StepBuffer:
        """Return a buffer of what environments with another autoreset mode return, as it comes."""
        return StepBuffer(need, self._system.vector_steps(need))

    def windows(self, need: Windows) -> WindowBuffer:
        """Return a buffer of trajectories."""
        return WindowBuffer(self._system.windows(need))

    def goals(self, episodes: list[Array], batch: int) -> Rows:
        """Return hindsight samples of episodes: `obs` and the `goal` of each. [B]."""
        made = self._system.goals(
            [_episode(obs) for obs in episodes], sum(map(len, episodes)), batch
        )
        rows = made.rows(made.sample())
        return {"obs": rows["observation"][:, 0], "goal": rows["goal"][:, 0]}


def _episode(obs: Array) -> Rows:
    """Return an episode whose states are numbers, which pursues its last one."""
    states = np.append(obs, obs[-1:] + 1)[:, None]
    ends = np.arange(len(obs)) == len(obs) - 1
    actions = np.zeros((len(obs), 1), np.float32)
    found = {"observation": states, "achieved": states, "action": actions, "done": ends}
    return {**found, "pursued": states[-1]}


class Case(NamedTuple):
    """A case with a known right answer.

    Args:
        report: The public report that it follows: repository#number, or a paper.
        right: What a system must do.
        run: Raises AssertionError where it does something else.
    """

    name: str
    report: str
    right: str
    run: Callable[[System], None]


CASES: dict[str, Case] = {}


def case(report: str, right: str) -> Callable[[Callable[[System], None]], Callable[[System], None]]:
    """Register a case under the name of its function."""

    def register(run: Callable[[System], None]) -> Callable[[System], None]:
        name = run.__name__.replace("_", " ")
        CASES[name] = Case(name, report, right, run)
        return run

    return register


def refusal(action: Callable[[], object]) -> str | None:
    """Return the text of the error that a system raises; None: it raises none."""
    try:
        action()
    except Exception as error:
        return str(error)
    return None


def refuses(what: str, action: Callable[[], object]) -> None:
    """Fail unless a system raises an error with a text."""
    text = refusal(action)
    assert text is not None, f"{what}: accepted"
    assert text, f"{what}: an error without a text"


def deviation(counts: Array, shares: Array) -> float:
    """Return by how many standard deviations the chi-square statistic of counts is too large."""
    expected = shares / shares.sum() * counts.sum()
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = max(int(used.sum()) - 1, 1)
    # Wilson and Hilferty 1931: the cube root of a chi-square quotient is nearly normal.
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def fits(counts: Array, shares: Array, what: str) -> None:
    """Fail unless counts are those of independent draws with these probabilities."""
    assert (counts[shares == 0] == 0).all(), f"{what}: drew what has probability 0"
    shown = np.round(counts / max(counts.sum(), 1), 4).tolist()
    assert deviation(counts, shares) < MOST_DEVIATION, (
        f"{what}: drew {shown}, not {np.round(shares / shares.sum(), 4).tolist()}"
    )


def draws(buffer: StepBuffer, count: int, num_batches: int) -> Array:
    """Return how often each of the observations 0 to count - 1 was drawn. [count]."""
    found = np.zeros(count, np.int64)
    for _ in range(num_batches):
        obs = buffer.sample().obs
        index = np.rint(obs).astype(np.int64)
        is_known = (np.abs(obs - index) < 1e-3) & (index >= 0) & (index < count)
        assert is_known.all(), f"drew observations that were never added: {obs[~is_known][:4]}"
        found += np.bincount(index, minlength=count)
    return found


def add_episode(
    buffer: StepBuffer, first: int, count: int, ends: str = "terminated", **given: object
) -> None:
    """Add the observations first to first + count - 1 of one environment, the last one with an end
    flag.
    """
    for number in range(first, first + count):
        is_last = number == first + count - 1
        buffer.add(moment([number], **{ends: [is_last], **given}))


def prioritize(buffer: StepBuffer, priorities: Array, num_batches: int = 60) -> None:
    """Report priorities by observation until each item has had its own."""
    missing = set(range(len(priorities)))
    for _ in range(num_batches):
        sampled = buffer.sample()
        index = np.rint(sampled.obs).astype(np.int64)
        buffer.update(sampled, priorities[index])
        missing -= set(index.tolist())
        if not missing:
            return
    raise AssertionError(f"never drew {sorted(missing)[:4]} with equal priorities")


def of(sampled: Sampled, obs: float) -> tuple[float, float, float] | None:
    """Return reward, discount and next observation of a transition in a batch; None: it is not
    there.
    """
    at = np.nonzero(np.abs(sampled.obs - obs) < 1e-3)[0]
    if not len(at):
        return None
    return (
        float(sampled.reward[at[0]]),
        float(sampled.discount[at[0]]),
        float(sampled.next_obs[at[0]]),
    )


def find(
    buffer: StepBuffer, obs: float, num_batches: int = 200
) -> tuple[float, float, float] | None:
    """Sample until a transition appears."""
    for _ in range(num_batches):
        found = of(buffer.sample(), obs)
        if found is not None:
            return found
    return None

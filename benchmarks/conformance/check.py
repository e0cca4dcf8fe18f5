"""Cases by name, and the checks that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from peers.interface import Array, Moment, Sampled, StepBuffer, System

MOST_DEVIATION = 6.0  # standard deviations of a chi-square statistic: right answers fail once in 10^8


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
    buffer: StepBuffer, first: int, count: int, ends: str = "terminated", **moment: object
) -> None:
    """Add the observations first to first + count - 1 of one environment, the last one with an end flag."""
    for number in range(first, first + count):
        is_last = number == first + count - 1
        buffer.add(Moment.of([number], **{ends: [is_last], **moment}))  # type: ignore[arg-type]


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
    """Return reward, discount and next observation of a transition in a batch; None: it is not there."""
    at = np.nonzero(np.abs(sampled.obs - obs) < 1e-3)[0]
    if not len(at):
        return None
    return float(sampled.reward[at[0]]), float(sampled.discount[at[0]]), float(sampled.next_obs[at[0]])


def find(buffer: StepBuffer, obs: float, num_batches: int = 200) -> tuple[float, float, float] | None:
    """Sample until a transition appears."""
    for _ in range(num_batches):
        found = of(buffer.sample(), obs)
        if found is not None:
            return found
    return None

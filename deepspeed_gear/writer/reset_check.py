"""Reset check: detects resets of environments that do not suit the autoreset mode that was given."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

LOG = logging.getLogger("deepspeed_gear")
LEAST = 8  # resets before the log may have a warning
MOST = 64  # resets that show nothing, before the check ends


class ResetCheck:
    """Compares the ends of episodes with what follows them, until one shows that the program is right.

    With "same_step" and "disabled" the last observation of a truncated episode differs from the first one of
    the episode after it. Where all of them are equal, the program has passed reset observations in their
    place, or the environment resets in the step after the last one. Environments that are reset to one state
    only may end there too, and those whose observations do not change show nothing: neither is warned of.

    With "next_step" the step that resets an environment has the reward that the environment gives there,
    always the same one. Where it varies, the step is a transition.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._num_wrong = self._num_unclear = 0
        self._example: list[np.ndarray] | np.ndarray | None = None  # of a first observation, or a reward
        self._varies = False

    def note_states(
        self, before: Sequence[np.ndarray], last: Sequence[np.ndarray], first: Sequence[np.ndarray]
    ) -> None:
        """Note the ends of truncated episodes.

        Args:
            before: The states before the last ones, column by column. [n, *shape] each.
            last: The last states, likewise.
            first: The first states of the episodes that follow, likewise.
        """
        same = np.logical_and.reduce([_equal(*pair) for pair in zip(last, first, strict=True)])
        still = np.logical_and.reduce([_equal(*pair) for pair in zip(last, before, strict=True)])
        if not same.all():
            self.is_done = True
            return
        self._num_unclear += int(still.sum())
        for row in np.flatnonzero(~still).tolist():
            self._num_wrong += 1
            states = [np.array(rows[row]) for rows in first]
            if self._example is None:
                self._example = states
            pairs = zip(states, self._example, strict=True)
            self._varies |= any((one != other).any() for one, other in pairs)
        if self._conclude():
            LOG.warning(
                "gear: the last observations of all %d truncated episodes are the first observations of the "
                "episodes after them, so targets are wrong: pass the last observations of the episodes "
                'themselves (gymnasium: info["final_obs"]), or, if the environment resets in the step after '
                'the last one, give autoreset "next_step"',
                self._num_wrong,
            )

    def note_rewards(self, rewards: np.ndarray) -> None:
        """Note the rewards of steps that were taken as resets. [n]."""
        for reward in rewards:
            self._num_wrong += 1
            if self._example is None:
                self._example = np.array(reward)
            self._varies |= bool(reward != self._example)
        if self._conclude():
            LOG.warning(
                'gear: autoreset "next_step": the steps after the ends of %d episodes have rewards that '
                "vary, so they are transitions, which are left out: give the environment in place of the "
                'number, or autoreset "same_step" with the last observations of episodes',
                self._num_wrong,
            )

    def _conclude(self) -> bool:
        """Return whether to warn; end the check then, or if the resets so far show nothing."""
        warns = self._num_wrong >= LEAST and self._varies
        self.is_done = warns or self._num_wrong + self._num_unclear >= MOST
        return warns


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which rows are equal. [n], bool."""
    return np.asarray((one == other).reshape(len(one), -1).all(axis=1))

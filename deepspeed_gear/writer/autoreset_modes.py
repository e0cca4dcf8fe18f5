"""Autoreset modes: what an environment does after the last step of an episode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError
from deepspeed_gear.log import LOG

Autoreset = Literal["next_step", "same_step", "disabled"]
MODES = get_args(Autoreset)
_MEANING = (
    '"next_step": the step after the last one of an episode resets, and its action is ignored; '
    '"same_step": the last step resets, and the last observation is given as `final`; '
    '"disabled": the program resets the environment and calls `reset`, as with a single one. '
    "Or give the environment instead of the number: its mode is read"
)


def resolve(envs: Any, autoreset: Any) -> tuple[int, str]:
    """Resolve the arguments of `vector_writer` to a number of environments and an autoreset mode.

    Raises:
        ConfigError: `envs` is neither a number nor an environment.
        DataError: No mode is given, or it is not the environment's.
    """
    given = None if autoreset is None else _mode(autoreset)
    if isinstance(envs, type) or not callable(getattr(envs, "step", None)):
        count = arguments.count("the environments", envs, remedy="or give an environment")
        if given is None:
            raise DataError(
                "autoreset", "must be given with a number of environments", None, _MEANING
            )
        return count, given
    own = mode_of(envs)
    if own is None and given is None:
        raise DataError(
            "autoreset", "must be in the environment's metadata, or given", None, _MEANING
        )
    if None not in (own, given) and own != given:
        raise DataError(
            "autoreset", f'must be "{own}", the mode of the environment', given, "leave it out"
        )
    return int(getattr(envs, "num_envs", 1)), str(given or own)


def mode_of(envs: Any) -> str | None:
    """Return an environment's autoreset mode, or None for a vector environment without one.

    The program resets a single environment, unless it is in gymnasium's wrapper `Autoreset`.
    """
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is not None:
        return _mode(mode)
    if getattr(envs, "num_envs", None) is not None:
        return None
    # The wrapper can only be in use where its module is loaded: gymnasium is never imported here.
    wrappers = sys.modules.get("gymnasium.wrappers")
    resets_itself = getattr(wrappers, "Autoreset", ())
    env = envs
    while env is not None:  # wrappers nest: each holds the next one as `env`
        if isinstance(env, resets_itself):
            return "next_step"
        env = getattr(env, "env", None)
    return "disabled"


def _mode(value: Any) -> str:
    mode = str(getattr(value, "name", value)).lower()  # gymnasium's are members of an enumeration
    if mode not in MODES:
        raise DataError("autoreset", f"must be one of {', '.join(MODES)}", value, _MEANING)
    return mode


LEAST = 8  # resets before the check may warn: fewer could be equal by chance
MOST = 64  # resets after which the check ends without a warning


class ResetCheck:
    """Check of the first resets that warns of a wrong autoreset mode or wrong last observations.

    With "same_step" and "disabled" the last observation of a truncated episode should differ from
    the first of the next episode. Where both are always equal, the program passes observations
    after the reset, or the environment resets one step later. Environments that always reset to
    the same state may also end there, and observations that never change show nothing: the check
    does not warn of either. With "next_step" the step that resets should always have the same
    reward; where rewards vary, these steps are transitions.

    The check ends at the first reset that shows the program is right, and after `MOST` resets.
    """

    def __init__(self, goes_on: bool) -> None:
        #: Whether the check needs more resets; C++ reads this word. [1], bool.
        self.goes_on = np.array([goes_on])
        self._num_wrong = self._num_unclear = 0
        self._example: list[np.ndarray] = []  # of a first observation, by column, or a reward
        self._varies = False

    def note_states(
        self, before: Sequence[np.ndarray], last: Sequence[np.ndarray], first: Sequence[np.ndarray]
    ) -> None:
        """Compare the states before, at and after the ends of truncated episodes.

        Args:
            before: States one step before the last one, by column. [n, *shape].
            last: Last states of the episodes. [n, *shape].
            first: First states of the episodes that follow. [n, *shape].
        """
        same = np.logical_and.reduce([_equal(*pair) for pair in zip(last, first, strict=True)])
        still = np.logical_and.reduce([_equal(*pair) for pair in zip(last, before, strict=True)])
        if not same.all():
            self.goes_on[0] = False
            return
        self._num_unclear += int(still.sum())
        for row in np.flatnonzero(~still).tolist():
            self._count([np.array(rows[row]) for rows in first])
        if self._conclude():
            LOG.warning(
                "gear: the last observations of all %d truncated episodes are the first "
                "observations of the episodes after them, so targets are wrong: pass the last "
                'observations of the episodes themselves (gymnasium: info["final_obs"]), or, if '
                'the environment resets in the step after the last one, give autoreset "next_step"',
                self._num_wrong,
            )

    def note_rewards(self, rewards: np.ndarray) -> None:
        """Compare the rewards of steps that were taken as resets. [n]."""
        for reward in rewards:
            self._count([np.array(reward)])
        if self._conclude():
            LOG.warning(
                'gear: autoreset "next_step": the steps after the ends of %d episodes have rewards '
                "that vary, so they are transitions, which are left out: give the environment in "
                'place of the number, or autoreset "same_step" with the last observations of '
                "episodes",
                self._num_wrong,
            )

    def _count(self, begin: list[np.ndarray]) -> None:
        """Count a suspicious end; `begin` is the start of the next episode, or the reward."""
        self._num_wrong += 1
        self._example = self._example or begin
        pairs = zip(begin, self._example, strict=True)
        self._varies |= any((one != other).any() for one, other in pairs)

    def _conclude(self) -> bool:
        """Return whether to warn; end the check then, or after `MOST` resets that show nothing."""
        # Equal states at every reset are normal for an environment with one start state: only
        # those that vary show that the program passes the wrong ones.
        warns = self._num_wrong >= LEAST and self._varies
        self.goes_on[0] = not warns and self._num_wrong + self._num_unclear < MOST
        return warns


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which rows are equal. [n], bool."""
    return np.asarray((one == other).reshape(len(one), -1).all(axis=1))

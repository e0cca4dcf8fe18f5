"""Autoreset modes: what an environment does after the last step of an episode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.context import LOG
from deepspeed_gear.errors import DataError

Autoreset = Literal["next_step", "same_step", "disabled"]
MODES = get_args(Autoreset)
_MEANING = (
    '"next_step": the step after the last one of an episode resets, and its action is ignored; '
    '"same_step": the last step resets, and the last observation is given as `final`; '
    '"disabled": the program resets the environment and calls `reset`, as with a single one. '
    "Or give the environment instead of the number: its mode is read"
)


def resolve(envs: Any, autoreset: Any) -> tuple[int, str]:
    """Return number of environments and autoreset mode of `vector_writer`'s arguments. ConfigError:
    `envs` is neither a number nor an environment; DataError: no mode is given, or two differ.
    """
    given = None if autoreset is None else _mode(autoreset)
    if isinstance(envs, type) or not callable(getattr(envs, "step", None)):
        count = arguments.count("the environments", envs, remedy="or give an environment")
        if given is None:
            raise DataError(
                "autoreset", "must be given with a number of environments", None, _MEANING
            )
        return count, given
    found = mode_of(envs)
    if found is None and given is None:
        raise DataError(
            "autoreset", "must be in the environment's metadata, or given", None, _MEANING
        )
    if None not in (found, given) and found != given:
        raise DataError(
            "autoreset", f'must be "{found}", the mode of the environment', given, "leave it out"
        )
    return int(getattr(envs, "num_envs", 1)), str(given or found)


def mode_of(envs: Any) -> str | None:
    """Return an environment's autoreset mode; None: a vector environment without one. A single one
    is reset by the program, unless it has gymnasium's wrapper `Autoreset`.
    """
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is not None:
        return _mode(mode)
    if getattr(envs, "num_envs", None) is not None:
        return None
    wrappers = sys.modules.get("gymnasium.wrappers")
    resets_itself = getattr(wrappers, "Autoreset", ())
    env = envs
    while env is not None:
        if isinstance(env, resets_itself):
            return "next_step"
        env = getattr(env, "env", None)
    return "disabled"


def _mode(value: Any) -> str:
    mode = str(getattr(value, "name", value)).lower()  # gymnasium's are members of an enumeration
    if mode not in MODES:
        raise DataError("autoreset", f"must be one of {', '.join(MODES)}", value, _MEANING)
    return mode


LEAST = 8  # resets before the log may have a warning
MOST = 64  # resets that show nothing, before the check ends


class ResetCheck:
    """Compares the ends of episodes with what follows them, until one shows that the program is
    right.

    With "same_step" and "disabled" the last observation of a truncated episode differs from the
    next one's first. Where all are equal, the program has passed reset observations, or the
    environment resets a step later; environments that are reset to one state only may end there
    too, and those whose observations do not change show nothing: neither is warned of. With
    "next_step" the resetting step has always the same reward; where it varies, the step is a
    transition.
    """

    def __init__(self, goes_on: bool) -> None:
        #: Whether it looks at more resets; a word that C++ reads. [1], bool.
        self.goes_on = np.array([goes_on])
        self._num_wrong = self._num_unclear = 0
        self._example: list[np.ndarray] = []  # of a first observation, by column, or a reward
        self._varies = False

    def note_states(
        self, before: Sequence[np.ndarray], last: Sequence[np.ndarray], first: Sequence[np.ndarray]
    ) -> None:
        """Note the states before, at and after the ends of truncated episodes, by column. [n,
        *shape].
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
                "observations of the "
                "episodes after them, so targets are wrong: pass the last observations of the "
                "episodes "
                'themselves (gymnasium: info["final_obs"]), or, if the environment resets in '
                "the step after "
                'the last one, give autoreset "next_step"',
                self._num_wrong,
            )

    def note_rewards(self, rewards: np.ndarray) -> None:
        """Note the rewards of steps that were taken as resets. [n]."""
        for reward in rewards:
            self._count([np.array(reward)])
        if self._conclude():
            LOG.warning(
                'gear: autoreset "next_step": the steps after the ends of %d episodes have '
                "rewards that "
                "vary, so they are transitions, which are left out: give the environment in "
                "place of the "
                'number, or autoreset "same_step" with the last observations of episodes',
                self._num_wrong,
            )

    def _count(self, begin: list[np.ndarray]) -> None:
        """Count an end after which an episode begins like this."""
        self._num_wrong += 1
        self._example = self._example or begin
        pairs = zip(begin, self._example, strict=True)
        self._varies |= any((one != other).any() for one, other in pairs)

    def _conclude(self) -> bool:
        """Return whether to warn; end the check then, or if the resets so far show nothing."""
        warns = self._num_wrong >= LEAST and self._varies
        self.goes_on[0] = not warns and self._num_wrong + self._num_unclear < MOST
        return warns


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which rows are equal. [n], bool."""
    return np.asarray((one == other).reshape(len(one), -1).all(axis=1))

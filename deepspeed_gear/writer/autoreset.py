"""Autoreset modes: what an environment does after the last step of an episode."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

import deepspeed_gear.arguments as arguments
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
    """Return the number of environments and their autoreset mode.

    Args:
        envs: N, or a vector environment of gymnasium's, or a single one: N = 1.
        autoreset: A mode or gymnasium's AutoresetMode; None: the environment's.
    Raises:
        ConfigError: `envs` is neither a number nor an environment.
        DataError: No mode is given, or two differ.
    """
    given = None if autoreset is None else _mode(autoreset)
    if isinstance(envs, type) or not callable(getattr(envs, "step", None)):
        count = arguments.count("the environments", envs, remedy="or give an environment")
        if given is None:
            raise DataError("autoreset", "must be given with a number of environments", None, _MEANING)
        return count, given
    found = mode_of(envs)
    if found is None and given is None:
        raise DataError("autoreset", "must be in the environment's metadata, or given", None, _MEANING)
    if None not in (found, given) and found != given:
        raise DataError("autoreset", f'must be "{found}", the mode of the environment', given, "leave it out")
    return int(getattr(envs, "num_envs", 1)), str(given or found)


def mode_of(envs: Any) -> str | None:
    """Return the autoreset mode of an environment; None: a vector environment without one.

    A single environment is reset by the program, unless it has gymnasium's wrapper `Autoreset`.

    Raises:
        DataError: Its metadata hold an unknown mode.
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

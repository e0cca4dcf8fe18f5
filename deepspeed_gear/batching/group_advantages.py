"""Group-relative advantages: a response's reward against those of the others of its group."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from deepspeed_gear.errors import ConfigError

Estimator = Literal["grpo", "dr_grpo", "rloo"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
EPSILON = 1e-6


def group_advantages(
    kind: str,
    rewards: np.ndarray,
    groups: np.ndarray,
    members: np.ndarray,
    counted: np.ndarray | None = None,
) -> np.ndarray:
    """Return the advantage of each trajectory against the other members of its group. [n], float64.

    With the rewards r of the N members of a group:

    - "grpo": (r - mean(r)) / (std(r) + 1e-6), std with N - 1. Shao et al. 2024, DeepSeekMath,
      section 4.1.
    - "dr_grpo": r - mean(r). Liu et al. 2025, section 3.2.
    - "rloo": r - mean of the others = (r - mean(r)) * N / (N - 1). Ahmadian et al. 2024, section
      2.2.

    A member of several trajectories counts once, by its last trajectory's reward; all of them get
    its advantage. A group of one member has the advantage 0, and so has a member that does not
    count: one of whose trajectories none is `counted` (None: all are). ConfigError if there is no
    such estimator.
    """
    if kind not in ESTIMATORS:
        raise ConfigError(
            "the estimator of advantages",
            f"must be one of {', '.join(ESTIMATORS)}",
            kind,
            "choose one of them",
        )
    if not len(rewards):
        return np.zeros(0)
    # For groups [0, 0, 0, 1] and members [0, 0, 1, 0], member is [0, 0, 1, 2], last is [1, 2, 3].
    # np.unique returns first places, which are the last ones in the reversed order.
    pairs = np.stack([groups, members], axis=1)
    _, reverse_first, member = np.unique(
        pairs[::-1], axis=0, return_index=True, return_inverse=True
    )
    member = member.reshape(-1)[::-1]
    last = len(rewards) - 1 - reverse_first  # last trajectory of each member
    counts = np.ones(len(last), bool)
    if counted is not None:
        counts[:] = False
        np.logical_or.at(counts, member, counted)
    values = np.where(counts, rewards.astype(np.float64)[last], 0.0)
    _, group = np.unique(groups[last], return_inverse=True)
    group = group.reshape(-1)
    sizes = np.maximum(np.bincount(group, counts), 1)
    centred = np.where(counts, values - (np.bincount(group, values) / sizes)[group], 0.0)
    # The second pass removes the rounding error of the mean: equal rewards then have the advantage
    # 0 exactly.
    centred -= np.where(counts, (np.bincount(group, centred) / sizes)[group], 0.0)
    if kind == "grpo":
        variance = np.bincount(group, centred * centred) / np.maximum(sizes - 1, 1)
        centred /= np.sqrt(variance)[group] + EPSILON
    elif kind == "rloo":
        centred *= (sizes / np.maximum(sizes - 1, 1))[group]
    return np.asarray(centred[member])

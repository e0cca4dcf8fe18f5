"""Completed trajectory: the record that a writer returns of a trajectory whose end it has stored."""

from __future__ import annotations

from typing import NamedTuple


class CompletedTrajectory(NamedTuple):
    """A trajectory that has ended and is stored; its late columns can be filled.

    Attributes:
        env: Number of its environment; 0 for a single one.
        trajectory_id: Its id, for `fill` and `read`; of a RemoteWriter: that writer's number of it.
        num_steps: Number of its steps.
    """

    env: int
    trajectory_id: int
    num_steps: int

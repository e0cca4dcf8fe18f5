"""Reference op of hindsight relabelling: which samples get a goal that was achieved, and which goal."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.ops.records import GoalStrategy, RandomPurpose, Resolution

from .integers import shift_right
from .select import coordinate, philox


def draw_goals_(
    goal_step: Tensor,
    resolutions: Tensor,
    seed: int,
    stream: int,
    strategy: int,
    fraction: int,
    final_row: int,
) -> None:
    """Set the row of the achieved goal that each sample gets; -1 for its own goal.

    Args:
        goal_step: Receives the rows. [B], int64.
        resolutions: Of the samples. [B, 8], int64.
        seed: Of the run.
        stream: Key of the batch stream.
        strategy: `GoalStrategy`: a row after the anchor, the last one, or any.
        fraction: Share of the samples that get such a goal, Q62.
        final_row: 1 where trajectories have T+1 goals, 0 where they have T.

    Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.
    """
    numbers, anchors = resolutions[:, Resolution.SAMPLE_NUMBER], resolutions[:, Resolution.ANCHOR]
    rows = resolutions[:, Resolution.NUM_STEPS] + final_row
    first = {
        GoalStrategy.FUTURE: anchors + 1,
        GoalStrategy.FINAL: rows - 1,
        GoalStrategy.EPISODE: torch.zeros_like(rows),
    }[strategy]
    chosen = shift_right(philox(seed, numbers, stream, RandomPurpose.RELABELLING)[0], 2) < fraction
    room = (rows - first).clamp(min=1)
    goals = first + coordinate(*philox(seed, numbers, stream, RandomPurpose.GOAL), room)
    goal_step.copy_(torch.where(chosen & (first < rows), goals, -1))

"""Off-policy correction of a rollout batch: sets weights of tokens, and rejects some."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.batching.policy_correction import Correction, CorrectionBounds, correction
from deepspeed_gear.errors import DataError
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import READ


def correct(
    columns: RolloutColumns,
    bounds: CorrectionBounds,
    current: str,
    behaviour: str,
    name: str,
    count_rejected: bool,
) -> dict[str, float]:
    """Set a column to the weights of a correction; see `Rollout.correct`. Collective."""
    context = columns.context

    def check() -> None:
        columns.check_names([name])
        for column in (current, behaviour):
            if column not in columns.filled:
                columns.step_column(column)

    def compute() -> Correction:
        # Tables without the column, such as supervised ones, have no generator to correct for.
        is_corrected = columns.mask & _has_places(columns, behaviour)
        found = _correction(columns, is_corrected, bounds, current, behaviour)
        weights = columns.mask.astype(np.float64)
        weights[is_corrected] = found.weights
        columns.set_column(name, weights)
        if found.rejected.any() and not count_rejected:
            keep = columns.mask.copy()
            keep[is_corrected] = ~found.rejected
            columns.narrow(keep)
        return found

    context.check_same(READ, (*bounds, current, behaviour, name, count_rejected), check)
    return context.agree(compute).summary()


def _has_places(columns: RolloutColumns, name: str) -> np.ndarray:
    """Return the places of trajectories whose tables have a column. [num_tokens], bool."""
    if name in columns.filled or columns.absent_value(name) is None:
        return np.ones(columns.trajectories.num_tokens, bool)
    column, _ = columns.step_column(name)
    return columns.has_column(column.name).repeat(columns.trajectories.lengths)


def _correction(
    columns: RolloutColumns,
    mask: np.ndarray,
    bounds: CorrectionBounds,
    current: str,
    behaviour: str,
) -> Correction:
    """Return the correction of loss tokens. Collective over nodes.

    Args:
        columns: Columns of the rollout batch.
        mask: The loss tokens. [num_tokens], bool.
        bounds: The correction.
        current: As `Rollout.correct`.
        behaviour: As `Rollout.correct`.
    Raises:
        DataError: A log-probability is not finite.
    """
    logs = []
    for name in (current, behaviour):
        values = columns.places(name, admits_absent=True)[mask]
        is_bad = ~np.isfinite(values)
        if is_bad.any():
            at = int(np.flatnonzero(mask)[is_bad.argmax()])
            trajectory = int(np.searchsorted(columns.trajectories.starts, at, side="right")) - 1
            step = at - int(columns.trajectories.starts[trajectory])
            raise DataError(
                f"column {name!r}: trajectory {trajectory}, place {step}",
                "must be a finite log-probability at every loss token",
                float(values[is_bad.argmax()]),
                "take the token out of the loss with rollout.mask, or compute its value anew",
            )
        logs.append(values)
    owner = np.repeat(np.arange(len(columns.trajectories)), columns.trajectories.lengths)
    sequences = columns.sequence[owner[mask]]
    return correction(bounds, logs[0] - logs[1], sequences)

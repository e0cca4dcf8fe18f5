"""Off-policy correction of a rollout batch: sets weights of tokens, and rejects some."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.batching.policy_correction import Correction, CorrectionBounds, correction
from deepspeed_gear.errors import DataError
from deepspeed_gear.replay.rollout_columns import READ, RolloutColumns


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
        found = _correction(columns, bounds, current, behaviour)
        weights = np.zeros(columns.trajectories.num_tokens)
        weights[columns.mask] = found.weights
        columns.set_column(name, weights)
        if found.rejected.any() and not count_rejected:
            keep = columns.mask.copy()
            keep[keep] = ~found.rejected
            columns.narrow(keep)
        return found

    context.check_same(READ, (*bounds, current, behaviour, name, count_rejected), check)
    return context.agree(compute).summary()


def _correction(
    columns: RolloutColumns, bounds: CorrectionBounds, current: str, behaviour: str
) -> Correction:
    """Return the correction of the loss tokens. Collective over nodes.

    Raises:
        DataError: A log-probability is not finite.
    """
    mask = columns.mask
    logs = []
    for name in (current, behaviour):
        values = columns.places(name)[mask]
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

"""Reference ops over rewards: sums in float64, in a fixed order, rounded once to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.ops.records import Resolution

from ...errors import ShapeError
from .convert import narrow, widen
from .gather import Reads, check_rows, is_no_sample


def suffix_sum_(out: Tensor, reward: Tensor, extents: Tensor) -> None:
    """Set out[row] to the sum of the rewards from `row` to the end of its trajectory, added from the end.

    Args:
        out: Rows that belong to no extent keep their value. [rows], float32.
        reward: Any stored dtype. [rows].
        extents: First row and number of steps of each trajectory. [n, 2], int64.
    """
    rewards, num_rows = widen(reward, torch.float64), len(out)
    first, length = extents.unbind(1)
    good = (first >= 0) & (length >= 0) & (length <= num_rows) & (first <= num_rows - length)
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        raise ShapeError(f"extent {i}", f"must lie in {num_rows} rows", extents[i].tolist())
    total = torch.zeros(len(extents), dtype=torch.float64)
    for distance in range(1, max(length.tolist(), default=0) + 1):
        live = length >= distance
        rows = (first + length - distance)[live]
        total[live] += rewards[rows]
        out[rows] = narrow(total[live], torch.float32)


def n_step_(
    returns: Tensor,
    discount: Tensor,
    steps: Tensor,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    powers: Tensor,
    resolutions: Tensor,
    n: int,
) -> None:
    """Set the n-step return, discount and number of steps of each resolution.

    With r the rewards from the anchor on, and k the number of steps until n, a termination, a truncation or
    the trajectory's end: returns = sum of gamma^i * r[i] over i < k; discount = gamma^k, 0 once terminated.
    All are 0 of a record that is no sample.

    Args:
        returns, discount: [B], float32.
        steps: [B], int64.
        reward: Any stored dtype. [rows].
        terminated: [rows], bool.
        truncated: None: never. [rows], bool.
        powers: gamma^0 .. gamma^n. [n + 1], float64.
        resolutions: [B, 8], int64.
        n: At least 1.
    Raises:
        ShapeError: A step of [anchor, min(anchor + n, num_steps)) lies outside the rows.
    """
    num_rows = min(len(x) for x in (reward, terminated, truncated) if x is not None)
    anchor = resolutions[:, Resolution.ANCHOR]
    left = resolutions[:, Resolution.NUM_STEPS] - anchor
    ends = torch.stack((anchor, anchor + left.clamp(max=n) - 1), dim=1)  # the first and the last step
    check_rows(resolutions, [Reads(ends, torch.ones_like(ends, dtype=torch.bool), num_rows)])
    rewards, first = widen(reward, torch.float64), resolutions[:, Resolution.FIRST_ROW] + anchor
    total = torch.zeros(len(resolutions), dtype=torch.float64)
    ended = is_no_sample(resolutions)
    running = ~ended
    taken = torch.zeros_like(first)
    for k in range(n):
        running = running & (left > k)
        row = torch.where(running, first + k, first)
        total = torch.where(running, total + powers[k] * rewards[row], total)
        taken += running
        ended |= running & terminated[row]
        running = running & ~terminated[row]
        if truncated is not None:
            running = running & ~truncated[row]
    returns.copy_(narrow(total, torch.float32))
    discount.copy_(torch.where(ended, 0.0, powers[taken]).to(torch.float32))
    steps.copy_(taken)

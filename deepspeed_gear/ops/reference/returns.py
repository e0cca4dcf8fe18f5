"""Reference ops over rewards: sums in float64, in a fixed order, rounded once to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.ops.records import Resolution

from .checks import Reads, check_extents, check_rows, is_no_sample
from .convert import narrow, widen


def suffix_sum_(out: Tensor, reward: Tensor, extents: Tensor) -> None:
    """Set out[row] to the sum of the rewards from `row` to the end of its trajectory, added from the end.

    Args:
        out: Rows that belong to no extent keep their value. [rows], float32.
        reward: Any stored dtype. [rows].
        extents: First row and number of steps of each trajectory. [n, 2], int64.
    """
    check_extents(extents, len(out))
    rewards = widen(reward, torch.float64)
    first, length = extents.unbind(1)
    total = torch.zeros(len(extents), dtype=torch.float64)
    for distance in range(1, _longest(length) + 1):
        live = length >= distance
        rows = (first + length - distance)[live]
        total[live] += rewards[rows]
        out[rows] = narrow(total[live], torch.float32)


def _longest(length: Tensor) -> int:
    return int(length.max()) if len(length) else 0


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
        returns: [B], float32.
        discount: [B], float32.
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
    check_rows(resolutions, [n_step_reads(resolutions, n, num_rows)])
    rewards = widen(reward, torch.float64)
    first = resolutions[:, Resolution.FIRST_ROW] + resolutions[:, Resolution.ANCHOR]
    left = resolutions[:, Resolution.NUM_STEPS] - resolutions[:, Resolution.ANCHOR]
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


def n_step_reads(resolutions: Tensor, n: int, num_rows: int) -> Reads:
    """Return the first and the last step that an n-step return may read."""
    anchor = resolutions[:, Resolution.ANCHOR]
    last = anchor + (resolutions[:, Resolution.NUM_STEPS] - anchor).clamp(max=n) - 1
    step = torch.stack((anchor, last), dim=1)
    return Reads(step, torch.ones_like(step, dtype=torch.bool), num_rows)

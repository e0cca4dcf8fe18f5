"""Reference ops over rewards: sums in float64, in a fixed order, rounded once to float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.conversion import narrow, widen
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.ops.reference.gather import Reads, check_rows
from deepspeed_gear.ops.reference.integers import exp2, float_bits
from deepspeed_gear.ops.windows import is_no_sample


def suffix_sum_(out: Tensor, reward: Tensor, extents: Tensor) -> None:
    """Set out[row] to the sum of rewards from `row` to its trajectory's end, added from there.

    Args:
        out: [rows], float32; rows outside of all extents keep their values.
        reward: [rows].
        extents: First row and number of steps of each trajectory. [n, 2], int64.
    """
    rewards = widen(reward, torch.float64)
    num_rows = len(out)
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
    """Set n-step return and discount, [B], float32, and number of steps k, int64.

    With r the rewards from the anchor on, and k the number of steps until n, a termination, a
    truncation (None: never) or the trajectory's end: returns = sum of powers[i] * r[i] over i < k;
    discount = powers[k], 0 once terminated, with powers gamma^0 .. gamma^n in float64. All are 0 of
    a record that is no sample. ShapeError if a step of [anchor, min(anchor + n, num_steps)) lies
    outside the rows.
    """
    num_rows = min(len(x) for x in (reward, terminated, truncated) if x is not None)
    anchor = resolutions[:, Resolution.ANCHOR]
    left = resolutions[:, Resolution.NUM_STEPS] - anchor
    last = anchor + left.clamp(max=n) - 1
    ends = torch.stack((anchor, last), dim=1)
    check_rows(resolutions, [Reads(ends, torch.ones_like(ends, dtype=torch.bool), num_rows)])
    rewards = widen(reward, torch.float64)
    first = resolutions[:, Resolution.FIRST_ROW] + anchor
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


def advantages_(
    advantage: Tensor,
    target: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    mask: Tensor,
    log_prob: Tensor | None,
    behaviour_log_prob: Tensor | None,
    factors: Sequence[float],
) -> None:
    """Estimate the advantages and value targets of windows: GAE, or with log-probabilities V-trace.

    From the last step of a window back: error = reward + gamma next_value - value, without
    next_value where the step terminates; later = target - value of the step after, 0 after the last
    step, a termination and a truncation; rho and c are exp(log_prob - behaviour_log_prob), at most
    rho_bar and c_bar.

    - GAE: advantage = target - value = error + gamma lambda later. Schulman et al. 2016, equation
      16.
    - V-trace: target - value = rho error + gamma lambda c later; advantage = rho (error + gamma
      later). Espeholt et al. 2018, "IMPALA", section 4.1 and remarks 1 and 2.

    Args:
        advantage, target: 0 where `mask` is False. [B, T], float32.
        reward, value, next_value: next_value[t] is the value of the state after step t. [B, T],
            float64.
        log_prob, behaviour_log_prob: Log-probabilities of the actions under the policy that is
            trained and the one that has acted; both or none. [B, T], float64.
        factors: gamma, lambda, rho_bar and c_bar.
    """
    gamma, decay, rho_bar, c_bar = factors
    ratio = torch.ones_like(reward)
    is_on_policy = log_prob is None or behaviour_log_prob is None
    if log_prob is not None and behaviour_log_prob is not None:
        ratio = _exp(log_prob - behaviour_log_prob)
    rho = ratio
    c = ratio
    if not is_on_policy:
        rho = torch.where(ratio > rho_bar, rho_bar, ratio)
        c = torch.where(ratio > c_bar, c_bar, ratio)
    ends = terminated | ~mask if truncated is None else terminated | truncated | ~mask
    later = reward.new_zeros(len(reward))
    for t in reversed(range(reward.size(1))):
        later = torch.where(ends[:, t], 0.0, later)
        bootstrap = torch.where(terminated[:, t], 0.0, next_value[:, t])
        error = reward[:, t] + gamma * bootstrap - value[:, t]
        own = rho[:, t] * (error + gamma * later)
        later = rho[:, t] * error + decay * c[:, t] * gamma * later
        own = torch.where(mask[:, t], later if is_on_policy else own, 0.0)
        later = torch.where(mask[:, t], later, 0.0)
        advantage[:, t] = narrow(own, torch.float32)
        target[:, t] = narrow(torch.where(mask[:, t], value[:, t] + later, 0.0), torch.float32)


def _exp(x: Tensor) -> Tensor:
    """Return e^x rounded to float32, as float64, by the steps of `Exp` in returns/returns.h."""
    log = (x * 1.4426950408889634).clamp(-128.0, 128.0).nan_to_num(0.0) * (1 << 54)
    power = float_bits(*exp2(log.to(torch.int64))).to(torch.int32).view(torch.float32).double()
    return torch.where(x.isnan(), x, power)

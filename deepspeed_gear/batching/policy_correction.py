"""Off-policy correction: bounded weights of tokens that another policy sampled (tis, mis, icepop).

With the ratio r = exp(log-probability of the trainer - log-probability of the generator):

- "tis":    min(r, cap). Truncated importance sampling: Espeholt et al. 2018, IMPALA, section 4.1;
  Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
- "mis":    r, and a token with r > cap is rejected. Masked importance sampling: Liu et al. 2025,
  "When speed kills stability".
- "icepop": r, and a token with r < low or r > cap is rejected. Ling Team 2025, "Every step
  evolves" (Ring-1T), section on IcePop.

The ratio of a token is its own; by sequence, the product of the ratios of the sequence's loss
tokens; or by geometric mean, the product's root of their number.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from deepspeed_gear.errors import ConfigError

Kind = Literal["tis", "mis", "icepop"]
Level = Literal["token", "sequence", "geometric"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEVELS: tuple[Level, ...] = get_args(Level)


class CorrectionBounds(NamedTuple):
    """Options of a correction, checked by `correction_bounds`."""

    kind: Kind
    level: Level
    cap: float  # most ratio
    low: float  # least ratio of "icepop", else 0


class Correction(NamedTuple):
    """Weights of loss tokens, and which of them the correction rejects."""

    ratios: np.ndarray  # of each loss token, as its level has it, not bounded. [m], float64
    weights: np.ndarray  # bounded; 0 where rejected. [m], float64
    rejected: np.ndarray  # [m], bool

    def summary(self) -> dict[str, float]:
        """Return figures for the log; all over loss tokens, NaN if there are none."""
        count = len(self.ratios)
        if not count:
            names = ("ratio_mean", "ratio_min", "ratio_max", "capped", "rejected", "ess")
            return dict.fromkeys(names, float("nan"))
        squares = float((self.weights * self.weights).sum())
        is_capped = ~self.rejected & (self.weights < self.ratios)
        return {
            "ratio_mean": float(self.ratios.mean()),
            "ratio_min": float(self.ratios.min()),
            "ratio_max": float(self.ratios.max()),
            "capped": float(is_capped.mean()),
            "rejected": float(self.rejected.mean()),
            "ess": float(self.weights.sum()) ** 2 / (count * squares) if squares else 0.0,
        }


def correction_bounds(
    kind: str, level: str, cap: float | None, low: float | None
) -> CorrectionBounds:
    """Return checked options; `cap` is 2, and with "icepop" 5 and `low` 0.5, where they are None.

    Raises:
        ConfigError: There is no such kind or level, or a bound is out of range.
    """
    if kind not in KINDS:
        rule = f"must be one of {', '.join(KINDS)}"
        raise ConfigError("rollout.correct: kind", rule, kind, "choose one of them")
    if level not in LEVELS:
        rule = f"must be one of {', '.join(LEVELS)}"
        raise ConfigError("rollout.correct: level", rule, level, "choose one of them")
    if low is not None and kind != "icepop":
        remedy = 'leave it out, or choose "icepop"'
        raise ConfigError("rollout.correct: low", f"is no option of {kind!r}", low, remedy)
    most = (5.0 if kind == "icepop" else 2.0) if cap is None else cap
    least = (0.5 if kind == "icepop" else 0.0) if low is None else low
    for name, value in (("cap", most), ("low", least)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            rule = "must be a ratio of probabilities"
            raise ConfigError(f"rollout.correct: {name}", rule, value, "give a number above 0")
    if not least < most:
        rule = f"must be above low ({least})"
        raise ConfigError("rollout.correct: cap", rule, most, "a ratio of 1 is no difference")
    return CorrectionBounds(kind, level, float(most), float(least))


def correction(bounds: CorrectionBounds, logs: np.ndarray, sequences: np.ndarray) -> Correction:
    """Return the correction of loss tokens.

    Args:
        bounds: Kind, level and bounds.
        logs: Logarithm of the ratio of each loss token. [m], float64.
        sequences: Sequence of each loss token, from 0. [m], int64.
    """
    if bounds.level != "token":
        sums = np.bincount(sequences, logs)[sequences]
        logs = sums if bounds.level == "sequence" else sums / np.bincount(sequences)[sequences]
    with np.errstate(over="ignore"):  # a product of many ratios may be infinite: it is bounded
        ratios = np.exp(logs)
    rejected = np.zeros(len(ratios), bool)
    if bounds.kind != "tis":
        rejected = (ratios > bounds.cap) | (ratios < bounds.low)
    weights = np.where(rejected, 0.0, np.minimum(ratios, bounds.cap))
    return Correction(ratios, weights, rejected)

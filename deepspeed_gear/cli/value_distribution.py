"""Distribution of values of trajectories, such as lengths and returns, as `gear inspect` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepspeed_gear.data.dataset import Dataset

LEVELS = (0.1, 0.5, 0.9)


def returns_of(dataset: Dataset) -> NDArray[Any] | None:
    """Return the return of each trajectory: stored, or the sum of its rewards; None without either."""
    stored, reward = dataset.schema.role("return"), dataset.schema.role("reward")
    if stored is not None:
        return dataset.columns[stored.name]
    if reward is None:
        return None
    first_rows = np.cumsum(dataset.lengths) - dataset.lengths
    return np.add.reduceat(dataset.columns[reward.name], first_rows, dtype=np.float64)


def distribution(values: NDArray[Any]) -> dict[str, float | None]:
    """Describe one value per trajectory: least, quantiles, most, mean and deviation; None without values."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return dict.fromkeys(("min", *map(str, LEVELS), "max", "mean", "std"))
    # Between two whole numbers lies no value of a column that has whole numbers only.
    is_whole = bool((numbers == np.rint(numbers)).all())
    method: Literal["inverted_cdf", "linear"] = "inverted_cdf" if is_whole else "linear"
    quantiles = np.quantile(numbers, LEVELS, method=method)
    return {
        "min": float(numbers.min()),
        **{str(level): float(value) for level, value in zip(LEVELS, quantiles, strict=True)},
        "max": float(numbers.max()),
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
    }

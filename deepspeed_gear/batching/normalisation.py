"""Normalisation of a field: shift and gain of its values, from the statistics of its column."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from deepspeed_gear.config import ResolvedField
from deepspeed_gear.data.statistics.dataset_statistics import LEAST_SPREAD, ColumnStatistics
from deepspeed_gear.errors import ConfigError

#: Shift and gain are repeated up to this many elements, so that inner loops are long.
PERIOD_ELEMENTS = 4096


def shift_and_gain(
    field: ResolvedField, statistics: Mapping[str, ColumnStatistics], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shift and gain of (x - shift) * gain, repeated along the window. [elements], float64.

    Both are empty for the identity.

    Raises:
        ConfigError: The field is normalised without statistics, or float64 cannot hold them.
    """
    if not field.is_converted:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    if field.normalize is None:
        return torch.zeros(1, dtype=torch.float64), torch.full(
            (1,), field.scale, dtype=torch.float64
        )
    assert field.column is not None
    at = f"gear.fields.{field.name}.normalize"
    if field.column.name not in statistics:
        remedy = "use a data set made by `gear ingest`, or leave it out"
        raise ConfigError(at, "must be of a column with statistics", field.column.name, remedy)
    known = statistics[field.column.name]
    ends = (known.min, known.max)
    if field.normalize == "quantile":
        ends = (known.quantiles["0.01"], known.quantiles["0.99"])
    numbers = (*ends, known.mean, known.std)
    low, high, mean, spread = (np.broadcast_to(x, field.column.shape) for x in numbers)
    # A constant element is shifted and not scaled. One without a finite value is NaN: it is not
    # below itself, so it counts as constant.
    varies = low < high
    if field.column.dtype == "int64":
        varies = varies | (np.abs(low) > 2.0**53)  # float64 has rounded differences away
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if field.normalize in ("min_max", "quantile"):
            mean = low + (high - low) / 2
            spread = (high - low) / 2
        gain = field.scale / np.where(varies, spread, 1.0)
        holds = (spread >= LEAST_SPREAD * np.spacing(np.abs(mean))) & np.isfinite(gain)
        holds &= np.isfinite(1 / spread) & (1 / spread >= np.finfo(np.float64).tiny)
    wrong = np.argwhere(varies & ~holds)
    if len(wrong):
        element = tuple(wrong[0].tolist())
        rule = "must have values with a spread from 1e-307 to 1e307 and above 2^-43 of their offset"
        place = f"in element {list(element)} of {field.column.name}"
        value = f"{low[element]} to {high[element]} {place}"
        remedy = "store the column less an offset or in other units, or use scale"
        raise ConfigError(at, rule, value, remedy)
    elements = math.prod(shape)
    # A window of 3 steps of the shape [2] has shifts [a, b, a, b, a, b].
    repeats = 1
    if elements > 1:
        repeats = max(1, min(field.gathered_length or 1, PERIOD_ELEMENTS // elements))

    def tiled(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.tile(values.reshape(-1), repeats))

    return tiled(mean), tiled(gain)

"""Exponents of the importance weights on a device: a table of a linear schedule, or a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.config import PrioritizedSampler, SamplerOptions
from deepspeed_gear.config.schedules import end_of, imported
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import RingState

_NAME = "gear.sampler.beta"
_PROBED = (0, 1, 1000, 10**9)  # global batches at which a function is checked


class WeightExponents:
    """The schedule of beta, read on the device at the number of the global batch. Waits for nothing.

    Raises:
        ConfigError: A function does not compute with tensors, or gives no number in [0, 1].
    Cost: 8 bytes for each global batch of a linear schedule, until it is constant; nothing of a function.
    """

    def __init__(self, sampler: SamplerOptions, device: torch.device) -> None:
        beta: Any = sampler.beta if isinstance(sampler, PrioritizedSampler) else None
        self._function: Callable[[Tensor], Any] | None = None
        values = np.zeros(0, np.int64)
        if beta is not None and end_of(beta) is None:
            self._function = beta if callable(beta) else imported(beta["callable"], _NAME)
            _check(self._function, device)
        elif isinstance(beta, dict):  # until it is constant, as `value_at`
            first, last, steps = beta["linear"]
            parts = np.minimum(np.arange(steps + 1) / steps, 1.0)
            values = ((first + (last - first) * parts) * float(ONE_Q62)).astype(np.int64)
        elif beta is not None:
            values = np.array([int(float(beta) * ONE_Q62)], np.int64)
        self._values = torch.from_numpy(values).to(device)

    def next_(self, state: Tensor) -> Tensor:
        """Return exponents for `ring_select_`, of which the last one stays in force. Q62. [n], int64.

        Args:
            state: Of the table; a value of a function outside of [0, 1] is clamped, and counted there.
        """
        if self._function is None:
            return self._values
        value = self._function(state[RingState.BATCH].double()).double()
        beta = value.nan_to_num(0.0).clamp(0.0, 1.0)
        state[RingState.REFUSED] += (beta != value).long()
        exponent: Tensor = (beta * ONE_Q62).long().reshape(1)
        return exponent


def _check(function: Callable[[Tensor], Any], device: torch.device) -> None:
    for batch in _PROBED:
        try:
            found = function(torch.tensor(float(batch), dtype=torch.float64, device=device))
        except (TypeError, ValueError, RuntimeError) as error:
            found = error
        if not isinstance(found, Tensor) or found.shape != () or found.device.type != device.type:
            rule = "must take a tensor [], float64, and return one, for a table on devices"
            shown = list(found.shape) if isinstance(found, Tensor) else f"{type(found).__name__}: {found}"
            raise ConfigError(_NAME, rule, shown, "use the functions of torch, or a linear schedule")
        if not 0 <= float(found) <= 1:
            raise ConfigError(f"{_NAME} at global batch {batch}", "must be in [0, 1]", float(found))

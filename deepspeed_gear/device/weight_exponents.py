"""Exponents of the PER weights of a table on a device, by global batch: a table, or a function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.config import GearConfig, PrioritizedSampler
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

    def __init__(self, config: GearConfig, device: torch.device) -> None:
        sampler, self._function = config.item_sampler, None
        beta = sampler.beta if isinstance(sampler, PrioritizedSampler) else None
        values = np.zeros(0, np.int64)
        if beta is not None and end_of(beta) is None:
            self._function = beta if callable(beta) else imported(beta["callable"], _NAME)
            self._check(device)
        elif beta is not None:
            values = _table_of(beta)
        self._of_host = values  # `at` must not wait for the device
        self._values = torch.from_numpy(values).to(device)

    _function: Callable[[Tensor], Any] | None

    def _check(self, device: torch.device) -> None:
        assert self._function is not None
        for batch in _PROBED:
            try:
                found = self._function(torch.tensor(float(batch), dtype=torch.float64, device=device))
            except (TypeError, ValueError, RuntimeError) as error:
                found = error
            if not isinstance(found, Tensor) or found.shape != () or found.device.type != device.type:
                rule = "must take a tensor [], float64, and return one, for a table on devices"
                shown = list(found.shape) if isinstance(found, Tensor) else f"{type(found).__name__}: {found}"
                remedy = "use the functions of torch, or a linear schedule"
                raise ConfigError(_NAME, rule, shown, remedy)
            if not 0 <= float(found) <= 1:
                raise ConfigError(f"{_NAME} at global batch {batch}", "must be in [0, 1]", float(found))

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

    def at(self, batch: int) -> int:
        """Return the exponent of a global batch, computed on the host. Q62.

        Raises:
            ConfigError: A function gives no number in [0, 1].
        """
        if self._function is None:
            return int(self._of_host[min(batch, len(self._of_host) - 1)])
        value = float(self._function(torch.tensor(float(batch), dtype=torch.float64)))
        if not 0 <= value <= 1:
            raise ConfigError(f"{_NAME} at global batch {batch}", "must be in [0, 1]", value)
        return int(value * ONE_Q62)


def _table_of(beta: Any) -> np.ndarray:
    """Return the exponents of a number or a linear schedule until it is constant, as `value_at`. Q62. [n]."""
    if not isinstance(beta, dict):
        return np.array([int(float(beta) * ONE_Q62)], np.int64)
    first, last, steps = beta["linear"]
    parts = np.minimum(np.arange(steps + 1) / steps, 1.0)
    values: np.ndarray = ((first + (last - first) * parts) * float(ONE_Q62)).astype(np.int64)
    return values

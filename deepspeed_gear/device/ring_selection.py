"""Selection from a table in the memory of one device, with masses and state in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.config import GearConfig, PrioritizedSampler
from deepspeed_gear.config.schedules import end_of, imported
from deepspeed_gear.device.ring_table import NewItems, RingTable
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, MOST_MASS_BITS, ONE_Q62
from deepspeed_gear.ops.records import MassUnit, Normalize, Resolution, RingState, Slot
from deepspeed_gear.sampling.mass_rules import NORMALIZE_CODES, UNIT_CODES
from deepspeed_gear.sampling.stream_spec import StreamSpec


class RingSelection:
    """Masses and draws of a RingTable. Every method mutates fixed tensors and waits for nothing.

    Args:
        table: Where the items lie.
        betas: Exponents of the PER weights.
        stride: The i-th sample since the beginning has number i * stride + offset.
        offset: See `stride`.
        max_times_sampled: Draws after which a trajectory is removed; 0: never.
    """

    def __init__(
        self,
        table: RingTable,
        spec: StreamSpec,
        betas: WeightExponents,
        stride: int,
        offset: int,
        max_times_sampled: int = 0,
    ) -> None:
        self.table, self.betas = table, betas
        self._max_times_sampled = max_times_sampled
        self.seed, self.key = spec.seed, spec.key
        rule, priorities = spec.rule, spec.priorities
        self.is_prioritized = priorities is not None
        self.has_step_items = rule.unit == "step" and not self.is_prioritized
        self._rule = rule.anchors.as_list()
        self._unit = self._drawn = MassUnit.LENGTH if rule.by_length else UNIT_CODES[rule.unit]
        if self.is_prioritized and not table.items_are_rows:
            self._drawn = MassUnit.TRAJECTORY
        self._alpha, self._initial, normalize = 0, HIGHEST_SO_FAR, Normalize.NONE
        self.most_bits = MOST_MASS_BITS if priorities is None else priorities.most_bits
        if priorities is not None:
            self._alpha, normalize = int(priorities.alpha(0) * ONE_Q62), NORMALIZE_CODES[priorities.normalize]
            if priorities.initial is not None:
                self._initial = int(np.float32(priorities.initial).view(np.int32))
        #: Mass rule of items that are added.
        self.new_items = NewItems(self._rule, self._unit, self._alpha, self._initial, self.most_bits)
        self._draw = [spec.seed, spec.key, stride, offset, int(spec.is_stratified), normalize]
        self.takes_highest = spec.sampler.each_once  # of the samplers for devices, top-k alone

    def add_(self, columns: Mapping[str, Tensor], lengths: Tensor | None, count: int, steps: int) -> None:
        """Add trajectories that `RingTable.check` has checked."""
        self.table.add_(columns, lengths, count, steps, self.new_items)

    def select_(self, records: Tensor, weights: Tensor) -> None:
        """Draw the next global batch.

        Args:
            records: Gets the resolutions. [B, 8], int64.
            weights: Gets the importance weights; empty: there are none. [B], float32.
        """
        table, ops, most = self.table, self.table.ops, self._max_times_sampled
        how = (self._rule, table.shape, self._draw, self._drawn)
        given = (table.state, records, weights, table.slots, table.sums)
        if self.takes_highest:
            ops.ring_top_k_(*given, table.priorities, table.row_slots, *how, most > 0)
        elif most:
            ops.ring_select_limited_(*given, table.minima, self.betas.next_(table.state), *how, most)
        else:
            ops.ring_select_(*given, table.minima, table.row_slots, self.betas.next_(table.state), *how)
        if most:
            self._remove_used_up(records)

    def _remove_used_up(self, records: Tensor) -> None:
        """Remove trajectories of a batch that were drawn `max_times_sampled` times. [B, 8], int64."""
        slots, ids = records[:, Resolution.SLOT], records[:, Resolution.ID]
        times = self.table.slots[:, Slot.TIMES_SAMPLED][slots.clamp(min=0)]
        self.table.remove_(torch.where(times >= self._max_times_sampled, ids, Resolution.NO_SAMPLE))

    def update_(self, records: Tensor, values: Tensor) -> None:
        """Set the priorities of samples; of equal items the last wins. [B, 8], int64; [B], float32."""
        table = self.table
        known = (table.state, table.sums, table.minima, table.priorities, table.slots)
        unit = MassUnit.STEP if table.items_are_rows else MassUnit.TRAJECTORY
        rest = (self._rule, table.shape, unit, self._alpha, self.most_bits)
        table.ops.ring_update_(*known, records, values, *rest)


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

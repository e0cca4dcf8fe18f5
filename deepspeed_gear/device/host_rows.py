"""Rows of a table on a device in host memory that the device reads and writes in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_gear.errors import ConfigError, SchemaError
from deepspeed_gear.sampling.mass_rules import Condition
from deepspeed_gear.schema import DTYPES, Schema
from deepspeed_gear.store.cuda_registration import (
    CudaRuntime,
    Registration,
    Runtime,
    as_device_tensor,
    memory_span,
    plan,
    span_of,
)
from deepspeed_gear.store.shared_memory import SharedMemory

_ALIGNMENT = 128  # of a column, so that a warp's read begins at a line


@dataclass(frozen=True)
class RowSize:
    """Size of a column.

    Args:
        shape: Rows, and shape of a row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class HostRows:
    """Columns in host memory, all of it registered with CUDA. Begins with zeros.

    Args:
        sizes: Of the columns, by name.
        device: That reads and writes them; on a CPU nothing is registered.
        at: Name of the table in the config, for errors.
        runtime: The calls that register memory; None: those of `device`.
    Raises:
        ConfigError: The device cannot use all of the memory in place; nothing stays allocated.
        StoreFullError: The host has too little memory.
    """

    def __init__(
        self, sizes: Mapping[str, RowSize], device: torch.device, at: str, runtime: Runtime | None = None
    ) -> None:
        self._device, self._registration = device, None
        begins, end = {}, 0
        for name, size in sizes.items():
            begins[name] = end
            end += -(-size.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = SharedMemory.create(max(end, _ALIGNMENT))
        whole = torch.frombuffer(self._memory.buffer, dtype=torch.uint8)
        #: The columns as tensors of the host. [rows, *shape].
        self.on_host = {
            name: whole[begins[name] : begins[name] + size.num_bytes].view(size.dtype).view(size.shape)
            for name, size in sizes.items()
        }
        #: The same as tensors of the device.
        self.columns = self.on_host
        if device.type == "cpu" and runtime is None:
            return
        try:
            self._register(CudaRuntime(device) if runtime is None else runtime, at)
            if device.type == "cuda":
                self.columns = {name: as_device_tensor(rows, device) for name, rows in self.on_host.items()}
        except BaseException:
            self.close()
            raise

    _registration: Registration | None

    def _register(self, runtime: Runtime, at: str) -> None:
        spans = {name: span_of(rows) for name, rows in self.on_host.items()}
        wanted = plan(spans, memory_span(self._memory))
        registered = self._registration = Registration(self._memory, wanted, runtime)
        for name, why in registered.left_out.items():
            rule = f'must be "device" here: column {name} cannot be used in place: {why}'
            raise ConfigError(f"{at}.rows", rule, "host", "lower capacity_steps until it fits the device")

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.num_bytes

    def wait(self) -> None:
        """Wait until the device has written what was queued, before the host reads or writes rows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for the device and end its use of the memory; safe to call twice. Host views stay valid."""
        if self._registration is not None:
            self.wait()
            self._registration.close()
            self._registration = None
        self._memory.close()


class AddFilter:
    """Which trajectories may be drawn; the others are not stored. Waits for nothing.

    Args:
        conditions: Of the sampler, on columns of a value per trajectory; all must hold.
    Raises:
        SchemaError: A column is late: its values are not there when the trajectory is added.
    """

    def __init__(self, conditions: Sequence[Condition], schema: Schema, device: torch.device) -> None:
        self._conditions = tuple(conditions)
        for condition in conditions:
            if schema[condition.column].late:
                rule = "must not be late where gear.sampler.where names it, in a table on devices"
                raise SchemaError(f"column {condition.column}", rule)
        self._among = {
            condition.column: _members(condition.among, DTYPES[schema[condition.column].dtype]).to(device)
            for condition in conditions
            if condition.among is not None
        }

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read."""
        return frozenset(condition.column for condition in self._conditions)

    def lengths(self, columns: Mapping[str, Tensor], lengths: Tensor | None, steps: int) -> Tensor | None:
        """Return the lengths of trajectories, 0 for those that fail a condition; None: all are `steps`.

        Args:
            columns: Of the trajectories. [E, *shape].
            lengths: Steps of each; None: all `steps`. [E], int64.
        """
        for condition in self._conditions:
            values = columns[condition.column]
            holds = self._holds(condition, values)
            kept = torch.full_like(holds, steps, dtype=torch.int64) if lengths is None else lengths
            lengths = torch.where(holds, kept, torch.zeros_like(kept))
        return lengths

    def _holds(self, condition: Condition, values: Tensor) -> Tensor:
        if values.dtype == torch.bool:
            values = values.to(torch.uint8)
        holds = torch.ones_like(values, dtype=torch.bool)
        # A float bound would round large integers: compared are integers.
        exact = not values.dtype.is_floating_point
        if condition.minimum is not None:
            least = math.ceil(condition.minimum) if exact else condition.minimum
            holds &= _compare(values, least, is_least=True)
        if condition.maximum is not None:
            most = math.floor(condition.maximum) if exact else condition.maximum
            holds &= _compare(values, most, is_least=False)
        if condition.among is not None:
            holds &= (values[:, None] == self._among[condition.column]).any(1)
        return holds


def _compare(values: Tensor, bound: float, is_least: bool) -> Tensor:
    """Return which values are at least, or at most, a bound that their dtype may not hold. [n], bool."""
    if not values.dtype.is_floating_point:
        limits = torch.iinfo(values.dtype)
        if not limits.min <= bound <= limits.max:
            return torch.full_like(values, (bound < limits.min) == is_least, dtype=torch.bool)
    return values >= bound if is_least else values <= bound


def _members(among: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the numbers that a dtype can hold. [n]."""
    if dtype.is_floating_point:
        return torch.tensor([float(number) for number in among], dtype=dtype)
    held = torch.uint8 if dtype == torch.bool else dtype
    limits = torch.iinfo(held)
    found = [int(number) for number in among if limits.min <= number <= limits.max and number == int(number)]
    return torch.tensor(found, dtype=held)

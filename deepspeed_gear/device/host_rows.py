"""Rows of a table on a device in host memory that the device reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.store.cuda_registration import (
    CudaRuntime,
    Registration,
    as_device_tensor,
    memory_span,
    plan,
    span_of,
)
from deepspeed_gear.store.shared_memory import SharedMemory

_ALIGNMENT = 128  # of a column, so that a warp's read begins at a line


class HostRows:
    """Columns in host memory, all of it registered with CUDA. Begins with zeros.

    Args:
        sizes: Shape (rows, and shape of a row) and dtype of the columns, by name.
        device: That reads and writes them; on a CPU nothing is registered.
        at: Name of the table in the config, for errors.
        runtime: The calls that register memory; None: those of `device`.
    Raises:
        ConfigError: The device cannot use all of the memory in place; nothing stays allocated.
        StoreFullError: The host has too little memory.
    """

    def __init__(
        self,
        sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        at: str,
        runtime: CudaRuntime | None = None,
    ) -> None:
        self._device, self._registration = device, None
        spans, end = {}, 0
        for name, (shape, dtype) in sizes.items():
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            spans[name] = slice(end, end + num_bytes)
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = SharedMemory.create(max(end, _ALIGNMENT))
        whole = torch.frombuffer(self._memory.buffer, dtype=torch.uint8)
        #: The columns as tensors of the host. [rows, *shape].
        self.on_host = {
            name: whole[spans[name]].view(dtype).view(shape) for name, (shape, dtype) in sizes.items()
        }
        #: The same as tensors of the device.
        self.columns = self.on_host
        if device.type == "cpu" and runtime is None:
            return
        try:
            wanted = plan(
                {name: span_of(rows) for name, rows in self.on_host.items()}, memory_span(self._memory)
            )
            used = CudaRuntime(device) if runtime is None else runtime
            self._registration = Registration(self._memory, wanted, used)
            for name, why in self._registration.left_out.items():
                rule = f'must be "device" here: column {name} cannot be used in place: {why}'
                raise ConfigError(f"{at}.rows", rule, "host", "lower capacity_steps until it fits the device")
            if device.type == "cuda":
                self.columns = {name: as_device_tensor(rows, device) for name, rows in self.on_host.items()}
        except BaseException:
            self.close()
            raise

    _registration: Registration | None

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

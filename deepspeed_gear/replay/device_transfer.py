"""Device transfer of this rank's batches: what CUDA reads in place, what is staged, and what waits.

A batch's transfer stream (a CUDA stream on a GPU) is waited for by the stream of the thread that
uses it. It reuses a ring entry after that stream's work when `keep` newer batches had been handed
over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.gather import GatherOptions, n_step_columns
from deepspeed_gear.batching.transfer.cuda_streams import lane_of, refuse_capture
from deepspeed_gear.batching.transfer.device_gather import (
    DIRECT,
    STAGED,
    WAYS,
    DeviceGatherer,
    FieldTransfer,
    column_name,
    is_computed,
)
from deepspeed_gear.config.options import TransferConfig
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.errors import BuildError, ConfigError, undo_on_error
from deepspeed_gear.log import LOG
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.row_exchange.exchange_plan import ReadNeeds
from deepspeed_gear.store.cuda_registration import CudaRuntime, Registration, as_device_tensor
from deepspeed_gear.store.table import Table

MOST_STEPS = 1000  # of a synthetic trajectory


def is_wanted(options: TransferConfig, device: torch.device) -> bool:
    """Return whether batches are copied to a device: always to CUDA, to the CPU if a way is set."""
    if device.type not in ("cpu", "cuda") and options.way != "auto":
        rule = "must be auto where batches are on neither CUDA nor the CPU"
        raise ConfigError("gear.transfer.way", rule, options.way, f"they are on {device}")
    return device.type == "cuda" or (device.type == "cpu" and options.way != "auto")


class DeviceTransfer:
    """Transfers batches, the latest `keep` of which are in use. A thread per stream gathers."""

    def __init__(
        self,
        config: TransferConfig,
        backend: str,
        needs: ReadNeeds,
        tables: Sequence[Table],
        device: torch.device,
        num_samples: int,
        keep: int,
        options: GatherOptions,
    ) -> None:
        self.lane = lane_of(device)
        self._config = config
        self._keep = keep
        self._options = options
        self._registrations: dict[str, Registration] = {}  # by table
        self._refused: dict[str, str] = {}
        self._tables = list(tables)
        read = read_fields(needs.fields)
        self._fields = [f for f in read if not is_computed(f) and not f.mask_only]
        stored = [column_name(field) for field in self._fields]
        #: The columns that batches read, by table, in the order of the fields.
        self._names: dict[str, list[str]] = {}
        for table in self._tables:
            n_step = (
                [name for name in n_step_columns(table) if name is not None] if needs.n_step else []
            )
            names = dict.fromkeys([*stored, *n_step])  # compressed columns are always staged
            self._names[table.spec.name] = [name for name in names if name not in table.compressed]
        self._ops: Ops | None = self._tables[0].ops
        self._reached: dict[str, dict[str, torch.Tensor]] = {}  # by table
        with undo_on_error(self.close):
            if self.lane.device.type != "cpu":
                self._ops = self._kernels(backend)
            for table in self._tables:
                self._reached[table.spec.name] = self._reached_columns(table)
            self.way = self._choose(self._tables[0], num_samples)
        LOG.info("gear: batches are transferred to %s: %s", self.lane.device, self.describe())

    def gatherer(self, table: Table, depth: int, way: str | None = None) -> DeviceGatherer:
        """Return a gatherer of a table, with a ring of some depth; `way`: None: the chosen one."""
        n_step = [
            name for each in self._tables for name in n_step_columns(each) if name is not None
        ]
        reaches_n_step = all(map(self._is_reached, n_step))
        # ops are unused by staged fields
        ops = self._ops or table.ops
        way = way or self.way
        transfer = FieldTransfer(self.lane, ops, way, self._is_reached, reaches_n_step, self._keep)
        columns = self._reached[table.spec.name]
        return DeviceGatherer(transfer, columns, self._options, table, depth)

    @property
    def _num_registered(self) -> int:
        return sum(registration.num_bytes for registration in self._registrations.values())

    def _kernels(self, backend: str) -> Ops | None:
        """Return ops for tensors of the device; None where only staging is possible."""
        why = 'gear.backend is "cpu", which has no kernels'
        if backend != "cpu":
            if self._config.way == STAGED:
                return None
            try:
                return load_backend("cuda")
            except BuildError as error:
                if backend == "cuda" or self._config.way == DIRECT:
                    raise
                why = str(error)
        self._refused[DIRECT] = why
        return None

    def _reached_columns(self, table: Table) -> dict[str, torch.Tensor]:
        """Return the columns of a table that the device reads in place; register their memory."""
        columns = {name: table.gather_source(name) for name in self._names[table.spec.name]}
        if self.lane.device.type == "cpu":
            return columns
        if self._ops is None:
            return {}
        most = self._config.register_bytes
        room = None if most is None else max(most - self._num_registered, 0)
        registration = Registration.of(table.memory, columns, CudaRuntime(self.lane.device), room)
        self._registrations[table.spec.name] = registration
        there: dict[str, torch.Tensor] = {}
        for name in registration.columns:
            try:
                there[name] = as_device_tensor(columns[name], self.lane.device)
            except RuntimeError as error:
                registration.left_out[name] = str(error)
        return there

    def _is_reached(self, name: str) -> bool:
        """Return whether the device reads a column in place, in every table that has it."""
        if any(name in table.compressed for table in self._tables):
            return False
        return all(
            name in columns
            for table, columns in self._reached.items()
            if name in self._names[table]
        )

    def _choose(self, table: Table, num_samples: int) -> str:
        """Return the transfer way; record why another one is impossible."""
        reached = [field for field in self._fields if self._is_reached(column_name(field))]
        if self._ops is not None and not reached:
            every = self._registrations.values()
            why = [f"{name}: {rule}" for one in every for name, rule in one.left_out.items()]
            self._refused[DIRECT] = "; ".join(["the device reads no column in place", *why[:3]])
        if not any(self._names.values()):  # a stage that reads no column
            return STAGED
        wanted = self._config.way
        for way in WAYS if wanted == "auto" else (wanted,):
            if way not in self._refused and self._works(table, way, num_samples):
                return way
        if wanted == "auto":
            return STAGED
        remedy = f"{self._refused[wanted]}; use auto or staged"
        raise ConfigError("gear.transfer.way", "must be possible here", wanted, remedy)

    def _works(self, table: Table, way: str, num_samples: int) -> bool:
        """Gather a batch of made-up samples, which loads the kernels; return whether it works."""
        single = {column.name for column in table.spec.schema if column.rows == "1"}
        held = {name: len(table.gather_source(name)) for name in self._names[table.spec.name]}
        rows = min(
            (n for name, n in held.items() if name not in single), default=table.spec.num_rows
        )
        slots = min((n for name, n in held.items() if name in single), default=1)
        resolutions = made_up_resolutions(table, num_samples, rows, slots)
        try:
            gatherer = self.gatherer(table, 2, way)
            if len(resolutions):
                gatherer.gather(resolutions)
                self.lane.record().synchronize()
        except RuntimeError as error:
            self._refused[way] = str(error)
            return False
        return True

    def bring(self, batch: Batch) -> Batch:
        """Copy a batch's other tensors, of its samples, to the device; on the transfer stream."""
        here = [tensor for tensor in batch.every_tensor if tensor.device != self.lane.device]
        there = dict(zip(map(id, here), self.lane.bring(here), strict=True))
        return batch.map(lambda tensor: there.get(id(tensor), tensor)) if here else batch

    def finish(self, batch: Batch, gatherer: DeviceGatherer) -> Batch:
        """Note the event after which a batch is on its device, and its ring entry."""
        batch.arrives((self.lane.record(), gatherer, gatherer.made))
        return batch

    def refuse_capture(self) -> None:
        """Raise a StoreError while a CUDA graph is captured: replays would read the same batch."""
        if self.lane.device.type == "cuda":
            rule = "cannot be captured where the table is in host memory"
            refuse_capture("sample", rule, 'sample before the graph, or set "placement": "device"')

    def hand_over(self, batch: Batch) -> Batch:
        """Make this thread's stream, which uses the batch, wait for it. The host does not wait."""
        if batch.arrival is not None:
            event, gatherer, entry = batch.arrival
            gatherer.hand_over(entry)
            self.lane.hand_over(event, batch.every_tensor)
            batch.arrives(None)
        return batch

    def describe(self) -> dict[str, Any]:
        """Return the transfer way, registered bytes, and why other ways were refused."""
        return {
            "way": self.way,
            "refused": dict(self._refused),
            "registered_bytes": self._num_registered,
            "not_registered": {name: one.left_out for name, one in self._registrations.items()},
        }

    def close(self) -> None:
        """Wait for the device and unregister memory; safe to call twice."""
        with contextlib.suppress(RuntimeError):  # a failed device reads nothing
            self.lane.record().synchronize()
        for registration in self._registrations.values():
            registration.close()


def made_up_resolutions(table: Table, count: int, num_rows: int, num_slots: int) -> torch.Tensor:
    """Return random resolutions within a table's rows and slots; none if no step fits.

    Returns:
        [count, 8], int64.
    """
    words = np.random.default_rng(0)
    final = int(table.spec.schema.has_final_row)
    steps = min(num_rows - final, MOST_STEPS)
    if steps < 1 or num_slots < 1:
        return torch.empty(0, Resolution.NUM_WORDS, dtype=torch.int64)
    resolutions = np.zeros((count, Resolution.NUM_WORDS), np.int64)
    resolutions[:, Resolution.FIRST_ROW] = words.integers(0, num_rows - final - steps + 1, count)
    resolutions[:, Resolution.NUM_STEPS] = steps
    resolutions[:, Resolution.MASS] = 1
    resolutions[:, Resolution.ANCHOR] = words.integers(0, steps, count)
    resolutions[:, Resolution.SLOT] = words.integers(0, num_slots, count)
    return torch.from_numpy(resolutions)

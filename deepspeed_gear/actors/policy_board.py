"""The policy board: a node's newest policy parameters, in shared memory, for its actors."""

from __future__ import annotations

import os
import weakref
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError, StoreError, undo_on_error
from deepspeed_gear.store.memory_layout import (
    Layout,
    Region,
    RunIdentity,
    read_header,
    write_header,
)
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.shared_memory import SharedMemory, file_path
from deepspeed_gear.timeouts import wait_until

PREFIX = "gear"
MAX_READERS = 1024
_SLOTS = 3  # a reader may copy a version until the publisher begins the third one after it
_PUBLISHER = 0  # its peer index; readers have the next ones
# Words of the board.
_NEWEST = 0  # number of the newest version
_SLOT = 1  # slot that has it
# Words of a slot.
_VERSION = 0  # number of the version that it holds; 0: it is being overwritten
_CHECKSUM = 1
_POLL_S = 50e-6
_PATIENCE_S = 10.0


class PolicyBoard(ProcessBound):
    """Parameters in a node's shared memory: one process publishes them, others load them.

    Make one with `create`, and open it in other processes with `attach`.

    No process waits for another. A new version is written beside the newest one, and a reader
    checks its number and its checksum. So a reader never loads a partly written version, even if

    - the publisher is faster than the reader,
    - the publisher dies while it writes (the version before stays the newest), or
    - the processor reorders stores.

    Thread safety: one thread per process. Process safety: one publisher, `MAX_READERS` readers.
    """

    def __init__(self, memory: SharedMemory, layout: Layout) -> None:
        self._memory = memory
        self._views = layout.views(memory.buffer)
        self._shapes: list[tuple[str, list[int]]] = [(n, s) for n, s in layout.meaning["board"]]
        self._words = self._views["words"]
        self._slots = self._views["slots"]
        self._copy = np.empty_like(self._views["values"][0])
        self.loaded = 0  # version that this process has loaded last
        self._finalizer = weakref.finalize(self, memory.close)

    @classmethod
    def create(cls, module: nn.Module, prefix: str = PREFIX) -> PolicyBoard:
        """Create a board for a module's floating-point parameters and buffers; publish version 1.

        Args:
            module: The whole module; its parameters must not be partitioned over ranks.
            prefix: Prefix of the file's name in /dev/shm: the run's `gear.shared_memory.prefix`, by
                which `gear clean` finds the file.

        Returns:
            The board, of which this process is the publisher.

        Raises:
            StoreFullError: Shared memory is full.
            DataError: A parameter is partitioned.
        """
        file_path(prefix)  # refuses a prefix that cannot be a file's name
        state = _state_of(module)
        shapes = [(name, list(tensor.shape)) for name, tensor in state]
        length = sum(tensor.numel() for _, tensor in state)
        regions = [
            Region("words", "int64", (8,)),
            Region("slots", "int64", (_SLOTS, 8)),
            Region("values", "float32", (_SLOTS, length)),
        ]
        layout = Layout.of(regions, {"board": shapes})
        run = RunIdentity(os.urandom(16).hex())
        memory = SharedMemory.create(layout.total_bytes, _PUBLISHER, huge_pages=False)
        with undo_on_error(memory.close):
            write_header(memory.buffer, layout, run)
            board = cls(memory, layout)
            board.publish(module)
            memory.link(f"{prefix}-board.{run.id}", reaped=True)
        return board

    @classmethod
    def attach(cls, name: str) -> PolicyBoard:
        """Attach to a board as a reader.

        Args:
            name: The board's `name`, from the process that created it.

        Raises:
            StoreError: There is no such board, or it already has `MAX_READERS` readers.
        """
        memory = SharedMemory.attach_one_of(name, range(1, 1 + MAX_READERS))
        with undo_on_error(memory.close):
            layout, _ = read_header(memory.fd, str(memory.path))
            if "board" not in layout.meaning:
                raise StoreError(
                    str(memory.path),
                    "must be a policy board",
                    remedy="give the name that the learner's PolicyBoard has",
                )
            return cls(memory, layout)

    @property
    def name(self) -> str:
        """Name of the board's file in /dev/shm."""
        return self._memory.path.name

    @property
    def version(self) -> int:
        """Number of the newest complete version; the first is 1."""
        return int(self._words[_NEWEST])

    @property
    def is_published(self) -> bool:
        """Whether the publisher is still attached."""
        return self._memory.is_alive(_PUBLISHER)

    def publish(self, module: nn.Module, version: int | None = None) -> int:
        """Publish a module's parameters as the newest version.

        Args:
            module: A module with the same parameters as the one that the board was created for.
            version: Number of the version; None: one more than the last.

        Returns:
            The number of the version.

        Raises:
            DataError: The module has other parameters, or the number is not greater than the last.
            StoreError: This process did not create the board.

        Cost: the parameters are copied once and read once more.
        """
        if self._memory.peer != _PUBLISHER:
            raise StoreError(
                f"board {self.name}",
                "must be published by the process that made it",
                remedy="publish in the learner, load in the actors",
            )
        number = self.version + 1 if version is None else arguments.count("version", version)
        if number <= self.version:
            raise DataError(
                "version",
                f"must be more than {self.version}",
                number,
                "leave it out to count up by one",
            )
        state = self._check(module)
        slot = (int(self._words[_SLOT]) + 1) % _SLOTS
        self._slots[slot, _VERSION] = 0  # invalidates it for readers that are copying it
        values = self._views["values"][slot]
        _copy(self._parts(values), state)
        self._slots[slot, _CHECKSUM] = zlib.crc32(values)
        self._slots[slot, _VERSION] = number
        self._words[_SLOT] = slot
        self._words[_NEWEST] = number  # the commit point
        return number

    def load_into(self, module: nn.Module) -> int:
        """Copy the newest version into a module, unless this process has already loaded it.

        This also works after the publisher has ended (see `is_published`).

        Args:
            module: A module with the same parameters as the one that the board was created for, on
                any device and of any floating dtype.

        Returns:
            The number of the version that the module has now.

        Raises:
            DataError: The module has other parameters.
            StoreError: The board is damaged: no version is complete.
        """
        if self.version == self.loaded:
            return self.loaded
        state = self._check(module)
        version = wait_until(self._read, _PATIENCE_S, _POLL_S)
        if version is None:
            rule = f"must hold a whole version within {_PATIENCE_S:g} s"
            raise StoreError(
                f"board {self.name}",
                rule,
                self.version,
                "the publisher may have died while it wrote; start it again",
            )
        _copy(state, self._parts(self._copy))
        self.loaded = version
        return version

    def _read(self) -> int | None:
        """Copy the newest version; None if it was overwritten meanwhile."""
        version = self.version
        slots = np.flatnonzero(self._slots[:, _VERSION] == version)
        if not len(slots):
            return None
        slot = int(slots[0])
        # Read before the values: if the publisher begins to overwrite the slot after this, number
        # or checksum will not fit the copy.
        checksum = int(self._slots[slot, _CHECKSUM])
        np.copyto(self._copy, self._views["values"][slot])
        is_whole = self._slots[slot, _VERSION] == version and zlib.crc32(self._copy) == checksum
        return version if is_whole else None

    def _parts(self, values: np.ndarray) -> list[Tensor]:
        """Return the tensors whose elements lie one after the other in `values`."""
        parts = torch.split(
            torch.from_numpy(values), [int(np.prod(shape)) for _, shape in self._shapes]
        )
        return [part.view(shape) for part, (_, shape) in zip(parts, self._shapes, strict=True)]

    def _check(self, module: nn.Module) -> list[Tensor]:
        state = _state_of(module)
        shapes = [(name, list(tensor.shape)) for name, tensor in state]
        if shapes != self._shapes:
            odd = next((s for s in shapes if s not in self._shapes), None) or "fewer parameters"
            raise DataError(
                "module",
                "must have the parameters that the board was made for",
                odd,
                "load into a module of the same architecture",
            )
        return [tensor for _, tensor in state]

    def close(self) -> None:
        """Detach; the last to detach removes the board. Safe to call twice and at exit."""
        self._finalizer()


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the floating-point parameters and buffers of a module by name."""
    arguments.one_of("module", module, nn.Module, "a torch.nn.Module")
    for name, parameter in module.named_parameters():
        status: Any = getattr(parameter, "ds_status", None)
        if status is not None and parameter.numel() == 0:
            remedy = "publish inside deepspeed.zero.GatheredParameters"
            raise DataError(f"parameter {name}", "must be whole", None, remedy)
    return [
        (name, tensor) for name, tensor in module.state_dict().items() if tensor.is_floating_point()
    ]


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)

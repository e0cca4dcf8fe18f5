"""The policy board: a node's newest policy parameters; publishing, waiting for it, and loading."""

from __future__ import annotations

import os
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.board_search import BOARD, PUBLISHER, BoardSearch, board_file
from deepspeed_gear.actors.board_tensors import BoardTensors, copy_tensors
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    StoreError,
    StoreGoneError,
    undo_on_error,
)
from deepspeed_gear.store.memory_layout import (
    Layout,
    Region,
    RunIdentity,
    read_header,
    write_header,
)
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.shared_memory import DEFAULT_PREFIX, SharedMemory, file_path
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.store_search import WantedRun

MAX_READERS = 1024
_SLOTS = 3  # a reader may copy a version until the publisher begins the third one after it
# Words of the board.
_NEWEST = 0  # number of the newest version
_SLOT = 1  # slot that has it
# Words of a slot.
_VERSION = 0  # number of the version that it holds; 0: it is being overwritten
_CHECKSUM = 1
_POLL_S = 50e-6
_PATIENCE_S = 10.0
_SEARCH_S = 0.1  # between two looks for a board


class BoardReader(ProcessBound):
    """Base of the boards of this node and of those on other machines, for loading weights.

    Attributes:
        loaded: Number of the version that this process has loaded last; 0: none.
    """

    loaded: int

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of the newest complete version; the first is 1."""

    @property
    @abstractmethod
    def is_published(self) -> bool:
        """Whether the publisher is still attached."""

    @abstractmethod
    def load_into(self, module: nn.Module) -> int:
        """Copy the newest version into a module, unless this process has already loaded it.

        The module then has all parameters of exactly one version. This also works after the
        publisher has ended (see `is_published`). If the run continues in another job on its kept
        store, the board of that job is loaded.

        Args:
            module: A module with the same parameters as the one that the board was created for, on
                any device and of any floating dtype.

        Returns:
            The number of the version that the module has now.

        Raises:
            DataError: The module has other parameters. Nothing has changed.
            StoreError: The board is damaged: no version is complete.
        """


class PolicyBoard(BoardReader):
    """Parameters in a node's shared memory: one process publishes them, others load them.

    Make one with `create` in the ranks, and open it in other processes with `attach`; on other
    machines, use a RemotePolicyBoard.

    No process waits for another. A new version is written beside the newest one, and a reader
    checks its number and its checksum. So a reader never loads a partly written version, even if

    - the publisher is faster than the reader,
    - the publisher dies while it writes (the version before stays the newest), or
    - the processor reorders stores.

    Thread safety: one thread per process. Process safety: one publisher, `MAX_READERS` readers.
    """

    def __init__(self, memory: SharedMemory, search: BoardSearch | None = None) -> None:
        self._search = search  # for the board of the run's next job
        self._published: int | None = None  # last version of a rank that shares its leader's board
        self._open(memory)

    def _open(self, memory: SharedMemory) -> None:
        with undo_on_error(memory.close):
            layout, self._run = read_header(memory.fd, str(memory.path))
            if BOARD not in layout.meaning:
                raise StoreError(
                    str(memory.path),
                    "must be a policy board",
                    remedy="give the name that the learner's PolicyBoard has",
                )
        self._memory = memory
        self._views = layout.views(memory.buffer)
        self.tensors = BoardTensors.of_json(layout.meaning[BOARD]["tensors"])
        self._words = self._views["words"]
        self._slots = self._views["slots"]
        self._copy: np.ndarray | None = None  # made by the first load
        self.loaded = 0
        self._finalizer = weakref.finalize(self, memory.close)

    @classmethod
    def create(
        cls, module: nn.Module, replay: Any = None, *, version: int = 1, prefix: str | None = None
    ) -> PolicyBoard:
        """Create a board for a module's floating-point parameters and buffers, and publish them.

        With a replay it is the board of this node in the replay's run, of which there is one. Call
        it on every rank: the node leader makes the board and publishes, and the other ranks of the
        node share it, where `publish` only checks its arguments and counts.

        Args:
            module: The whole module; its parameters must not be partitioned over ranks. The board
                has its dtypes.
            replay: The replay of this rank, `engine.gear`. Workers then find the board by the run's
                config, and gateways by the run. None: a board apart from runs, which others find by
                its `name`.
            version: Number of the first version.
            prefix: Prefix of the file's name in /dev/shm, by which `gear clean` finds the file;
                None: the replay's `gear.shared_memory.prefix`, or "gear".

        Returns:
            The board, of which this process, or the node leader, is the publisher.

        Raises:
            StoreFullError: Shared memory is full.
            StoreError: The run has a board on this node; or the node leader has made none within
                the replay's `timeout_s`.
            DataError: A parameter is partitioned.
            ConfigError: The replay has no store on this node.
        """
        number = arguments.count("version", version)
        tensors = BoardTensors.of_module(module)
        run = RunIdentity(os.urandom(16).hex())
        search = None
        if replay is not None:
            run = _run_of(replay)
            prefix = replay.config.shared_memory.prefix if prefix is None else prefix
            search = BoardSearch(prefix, [run.id])
            if not replay.is_node_leader:
                return cls._share(search, module, number, replay.config.timeout_s)
            _refuse_second(search)
        prefix = DEFAULT_PREFIX if prefix is None else prefix
        file_path(prefix)  # refuses a prefix that cannot be a file's name
        regions = [
            Region("words", "int64", (8,)),
            Region("slots", "int64", (_SLOTS, 8)),
            Region("values", "uint8", (_SLOTS, tensors.num_bytes)),
        ]
        meaning = {"tensors": tensors.to_json(), "of_run": replay is not None}
        layout = Layout.of(regions, {BOARD: meaning})
        memory = SharedMemory.create(layout.total_bytes, PUBLISHER, huge_pages=False)
        with undo_on_error(memory.close):
            write_header(memory.buffer, layout, run)
            board = cls(memory, search)
            board.publish(module, number)
            memory.link(board_file(prefix), reaped=True)
        return board

    @classmethod
    def _share(
        cls, search: BoardSearch, module: nn.Module, version: int, timeout_s: float
    ) -> PolicyBoard:
        """Attach a rank to the board that its node leader makes."""
        memory = wait_until(lambda: _found(search), timeout_s, _SEARCH_S)
        if memory is None:
            rule = f"must be created by the node leader within {timeout_s:g} s"
            remedy = "call PolicyBoard.create on every rank, or only where is_node_leader"
            raise StoreError("the run's policy board", rule, None, remedy)
        board = cls(memory, search)
        with undo_on_error(board.close):
            board.tensors.check_exact(module)
        board._published = version
        return board

    @classmethod
    def attach(
        cls,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        run: str | None = None,
        wait_s: float = 60.0,
    ) -> PolicyBoard:
        """Attach to the board of a run of this node as a reader.

        Args:
            config: The run's ds_config or `gear` section, as `TrajectoryWriter.attach`.
            name: A board's `name`, instead of a search.
            run: Name or id of the run, as `TrajectoryWriter.attach`.
            wait_s: How long to wait for the ranks to create the board, in seconds.

        Raises:
            ConfigError: An argument is wrong.
            StoreError: No board matches within `wait_s`, several do, or the board already has
                `MAX_READERS` readers.
        """
        arguments.one_of("name", name, (str, type(None)), "a name")
        check_timeout("wait_s", wait_s)
        if name is not None:
            if config is not None or run is not None:
                remedy = "leave the others out"
                raise ConfigError("name", "must be the only argument", name, remedy)
            return cls(_attached(name))
        wanted = WantedRun.read(config, run)
        search = BoardSearch(wanted.prefix, wanted.names, wanted.section)
        memory = wait_until(lambda: _found(search), wait_s, _SEARCH_S)
        if memory is None:
            raise search.error(wait_s)
        board = cls(memory)
        board._search = BoardSearch(wanted.prefix, [board._run.id])
        return board

    @property
    def name(self) -> str:
        """Name of the board's file in /dev/shm."""
        return self._memory.path.name

    @property
    def version(self) -> int:
        return int(self._words[_NEWEST])

    @property
    def is_published(self) -> bool:
        return self._memory.is_alive(PUBLISHER)

    def publish(self, module: nn.Module, version: int | None = None) -> int:
        """Publish a module's parameters as the newest version.

        Args:
            module: A module with the same parameters as the one that the board was created for.
            version: Number of the version; None: one more than the last.

        Returns:
            The number of the version.

        Raises:
            DataError: The module has other parameters, or dtypes that the board's would round; or
                the number is not greater than the last.
            StoreError: This process did not create the board.

        Cost: the parameters are copied once and read once more; nothing in a rank that shares its
        leader's board.
        """
        self._check_open()
        if self._memory.peer != PUBLISHER and self._published is None:
            raise StoreError(
                f"board {self.name}",
                "must be published by the process that made it",
                remedy="publish in the learner, load in the actors",
            )
        last = self.version if self._published is None else self._published
        number = last + 1 if version is None else arguments.count("version", version)
        if number <= last:
            raise DataError(
                "version",
                f"must be more than {last}",
                number,
                "leave it out to count up by one",
            )
        state = self.tensors.check_exact(module)
        if self._published is not None:
            self._published = number
            return number
        slot = (int(self._words[_SLOT]) + 1) % _SLOTS
        self._slots[slot, _VERSION] = 0  # invalidates it for readers that are copying it
        values = self._views["values"][slot]
        copy_tensors(self.tensors.views(values), state)
        self._slots[slot, _CHECKSUM] = zlib.crc32(values)
        self._slots[slot, _VERSION] = number
        self._words[_SLOT] = slot
        self._words[_NEWEST] = number  # the commit point
        return number

    def load_into(self, module: nn.Module) -> int:
        self._check_open()
        if self._search is not None and not self.is_published:
            self._follow()
        if self.version == self.loaded:
            return self.loaded
        state = self.tensors.check(module)
        if self._copy is None:
            self._copy = np.empty(self.tensors.num_bytes, np.uint8)
        version, _ = self.copy_newest(self._copy)
        copy_tensors(state, self.tensors.views(self._copy))
        self.loaded = version
        return version

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError(f"board {self.name}", "must be open", None, "it was closed")

    def _follow(self) -> None:
        """Attach to the board of the run's next job, if there is one."""
        assert self._search is not None
        memory = _found(self._search)
        if memory is not None:
            self._finalizer()
            self._open(memory)

    def copy_newest(self, target: np.ndarray) -> tuple[int, int]:
        """Copy the bytes of the newest version.

        Args:
            target: [tensors.num_bytes], uint8.

        Returns:
            The version's number and the CRC-32 of its bytes.

        Raises:
            StoreError: The board is damaged: no version is complete.
        """
        read = wait_until(lambda: self._read(target), _PATIENCE_S, _POLL_S)
        if read is None:
            rule = f"must hold a whole version within {_PATIENCE_S:g} s"
            raise StoreError(
                f"board {self.name}",
                rule,
                self.version,
                "the publisher may have died while it wrote; start it again",
            )
        return read

    def _read(self, target: np.ndarray) -> tuple[int, int] | None:
        """Copy the newest version; None if it was overwritten meanwhile."""
        version = self.version
        slots = np.flatnonzero(self._slots[:, _VERSION] == version)
        if not len(slots):
            return None
        slot = int(slots[0])
        # Read before the values: if the publisher begins to overwrite the slot after this, number
        # or checksum will not fit the copy.
        checksum = int(self._slots[slot, _CHECKSUM])
        np.copyto(target, self._views["values"][slot])
        is_whole = self._slots[slot, _VERSION] == version and zlib.crc32(target.data) == checksum
        return (version, checksum) if is_whole else None

    def close(self) -> None:
        """Detach; the last to detach removes the board. Safe to call twice and at exit."""
        self._finalizer()


def _attached(name: str) -> SharedMemory:
    """Map a board as one of its readers."""
    return SharedMemory.attach_one_of(name, range(1, 1 + MAX_READERS))


def _found(search: BoardSearch) -> SharedMemory | None:
    """Map the board that a search finds; None if there is none now."""
    name = search.find()
    if name is not None:
        with suppress(StoreGoneError):  # its publisher may have ended since
            return _attached(name)
    return None


def _run_of(replay: Any) -> RunIdentity:
    """Return the run of a rank's replay."""
    from deepspeed_gear.replay.replay import Replay

    if not isinstance(replay, Replay):
        rule = "must be a Replay whose tables are in host memory"
        remedy = "leave it out, and give others the board's name"
        raise ConfigError("replay", rule, type(replay).__name__, remedy)
    return replay.store(replay.config.sampled_tables[0]).run


def _refuse_second(search: BoardSearch) -> None:
    """Raise a StoreError if the run has a board on this node."""
    name = search.find()
    if name is not None:
        raise StoreError(
            "the run's policy board",
            "must be created once on a node",
            name,
            "close it first; or create a board apart from the run, PolicyBoard.create(module)",
        )

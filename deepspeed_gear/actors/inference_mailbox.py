"""The inference mailbox: places for simulators' requests, in a file of shared memory.

The file lies beside the store of a table. A place is the rows in which a simulator's trajectory
grows, and a state word:

    FREE -> IDLE -> POSTED -> TAKEN -> ANSWERED -> IDLE ...

A place that needs no answer for its next step is RESTING.

The simulator's process owns a place in all states but POSTED and TAKEN, in which the loader owns
it. So each row is written by one process at a time, and only the state word has to be published.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from deepspeed_gear.errors import NotReadyError, PeerError, StoreError, undo_on_error
from deepspeed_gear.ops.backends import Ops, load_library
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.futex_events import EVENT_WORDS, FutexEvents
from deepspeed_gear.store.memory_layout import Layout, Region, read_header, write_header
from deepspeed_gear.store.row_allocator import have_ended
from deepspeed_gear.store.shared_memory import (
    SHM,
    PeerTakenError,
    SharedMemory,
    file_path,
    opened_file,
)
from deepspeed_gear.store.store_lock import StoreLock
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import check_timeout

LOADER = 0  # index of the loader's process
CLOSED = 0  # word of `control`
SUFFIX = ".inference-"  # end of the file's name, after the name of the store
_LOOK_S = 0.1  # interval in which a waiting process checks that the others live


class PlaceState:
    """State of a place: who may write its rows.

    The order matters: from IDLE on the simulator owns the place, from RESTING on it may add a step.
    """

    FREE: Final = 0
    POSTED: Final = 1
    TAKEN: Final = 2
    IDLE: Final = 3
    RESTING: Final = 4
    ANSWERED: Final = 5


@dataclass(frozen=True)
class MailboxPlaces:
    """Description of a mailbox file: sizes and columns, before it has memory."""

    table: str
    schema: Schema
    count: int
    length: int  # steps of a trajectory for which a place has rows
    asks: tuple[str, ...]  # columns that the policy reads
    answers: tuple[str, ...]  # columns that the policy computes
    timeout_s: float  # longest wait for the lock, under which places are claimed
    library: str  # file of the native module

    def layout(self) -> Layout:
        """Return the regions of the file: words and events, then rows of the columns."""
        regions = [
            Region("control", "int64", (16,)),
            Region("events", "uint32", (1 + self.count, EVENT_WORDS)),
            Region("states", "int32", (self.count,)),
            Region("places", "int64", (4, self.count)),
        ]
        for column in self.schema:
            dtype = str(column.numpy_dtype)
            kind = "value" if column.rows == "1" else "column"
            rows = (self.count,) if kind == "value" else (self.count, self.length + 1)
            if kind == "column" or column.name in self.asks:
                regions.append(Region(f"{kind}/{column.name}", dtype, (*rows, *column.shape)))
        return Layout.of(regions, {"inference": {**vars(self), "schema": self.schema.to_json()}})


class InferenceMailbox:
    """A mailbox file as one process sees it: one thread per process, any number of processes."""

    def __init__(
        self, places: MailboxPlaces, memory: SharedMemory, ops: Ops, layout: Layout
    ) -> None:
        self.places = places
        self.memory = memory
        self.native = ops.native
        views = layout.views(memory.buffer)
        self.control: np.ndarray = views["control"]
        self.states: np.ndarray = views["states"]
        self.owners, self.rows, self.stamps, self.timesteps = views["places"]
        self.columns = {c.name: views[f"column/{c.name}"] for c in places.schema.step_columns}
        asked = [c.name for c in places.schema.trajectory_columns if c.name in places.asks]
        self.values = {name: views[f"value/{name}"] for name in asked}
        self.events = FutexEvents(views["events"], self.native)
        # There is no derived state to rebuild after an owner of the lock has died.
        self.lock = StoreLock(memory, self.native, places.timeout_s, lambda: None)
        self.name = f"the inference loader of table {places.table}"
        self._looked = 0.0

    @classmethod
    def create(
        cls, places: MailboxPlaces, table: Table, peer: int, huge_pages: bool
    ) -> InferenceMailbox:
        """Create the mailbox file of a rank, beside the store of a table, with every place free."""
        layout = places.layout()
        memory = SharedMemory.create(layout.total_bytes, LOADER, huge_pages)
        with undo_on_error(memory.close):
            mailbox = cls(places, memory, table.ops, layout)
            mailbox.lock.initialise()
            write_header(memory.buffer, layout, table.run)
            try:
                memory.link(f"{table.memory.path.name}{SUFFIX}{peer}", reaped=True)
            except FileExistsError:
                rule = "must have one inference loader at a time"
                raise StoreError(f"table {places.table}", rule, None, "close the other") from None
            return mailbox

    @classmethod
    def attach(cls, name: str) -> InferenceMailbox:
        """Attach to the mailbox file of a loader."""
        path = file_path(name)
        with opened_file(path) as fd:
            layout, _ = read_header(fd, str(path))
        for peer in range(1, int(layout.meaning["inference"]["count"]) + 1):
            try:
                memory = SharedMemory.attach(name, peer)
            except PeerTakenError:
                continue
            with undo_on_error(memory.close):
                layout, _ = read_header(memory.fd, str(memory.path))
                known = layout.meaning["inference"]
                known |= {name: tuple(known[name]) for name in ("asks", "answers")}
                places = MailboxPlaces(**{**known, "schema": Schema.from_json(known["schema"])})
                mailbox = cls(places, memory, load_library(places.library), layout)
                if not memory.is_alive(LOADER):
                    raise StoreError(mailbox.name, "must be alive", None, "start it again")
                # A place with this peer as owner is one of a dead process that had the same index,
                # and not freed yet: then the next index is tried.
                if peer not in mailbox.owners[mailbox.states != PlaceState.FREE]:
                    return mailbox
            memory.close()
        rule = "must have room for another process"
        raise StoreError(str(SHM / name), rule, None, "raise num_simulators")

    @property
    def num_taken(self) -> int:
        """Number of places that simulators have claimed."""
        return int(np.count_nonzero(self.states != PlaceState.FREE))

    def claim(self, count: int) -> np.ndarray:
        """Claim free places; if fewer than `count` are returned, none was claimed. [count]."""
        with self.lock:
            free = np.flatnonzero(self.states == PlaceState.FREE)[:count]
            if len(free) == count:
                # The owner is written before the state: `free_dead` reads it for used places.
                self.owners[free] = self.memory.peer
                self.events.fence()  # pairs with that of `free_dead`
                self.states[free] = PlaceState.IDLE
        return free

    def leave(self, places: np.ndarray) -> None:
        """Release places and detach.

        Places that the loader owns are freed by it once this process has ended.
        """
        self.states[places[self.states[places] >= PlaceState.IDLE]] = PlaceState.FREE
        self.events.notify(LOADER)
        self.close()

    def post(self, places: np.ndarray, rows: np.ndarray, timesteps: np.ndarray) -> None:
        """Post requests for the answers of some rows, whose inputs are written. [n] each, int64."""
        self.rows[places] = rows
        self.timesteps[places] = timesteps
        # Requests of one call are taken in the order of `places`.
        self.stamps[places] = time.monotonic_ns() + np.arange(len(places))
        self.events.fence()  # pairs with that of `take`
        self.states[places] = PlaceState.POSTED
        self.events.notify(LOADER)

    def are_ready(self, places: np.ndarray) -> np.ndarray:
        """Return which places have an answer or need none. [n], bool."""
        return np.asarray(self.states[places] >= PlaceState.RESTING)

    def wait(self, places: np.ndarray, least: int, timeout_s: float) -> np.ndarray:
        """Wait until at least `least` of the places are ready; return which are. [n], bool."""
        until = time.monotonic() + check_timeout("timeout_s", timeout_s)
        peer = self.memory.peer
        while True:
            # The count is read before the states: a notification after that ends the wait.
            seen = self.events.count(peer)
            ready = self.are_ready(places)
            if np.count_nonzero(ready) >= least:
                self.events.fence()  # pairs with that of `answered`
                return ready
            if self.control[CLOSED]:
                raise PeerError(self.name, "must be open", "it was closed", "attach to another one")
            if self._looks() and not self.memory.is_alive(LOADER):
                raise PeerError(
                    self.name, "must be alive", "its process has died", "start the run again"
                )
            left = until - time.monotonic()
            if left <= 0:
                remedy = (
                    "check that it iterates, raise timeout_s, or call again: the requests "
                    "stay posted"
                )
                raise NotReadyError(self.name, f"must answer within {timeout_s:g} s", None, remedy)
            self.events.wait(peer, seen, min(left, _LOOK_S))

    def _looks(self) -> bool:
        """Return whether it is time to check that the other processes live."""
        now = time.monotonic()
        if now - self._looked <= _LOOK_S:
            return False
        self._looked = now
        return True

    def take(self, most: int, timeout_s: float | None) -> np.ndarray:
        """Take the oldest requests, waiting like `InferenceLoader`; return their places, [n]."""
        begun = time.monotonic()
        while True:
            if self._looks():
                self.free_dead()
            seen = self.events.count(LOADER)
            posted = np.flatnonzero(self.states == PlaceState.POSTED)
            more_may_come = (self.states >= PlaceState.IDLE).any()
            if len(posted) >= most or (len(posted) and not more_may_come):
                break
            left = _LOOK_S
            if timeout_s is not None:
                # Counted from the begin of the wait, or from the oldest request if that is earlier.
                since = min(begun, int(self.stamps[posted].min()) * 1e-9) if len(posted) else begun
                left = since + timeout_s - time.monotonic()
            if left <= 0 or self.control[CLOSED]:
                break
            self.events.wait(LOADER, seen, min(left, _LOOK_S))
        self.events.fence()  # pairs with that of `post`
        taken = posted[np.argsort(self.stamps[posted], kind="stable")[:most]]
        self.states[taken] = PlaceState.TAKEN
        return taken

    def answered(self, places: np.ndarray) -> None:
        """Hand places with written answers back to their simulators."""
        self.events.fence()  # pairs with that of `wait`
        self.states[places] = PlaceState.ANSWERED
        for owner in set(self.owners[places].tolist()):
            self.events.notify(owner)

    def free_dead(self) -> None:
        """Free the places of ended processes and drop their open trajectories.

        It takes no lock, since a dead process may hold it.
        """
        used = np.flatnonzero(self.states != PlaceState.FREE)
        self.events.fence()  # pairs with that of `claim`
        self.states[used[have_ended(self.owners[used], self.memory)]] = PlaceState.FREE

    def end(self) -> None:
        """Mark the loader as closed, wake its simulators, unlink its file, and detach."""
        self.control[CLOSED] = 1
        for event in range(len(self.states) + 1):
            self.events.notify(event)
        if self.memory.path != SHM:
            self.memory.unlink()
        self.close()

    def close(self) -> None:
        """Detach. Safe to call twice."""
        self.memory.close()

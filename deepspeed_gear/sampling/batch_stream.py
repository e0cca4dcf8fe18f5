"""Batch stream: global batches of one purpose (train, eval), selected once per node, read by its ranks.

The first process that requests a global batch makes its selection under the store's lock; the others read it
from a ring in the store. So all ranks use one selection, and a sum tree never changes during a draw.

Where a table lies on several nodes, one process of each node makes the selections together with those of the
other nodes; the other processes of the node follow it (`follows`). If it fails, they read its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.rate_limiting import ItemsHeld, NothingToSampleError
from deepspeed_gear.sampling.samplers.base import NativeDraw
from deepspeed_gear.sampling.selection import Selection, SelectionPart, SelectionReaders
from deepspeed_gear.sampling.selector import LocalSelector, SelectionMaker
from deepspeed_gear.sampling.stream_state import TRAIN, StreamState
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.native_rows import address
from deepspeed_gear.store.records import NEVER_LATE, NOTHING, Control, Head, Peer, Position

__all__ = ["TRAIN", "BatchStream"]
_POLL_S = 100e-6
_IDLE_S, _MOST_PAUSE_S = 500e-6, 8e-3
_LISTEN_S = 0.02  # after which a wait checks whether to end
_CLEAN_S = 1.0  # how often a selection checks for dead writers


@dataclass
class _LateRanks:
    """A selection waits for ranks.

    Args:
        late: Local ranks that still read the selection in its ring entry.
        slow: Those whose priorities are not complete; neither: the leader of this node has yet to select.
        held: Number of the selection in that entry.
    """

    late: list[int]
    slow: list[int]
    held: int


@dataclass
class _FewItems:
    """A selection waits for items.

    Args:
        awaited: Count of the table's changes before the limiter was evaluated.
        alone: Whether no other process may add the items.
        empty: Why nothing can be sampled although the limiter admits it; None: the limiter does not.
    """

    awaited: int
    alone: bool
    empty: NothingToSampleError | None = None


class BatchStream:
    """A batch stream in this process.

    Process safety: `get` and `release` take the table's lock; `can_select` and `prepare` require it.

    Args:
        state: The stream's state in the store.
        selector: The items, of this store or of all nodes; None: of this store.
        check: Called while `get` waits; raises to end the wait.
        follows: Whether another process of the node makes the selections.
        num_items: Items of all nodes together; None: this store holds all.
    """

    def __init__(
        self,
        state: StreamState,
        selector: LocalSelector | None = None,
        check: Callable[[], None] = lambda: None,
        follows: bool = False,
        num_items: int | None = None,
    ) -> None:
        self.state, self.spec, self.table, self.masses = state, state.spec, state.table, state.masses
        self.selector = LocalSelector(state) if selector is None else selector
        self.follows = follows
        self._check, self._num_items = check, num_items
        self._maker = SelectionMaker(state, self.selector)
        self._words, self._control, self._heads = state.words, state.control, state.head_words
        self._released: memoryview = state.consumed.data
        self._peer, self._num_peers = self.table.memory.peer, len(state.consumed)
        self._waits: memoryview = self.table.peers[self._peer, Peer.WAITS : Peer.WAITS + 1].data
        self._timeout_s = self.table.lock.timeout_s
        self.readers = SelectionReaders(self.spec, self.table, state.consumed, self._timeout_s)
        self._limits_here = state.is_limited and state.joint_limiter is None
        self._writes_here = False  # then it must not wait for itself
        self._requested: int | None = None  # global batch that the program waits for; None: any that it gets
        self._is_online = self.table.spec.dataset is None
        self._events = None
        if self._is_online and self.spec.name == TRAIN:
            self._events = self.table.bells
        self._pause_s, self._next_cleaning = _IDLE_S, 0.0
        self._native = NativeStream.of(state)

    @property
    def num_items(self) -> int:
        """Sum of all masses over all nodes; in an evaluation pass, the number of its items."""
        return self.masses.total if self._num_items is None else self._num_items

    # ---- selections ------------------------------------------------------------------------------

    def take(self, key: int, part: int, num_parts: int) -> SelectionPart:
        """Return every num_parts-th sample of a global batch, so that no rank gets only one end of it.

        A selection that is plain is made and read by one native call; `get` makes the others, and the same.

        Args:
            key: Number of the global batch.
            part: Index of the first sample.
            num_parts: Micro batches of a global batch, over all ranks.
        Raises:
            PeerError, NotReadyError, StoreError: As `get`.
        """
        if self._native is not None and not (self._is_online and time.monotonic() > self._next_cleaning):
            found = self._native.take(key, part, num_parts)
            if found is not None:
                return found
        return self.part_of(self.get(key), part, num_parts)

    def part_of(self, selection: Selection, part: int, num_parts: int) -> SelectionPart:
        """Return every num_parts-th sample of a selection; arguments as `take`."""
        head, records = selection.head, selection.resolutions[part::num_parts]
        records = records.clone(memory_format=torch.contiguous_format)
        weights = None if self.spec.priorities is None else self.weights(head, records)
        epochs = selection.epochs[part::num_parts].clone() if self.spec.sampler.walks else None
        origins = None if selection.origins is None else selection.origins[part::num_parts].clone()
        return SelectionPart(head, records, weights, epochs, origins)

    def weights(self, head: list[int], records: torch.Tensor) -> torch.Tensor:
        """Return the PER weights of samples of a selection.

        Args:
            records: Their resolutions. [B, 8], int64, contiguous.
        Returns:
            [B], float32; all 1 where the stream has no priorities.
        """
        weights = torch.ones(records.size(0))
        if self.spec.priorities is not None:
            words = head[Head.NUMERATOR], head[Head.DIVISOR], head[Head.EXPONENT]
            self.table.ops.importance_(weights, records, *words)
        return weights

    def get(self, key: int) -> Selection:
        """Return the selection of a global batch; make it if no process has.

        Raises:
            PeerError: A living rank has not released an older selection in time.
            NotReadyError: The rate limiter admits no selection in time.
            StoreError: No item has mass, or the selection is older than the ring.
        """
        if self.state.limiter is not None:
            self.state.limiter.begin_call()
        try:
            return self._get(key)
        finally:
            self._waits[0] = 0

    def _get(self, key: int) -> Selection:
        state, entry, deadline = self.state, key % self.spec.depth, None
        while state.reports is not None and state.reports.too_early(key):  # as long as a training step takes
            self._check_going_on()
            time.sleep(_IDLE_S)
        while True:
            with self.table.lock:
                obstacle = self._obstacle(key, entry)
                if obstacle is None and not self.spec.together:
                    obstacle = self._select_here(key, entry)
                if self._heads[entry][Head.KEY] == key:
                    state.limiter_wait.end()
                    return self._read(key, entry)
            if obstacle is None:
                self._select_together(key, entry)
                continue
            self._check_going_on()
            if self.follows and state.failure is not None:
                state.failure.check(key)
            if isinstance(obstacle, _FewItems):
                self._wait_for_items(key, obstacle)
            else:
                deadline = self._wait_for_ranks(key, obstacle, deadline)

    def _obstacle(self, key: int, entry: int) -> _LateRanks | _FewItems | None:
        """Return what keeps this process from making a selection; None: nothing, or it is made already.

        Requires the lock.
        """
        state = self.state
        state.catch_up()
        held = self._heads[entry][Head.KEY]
        if held == key:
            return None
        self._check_order(key, held)
        late = self.readers.late(held)
        slow = [] if state.reports is None else state.reports.late(key)
        self.prepare(key)
        limiter = state.limiter if self._limits_here and not late else None
        if limiter is not None and not limiter.is_open(self.spec.num_samples(key), exact=False):
            return _FewItems(self._listen(), self._is_alone(key))
        return _LateRanks(late, slow, held) if late or slow or self.follows else None

    def _select_here(self, key: int, entry: int) -> _FewItems | None:
        """Make a selection of items of this store alone, unless it is made. Requires the lock."""
        if self._heads[entry][Head.KEY] == key:
            return None
        try:
            self._maker.select(key, entry)
        except NothingToSampleError as empty:
            return _FewItems(self._listen(), self._is_alone(key), empty)
        return None

    def _wait_for_ranks(self, key: int, ranks: _LateRanks, deadline: float | None) -> float | None:
        """Wait a moment for other ranks; return until when to wait on, at most, as `time.monotonic`.

        Args:
            key: Number of the global batch.
            deadline: What this has returned before; None: the wait begins.
        Raises:
            PeerError: They have not come in time.
        """
        if self.follows and self._words[Position.LIMITED]:  # the leader of this node waits for items
            if not self._is_ahead(key):
                self._waits[0] += 1
                self.state.limiter_wait.wait()
            deadline = None
        elif deadline is None:
            self.readers.wait_awake(ranks.held + 1)
            if self.state.reports is not None:
                self.state.reports.wait_awake(key)
            return time.monotonic() + self._timeout_s
        elif time.monotonic() > deadline and {*ranks.late, *ranks.slow} != {self._peer}:
            raise self._too_late(key, ranks.late, ranks.slow)  # else its own device is late
        time.sleep(_POLL_S)
        return deadline

    def request(self, key: int) -> None:
        """Record that the program waits for a global batch; a prefetch thread may `get` later ones."""
        self.state.ask(key)
        self._requested = key

    def give_up(self) -> None:
        """Withdraw this process's request; its priority updates are then due at the next selection."""
        if self.state.reports is not None:
            self.state.reports.give_up()

    def release(self, key: int) -> None:
        """Mark all selections up to `key` as released by this process."""
        self._released[self._peer] = key + 1

    def leave(self) -> None:
        """Mark this process as no reader, so that no process waits for it; until `seek`."""
        self.state.consumed[self._peer] = NEVER_LATE
        self.state.ask(NEVER_LATE)

    def can_select(self, key: int) -> bool:
        """Return whether a global batch is selected, or could be now from this store. Requires the lock."""
        self.state.catch_up()
        if self.prepare(key):
            return True
        limiter = self.state.limiter
        if limiter is None:
            return self.masses.will_have_mass()
        return limiter.is_open(self.spec.num_samples(key))

    def held_items(self, key: int) -> ItemsHeld | None:
        """Return what this store holds for a global batch; None: it needs no more. Requires the lock."""
        self.state.catch_up()
        limiter = self.state.limiter
        return None if self.prepare(key) or limiter is None else limiter.held()

    def missing_items(self, key: int, held: Sequence[ItemsHeld | None]) -> int:
        """Return how many items must be added for a global batch.

        Args:
            held: Of each store of the table, `held_items`.
        """
        limiter, known = self.state.limiter, [one for one in held if one is not None]
        if limiter is None or len(known) < len(held):
            return 0
        return limiter.missing(self.spec.num_samples(key), known)

    def prepare(self, key: int) -> bool:
        """Evict stale trajectories before a global batch; return whether it is already selected.

        From time to time, also end the open trajectories of dead writers. Requires the lock.
        """
        if key < self._words[Head.KEY]:
            return True
        if self._is_online and time.monotonic() > self._next_cleaning:
            self.table.extents.end_abandoned()
            self._next_cleaning = time.monotonic() + _CLEAN_S
        if self.state.staleness is not None and not self._control[Control.SELECTING]:
            self.masses.take_changes()
            self.state.staleness.drop(key)
        return False

    def note_writer(self) -> None:
        """Mark this process as a writer too: it must not wait for items that it would add itself."""
        self._writes_here = True
        if self.state.joint_limiter is not None:
            self._words[Position.WRITES] = 1

    def _check_order(self, key: int, held: int) -> None:
        at = self._words[Head.KEY]
        skips = key > at and not self.spec.sampler.is_pass
        if held > key or key < at or skips:
            raise StoreError(
                f"stream {self.spec.name}: global batch {key}",
                "must be the next one or in the ring of selections",
                f"the stream is at {at}",
                "ranks of a node must request the same batches in the same order",
            )

    def _check_going_on(self) -> None:
        if self.state.stop.is_set():
            rule = "it was closed while it waited"
            raise StoreError(f"stream {self.spec.name}", "must be open", None, rule)
        self._check()

    def _read(self, key: int, entry: int) -> Selection:
        state = self.state
        if (key + 1) % self._num_peers == self._peer:
            self._draw_ahead(key + 1)
        origins = None if state.origins is None else state.origins[entry]
        head: list[int] = self._heads[entry][: Head.NUM_SET].tolist()
        return Selection(key, head, *state.entries[entry], origins)

    def _draw_ahead(self, key: int) -> None:
        """Draw for the next selection, if several ranks read the stream and its ring entry is released."""
        if self._num_peers == 1 or self.spec.together or self.state.is_limited:
            return
        if self._words[Head.KEY] == key and not self.readers.late(
            self._heads[key % self.spec.depth][Head.KEY]
        ):
            self._maker.draw_ahead(key)

    def _select_together(self, key: int, entry: int) -> None:
        """Make a selection with the other nodes, without holding the lock while waiting for them."""
        self._is_ahead(key)
        with self.table.lock:
            self._control[Control.SELECTING] += 1  # its items must stay between the exchanges
        try:
            is_made = self._maker.select(key, entry)
        except Exception as error:
            with self.table.lock:
                self._heads[entry][Head.KEY] = NOTHING
            if not isinstance(error, NothingToSampleError) or self.state.joint_limiter is None:
                self._end_wait()
                if self.state.failure is not None:
                    self.state.failure.write(key, error)
                if isinstance(error, NothingToSampleError):
                    raise error.final() from None
                raise
            is_made = False  # without items on all nodes: the next attempt begins with their agreement
        finally:
            with self.table.lock:
                self._control[Control.SELECTING] -= 1
        if is_made:
            self._end_wait()
        else:
            self._wait_together()

    def _too_late(self, key: int, late: list[int], slow: list[int]) -> PeerError:
        if late:
            rule = f"find room in the ring of {self.spec.depth} selections"
            return self.readers.error(key, late, rule, "still needs an older one")
        if slow or not self.follows:
            missing = "has not requested the batch after them"
            return self.readers.error(key, slow, "have the priorities of all ranks", missing)
        return self.readers.error(key, [0], "be selected by the leader of this node", "has not done it")

    # ---- waiting for the rate limiter ------------------------------------------------------------

    def _wait_for_items(self, key: int, few: _FewItems) -> None:
        """Wait for items that a selection may sample: until a slot changes, at most `_LISTEN_S`.

        Raises:
            NotReadyError: No other process adds items, or none came in time.
            StoreError: Nothing can be sampled, and no process may attach that adds items.
        """
        limiter, wait, groups = self.state.limiter, self.state.limiter_wait, self.table.groups
        comes = groups is not None and groups.waits_for_time  # without any process that adds
        may_wait = self.state.may_wait or self._writes_here or comes
        if not self._is_ahead(key):
            if few.empty is not None and (limiter is None or not may_wait):
                raise few.empty.final()
            assert limiter is not None
            waited, waits_for_itself = wait.wait(), few.alone and not comes
            if waits_for_itself or waited > wait.timeout_s:
                wait.end()
                waited = 0.0 if waits_for_itself else waited
                with self.table.lock:
                    count = self.spec.num_samples(key)
                    raise limiter.too_late(key, count, waited, is_empty=few.empty is not None)
            self._waits[0] += 1  # a rank that is about to raise does not wait: the others get its error
        if self._events is None:
            time.sleep(_IDLE_S)
        else:
            self._events.wait(0, few.awaited, _LISTEN_S)

    def _is_ahead(self, key: int) -> bool:
        """Return whether this thread prefetches a global batch that the program has not requested yet."""
        return self.state.limiter_wait.note(self._requested is not None and key > self._requested)

    def _is_alone(self, key: int) -> bool:
        """Return whether no other process may add the items that this one waits for. Requires the lock.

        All ranks of the node are, once they wait: none of them has added since its latest look, and this one
        has evaluated the limiter under the lock.
        """
        if self._is_ahead(key) or self.state.limiter is None:
            return False
        return self._writes_here or not self.state.limiter.may_be_filled

    def _listen(self) -> int:
        """Request a wake-up at a slot's next change; return the count to wait with. Requires the lock."""
        if self._events is None:
            return 0
        self._control[Control.LISTENING] = 1
        return self._events.count(0)

    def _wait_together(self) -> None:
        """Pause before all nodes evaluate their limiter again; mark it for the node's other processes."""
        self._words[Position.LIMITED] = 1
        if not self.state.limiter_wait.is_ahead:
            self.state.limiter_wait.wait()
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _end_wait(self) -> None:
        self._words[Position.LIMITED] = 0
        self._pause_s = _IDLE_S
        self.state.limiter_wait.end()

    # ---- position --------------------------------------------------------------------------------

    @property
    def position(self) -> np.ndarray:
        """The words of `Position`, in the store. [16], int64."""
        return self.state.position


class NativeStream:
    """The native call of a batch stream. Process safety: `take` takes the table's lock.

    Args:
        state: Of the stream, for which `is_plain` holds.
    """

    def __init__(self, state: StreamState) -> None:
        table, spec, masses = state.table, state.spec, state.masses
        native = table.ops.native
        memory = table.memory
        base = address(np.frombuffer(memory.buffer, np.uint8, 1))
        words = {
            "mutex": base + MUTEX_OFFSET,
            "holder": base + HOLDER_OFFSET,
            "control": address(table.control),
            "slots": address(table.slots),
            "num_slots": len(table.slots),
            "position": address(state.position),
            "heads": address(state.heads),
            "ring": address(state.ring_words),
            "consumed": address(state.consumed),
            "last_drawn": 0 if state.last_drawn is None else address(state.last_drawn),
            "num_peers": len(state.consumed),
            "peer": memory.peer,
            "seed": spec.seed,
            "key": spec.key,
            "batch": spec.batch,
            "depth": spec.depth,
            **masses.native_words(),
        }
        timeout_s = table.lock.timeout_s
        self._stream = native.Stream(words=words, rule=spec.rule.anchors.as_list(), timeout_s=timeout_s)
        self._take, self._address = native.stream_take, self._stream.address
        self._priorities = state.priorities

    @staticmethod
    def of(state: StreamState) -> NativeStream | None:
        """Return the native call of a stream; None where Python makes its selections."""
        return NativeStream(state) if is_plain(state) else None

    def take(self, key: int, part: int, num_parts: int) -> SelectionPart | None:
        """Return every num_parts-th sample of a global batch; None: Python must make its selection.

        Args:
            key: Number of the global batch.
            part: Index of the first sample.
            num_parts: Micro batches of a global batch, over all ranks.
        """
        masses = self._priorities
        if masses is None:
            found = self._take(self._address, key, 0, 0, part, num_parts)
        else:
            alpha, beta = masses.alpha_at(key), masses.beta_at(key)
            found = self._take(self._address, key, alpha, beta, part, num_parts)
        return None if found is None else SelectionPart(*found)


def is_plain(state: StreamState) -> bool:
    """Return whether a stream draws at random from one store, without limits and counts."""
    spec, masses = state.spec, state.masses
    draws = spec.sampling.native is NativeDraw.RANDOM and not spec.sampler.walks and spec.count is None
    weighs = spec.rule.has_weights or spec.by_group or type(masses) not in (ItemMasses, PriorityMasses)
    limits = state.is_limited or state.staleness is not None or state.counts is not None
    return draws and not weighs and not limits and not spec.together

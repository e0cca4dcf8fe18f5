"""Batch stream: selects each global batch once per node, and waits for items, late ranks or nodes.

The first process that requests a batch selects it under the store's lock; the others read it from a
ring in the store, and the sum tree never changes during a draw. Where a table lies on several
nodes, one process of each selects together with the others', and its node's other processes follow
it (`follows`) or read its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from deepspeed_gear.errors import StoreError
from deepspeed_gear.sampling.batch_admission import ItemsHeld, NothingToSampleError
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.priority_log import Append
from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.samplers.base import NativeDraw
from deepspeed_gear.sampling.selection import PeerProgress, Selection
from deepspeed_gear.sampling.selection_rounds import SelectionRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.native_rows import address
from deepspeed_gear.store.records import NEVER_LATE, NOTHING, Control, Head, Peer, Position
from deepspeed_gear.store.store_lock import TURN_S

_POLL_S = 100e-6
_LEADER_FIRST = 1.25  # wait of a rank for the leader of its node, in those of the leader
_IDLE_S = 500e-6
_MOST_PAUSE_S = 8e-3
_LOOK_S = 2e-3  # least time between looks for groups of prompts: each takes the lock from workers
_LISTEN_S = 0.02  # after which a wait checks whether to end
_CLEAN_S = 1.0  # how often a selection checks for dead writers
# Regions of a stream whose addresses its native call takes under their names.
_REGIONS = (
    "position heads ring consumed last_drawn changes sums minima priorities counts window bases "
    "generations steps row_slots ends asked numbers"
).split()


# A wait of a moment for what keeps a process from selecting: takes the deadline so far, returns the
# new one.
Wait = Callable[[float | None], float | None]


class BatchStream:
    """A batch stream in this process, whose methods take the table's lock, but `prepare`, which
    requires it.

    Args:
        selector: The items, of this store or of all nodes; None: of this store.
        check: Called while `get` waits; raises to end the wait.
        follows: Whether another process of the node makes the selections.
        num_items: Items of all nodes together; None: this store holds all.
    """

    def __init__(
        self,
        state: StreamState,
        selector: Selector | None = None,
        check: Callable[[], None] = lambda: None,
        follows: bool = False,
        num_items: int | None = None,
    ) -> None:
        self.state = state
        self.spec = state.spec
        self.table = state.table
        self.masses = state.masses
        self.selector = selector or Selector(state, SelectionRounds(state))
        self.follows = follows
        self.position = state.position  # the words of `Position`, in the store. [16], int64.
        self._check = check
        self._num_items = num_items
        self._released: memoryview = state.consumed.data
        self._peer = self.table.memory.peer
        self._num_peers = len(state.consumed)
        self._waits: memoryview = self.table.peers[self._peer, Peer.WAITS : Peer.WAITS + 1].data
        self._timeout_s = self.table.lock.timeout_s
        self._releases = PeerProgress(self.spec, self.table, state.consumed)
        # Global batch that the program waits for; None: any that it gets.
        self._requested: int | None = None
        self._is_online = self.table.spec.dataset is None
        self._events = self.table.events if self._is_online and self.spec.name == TRAIN else None
        self._pause_s = _IDLE_S
        self._next_cleaning = 0.0
        self._native = NativeStream(state) if is_plain(state) else None
        if self._native is not None and state.reports is not None:
            state.reports.append_by(self._native.report)

    @property
    def num_items(self) -> int:
        """Sum of all masses over all nodes; in an evaluation pass, the number of its items."""
        return self.masses.total if self._num_items is None else self._num_items

    def take(self, number: int, part: int, num_parts: int, gather: int = 0) -> Selection:
        """Return every num_parts-th sample of a batch from `part` on, so that no rank gets only one
        end of it. One native call makes and reads a plain selection; `get`, whose errors it has,
        makes the others.

        Args:
            number: Number of the global batch.
            part: Index of the first sample.
            num_parts: Parts of the batch.
            gather: Address of a GatherCall for the samples, which the native call then gathers, as
                `Selection.is_gathered` shows; 0: none.
        """
        if self._native is not None and not (
            self._is_online and time.monotonic() > self._next_cleaning
        ):
            selection = self._native.take(number, part, num_parts, gather)
            if selection is not None:
                return selection
        return self.part_of(self.get(number), slice(part, None, num_parts))

    def part_of(
        self, selection: Selection, which: slice | torch.Tensor, of_mixture: bool = False
    ) -> Selection:
        """Return copies of samples of a selection; of a mixture with the weights and epochs that
        another table of it may have.
        """
        resolutions = selection.resolutions[which].clone(memory_format=torch.contiguous_format)
        weighs = self.spec.priorities is not None or of_mixture
        walks = self.spec.sampler.walks or of_mixture
        weights = self.weights(selection.head, resolutions) if weighs else None
        epochs = selection.epochs[which].clone() if walks and selection.epochs is not None else None
        origins = None if selection.origins is None else selection.origins[which].clone()
        return Selection(selection.head, resolutions, weights, epochs, origins)

    def weights(self, head: list[int], resolutions: torch.Tensor) -> torch.Tensor:
        """Return the PER weights of resolutions, 1 where the stream has no priorities. [B, 8],
        contiguous.
        """
        weights = torch.ones(resolutions.size(0))
        if self.spec.priorities is not None and len(weights):
            words = head[Head.NUMERATOR], head[Head.DIVISOR], head[Head.EXPONENT]
            self.table.ops.importance_(weights, resolutions, *words)
        return weights

    def get(self, number: int) -> Selection:
        """Return the selection of a global batch; make it if no process has.

        Raises:
            PeerError: A living rank has not released an older selection in time.
            NotReadyError: The rate limiter admits no selection in time.
            StoreError: No item has mass, or the selection is older than the ring.
        """
        if self.state.limiter is not None:
            self.state.limiter.begin_call()
        try:
            return self._get(number)
        finally:
            self._waits[0] = 0

    def _get(self, number: int) -> Selection:
        state = self.state
        entry = number % self.spec.depth
        deadline = None
        # Another thread requests it: this may take as long as a training step.
        while state.reports is not None and state.reports.too_early(number):
            self._check_going_on()
            time.sleep(_IDLE_S)
        while True:
            with self.table.lock:
                obstacle = self._obstacle(number, entry)
                if obstacle is None and not self.spec.together:
                    obstacle = self._select_alone(number, entry)
                if self.state.head_words[entry][Head.NUMBER] == number:
                    state.limiter_wait.end()
                    return self._read(number, entry)
            if obstacle is None:
                self._select_together(number, entry)
                continue
            self._check_going_on()
            if self.follows and state.failure is not None:
                state.failure.check(number)
            deadline = obstacle(deadline)

    def _obstacle(self, number: int, entry: int) -> Wait | None:
        """Return the wait for what keeps this process from selecting; None: nothing does, or it is
        selected. Requires the lock.
        """
        state = self.state
        state.catch_up()
        held = self.state.head_words[entry][Head.NUMBER]
        if held == number:
            return None
        at = self.state.words[Head.NUMBER]
        skips = number > at and not self.spec.sampler.is_pass
        if held > number or number < at or skips:
            name = f"stream {self.spec.name}: global batch {number}"
            rule = "must be the next one or in the ring"
            remedy = "ranks of a node must request the same batches in the same order"
            raise StoreError(name, f"{rule} of selections", f"the stream is at {at}", remedy)
        late = self._releases.lagging(held + 1)  # none for an empty entry, whose number is -1
        slow = [] if state.reports is None else state.reports.late(number)
        self.prepare(number)
        waits = late or slow or self.follows
        return partial(self._wait_for_ranks, number, late, slow, held) if waits else None

    def _wait_for_ranks(
        self, number: int, late: list[int], slow: list[int], held: int, deadline: float | None
    ) -> float | None:
        """Wait for local ranks that still read the selection `held` in the ring entry (`late`), or
        whose priorities are not complete (`slow`); for none: the leader of this node has yet to
        select.
        """
        # The leader of this node waits for items, for which the limit is the rate limiter's.
        if self.follows and self.state.words[Position.LIMITED]:
            if not self._is_ahead(number):
                self._waits[0] += 1
                self.state.limiter_wait.wait()
            deadline = None
        elif deadline is None:
            self._releases.wait_awake(held + 1)
            if self.state.reports is not None:
                self.state.reports.wait_awake(number)
            # A leader that waits for another node as long names that node first.
            return time.monotonic() + self._timeout_s * (_LEADER_FIRST if self.follows else 1)
        # Where this process alone is late, it waits for its own device.
        elif time.monotonic() > deadline and {*late, *slow} != {self._peer}:
            if late:
                rule = f"find room in the ring of {self.spec.depth} selections"
                raise self._releases.error(number, late, rule, "still needs an older one")
            if slow or not self.follows:
                missing = "has not requested the batch after them"
                raise self._releases.error(
                    number, slow, "have the priorities of all ranks", missing
                )
            rule = "be selected by the leader of this node"
            raise self._releases.error(number, [0], rule, "has not done it")
        time.sleep(_POLL_S)
        return deadline

    def request(self, number: int) -> None:
        """Record that the program waits for a global batch; a prefetch thread may `get`
        later ones.
        """
        self.state.ask(number)
        self._requested = number

    def withdraw(self) -> None:
        """Take back this process's request of a batch that is not ready; it is requested again
        later.
        """
        reports = self.state.reports
        number = self._requested
        if reports is not None and number is not None:
            # It may be made by now, or another process makes it with other nodes.
            reports.withdraw(
                lambda: (
                    self.state.words[Head.NUMBER] > number
                    or bool(self.state.control[Control.SELECTING])
                )
            )

    def give_up(self) -> None:
        """Withdraw this process's request; its priority updates are then due at the
        next selection.
        """
        if self.state.reports is not None:
            self.state.reports.give_up()

    def release(self, number: int) -> None:
        """Mark all selections up to `number` as released by this process."""
        self._released[self._peer] = number + 1

    def leave(self) -> None:
        """Mark this process as no reader, so that no process waits for it; until `seek`."""
        self.state.consumed[self._peer] = NEVER_LATE
        self.state.ask(NEVER_LATE)

    def can_select(self, number: int) -> bool:
        """Return whether a global batch is selected, or could be now from this store."""
        limiter = self.state.limiter
        with self.table.lock:
            self.state.catch_up()
            if self.prepare(number) or self.spec.is_optional:
                return True
            if limiter is None:
                return self.masses.will_have_mass()
            return limiter.is_open(self.spec.num_samples(number))

    def held_items(self, number: int) -> ItemsHeld | None:
        """Return what this store holds for a global batch; None: it needs no more."""
        limiter = self.state.limiter
        with self.table.lock:
            self.state.catch_up()
            return None if self.prepare(number) or limiter is None else limiter.held()

    def missing_items(self, number: int, held: Sequence[ItemsHeld | None]) -> int:
        """Return how many items must be added for a global batch, given `held_items` of
        each store.
        """
        limiter = self.state.limiter
        known = [one for one in held if one is not None]
        if limiter is None or len(known) < len(held):
            return 0
        return limiter.missing(self.spec.num_samples(number), known)

    def prepare(self, number: int) -> bool:
        """Evict stale trajectories; return whether a batch is selected already.
        Requires the lock.
        """
        if number < self.state.words[Head.NUMBER]:
            return True
        ledger = self.table.ledger
        has_kept = isinstance(ledger, KeptLedger) and ledger.has_groups
        if self._is_online and (has_kept or time.monotonic() > self._next_cleaning):
            self.table.extents.end_abandoned()
            if ledger is not None:
                ledger.update()  # also holds the kept groups that are admitted by now
            self._next_cleaning = time.monotonic() + _CLEAN_S
        if self.state.staleness is not None and not self.state.control[Control.SELECTING]:
            self.masses.take_changes()
            self.state.staleness.drop(number)
        return False

    def note_writer(self) -> None:
        """Note that this process writes too: it must not wait for items that only it adds."""
        if self.state.limiter is not None:
            self.state.limiter.note_writer()

    def _check_going_on(self) -> None:
        if self.state.stop.is_set():
            remedy = "it was closed while it waited"
            raise StoreError(f"stream {self.spec.name}", "must be open", None, remedy)
        self._check()

    def _read(self, number: int, entry: int) -> Selection:
        state = self.state
        turn = (number + 1) % self._num_peers == self._peer
        follows = self.state.words[Head.NUMBER] == number + 1
        shared = self._num_peers > 1 and not self.spec.together and not state.is_limited
        # Several ranks read the stream: draw for the next selection, if its ring entry is released.
        if turn and shared and follows:
            held = self.state.head_words[(number + 1) % self.spec.depth][Head.NUMBER]
            if not self._releases.lagging(held + 1):
                self.selector.draw_ahead(number + 1)
        origins = None if state.origins is None else state.origins[entry]
        head: list[int] = self.state.head_words[entry][: Head.NUM_SET].tolist()
        resolutions, epochs = state.entries[entry]
        return Selection(head, resolutions, None, epochs, origins)

    def _select_alone(self, number: int, entry: int) -> Wait | None:
        """Make a selection from this store if no process has; return the wait for items if it has
        too few. Requires the lock.
        """
        if self.state.head_words[entry][Head.NUMBER] == number:
            return None
        empty = None
        try:
            if self.selector.select(number, entry):
                return None
        except NothingToSampleError as error:
            empty = error
        return self._few_items(number, empty)

    def _select_together(self, number: int, entry: int) -> None:
        """Make a selection with the other nodes, without holding the lock while waiting
        for them.
        """
        self._is_ahead(number)
        with self.table.lock:
            self.state.control[Control.SELECTING] += 1  # its items must stay between the rounds
        try:
            is_made = self.selector.select(number, entry)
        except Exception as error:
            with self.table.lock:
                self.state.head_words[entry][Head.NUMBER] = NOTHING
            if not isinstance(error, NothingToSampleError) or self.state.joint_limiter is None:
                self._end_wait()
                if self.state.failure is not None:
                    self.state.failure.write(number, error)
                if isinstance(error, NothingToSampleError):
                    raise error.final() from None
                raise
            # Without items on all nodes: the next attempt begins with a round of theirs.
            is_made = False
            self.state.joint_limiter.note_empty()
        finally:
            with self.table.lock:
                self.state.control[Control.SELECTING] -= 1
        if is_made:
            self._end_wait()
            return
        # The node's other processes read it; then all nodes try again.
        self.state.words[Position.LIMITED] = 1
        if not self.state.limiter_wait.is_ahead:
            self.state.limiter_wait.wait()
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _wait_for_items(self, awaited: int, deadline: float | None) -> float | None:
        """Wait until a slot changes, at most `_LISTEN_S`. `awaited`: count of the table's changes
        when the limiter was evaluated.
        """
        if self._events is None:
            time.sleep(_IDLE_S)
        else:
            self._events.wait(0, awaited, _LISTEN_S)
        if self.table.ledger is not None:
            time.sleep(_LOOK_S)
        return deadline

    def _is_ahead(self, number: int) -> bool:
        """Return whether this thread prefetches a global batch that the program has not requested
        yet.
        """
        return self.state.limiter_wait.note(
            self._requested is not None and number > self._requested
        )

    def _few_items(self, number: int, empty: NothingToSampleError | None) -> Wait:
        """Return the wait for items, and request a wake-up at a slot's next change. `empty`: why
        the limiter's items cannot be sampled; None: it admits none. Requires the lock.

        Raises:
            NotReadyError: The wait has lasted too long, or no other process may add items: this one
                writes, or all ranks of the node wait, none of which has added since its latest
                look; this one has evaluated the limiter under the lock.
            StoreError: This stream does not wait for items.
        """
        limiter = self.state.limiter
        if not self._is_ahead(number):
            groups = self.table.groups
            comes = groups is not None and groups.waits_for_time  # without any process that adds
            if empty is not None:
                if limiter is None or not (self.state.may_wait or limiter.writes_here or comes):
                    raise empty.final()
                limiter.note_empty()
            assert limiter is not None
            self.state.limiter_wait.wait()
            count = self.spec.num_samples(number)
            error = limiter.given_up(limiter.waiting_rate(count), number, count)
            if error is not None:
                self.state.limiter_wait.end()
                raise error
            # A rank that is about to raise does not wait: the others get its error.
            self._waits[0] += 1
        awaited = 0
        if self._events is not None:
            self.state.control[Control.LISTENING] = 1
            awaited = self._events.count(0)
        return partial(self._wait_for_items, awaited)

    def _end_wait(self) -> None:
        self.state.words[Position.LIMITED] = 0
        self._pause_s = _IDLE_S
        self.state.limiter_wait.end()


class NativeStream:
    """The native call of a batch stream that `is_plain`. Process safety: `take` takes the table's
    lock.
    """

    def __init__(self, state: StreamState) -> None:
        table = state.table
        spec = state.spec
        masses = state.masses
        native = table.ops.native
        memory = table.memory
        views = table.views
        base = address(np.frombuffer(memory.buffer, np.uint8, 1))
        # Words of addresses, by region; one that the stream has none of is 0.
        regions = {name: name for name in ("control", "slots", "log", "moments_head", "moments")}
        regions.update({name: spec.at + name for name in _REGIONS}, logs=f"{spec.at}log")
        words = {
            **{name: address(views[at]) if at in views else 0 for name, at in regions.items()},
            "mutex": base + MUTEX_OFFSET,
            "holder": base + HOLDER_OFFSET,
            "num_slots": len(table.slots),
            "log_size": len(views.get("log", ())),
            "num_peers": len(state.consumed),
            "peer": memory.peer,
            "seed": spec.seed,
            "random_key": spec.random_key,
            "batch": spec.batch,
            "depth": spec.depth,
            "parts_ahead": table.parts_ahead,
            "moments_size": 0 if state.numbers is None else state.numbers[0].size,
            **masses.native_words(),
        }
        self._stream = native.Stream(
            words=words, rule=spec.rule.anchors.as_list(), timeout_s=TURN_S
        )
        self._take = native.stream_take
        self._address = self._stream.address
        #: Appends priorities to this process's log: an `Append` of the priority log.
        self.report: Append = partial(native.stream_report, self._address)
        self._priorities = state.priorities

    def take(self, number: int, part: int, num_parts: int, gather: int) -> Selection | None:
        """Return a part of a global batch, as `BatchStream.take`; None: Python must make its
        selection.
        """
        alpha = 0
        beta = 0
        masses = self._priorities
        if masses is not None:
            alpha = masses.alpha_at(number)
            beta = masses.beta_at(number)
        taken = self._take(self._address, number, alpha, beta, part, num_parts, gather)
        if taken is None:
            return None
        head, resolutions, weights = taken
        return Selection(head, resolutions, weights, None, None, gather != 0)


def is_plain(state: StreamState) -> bool:
    """Return whether a stream draws at random from one store, without limits and counts."""
    spec = state.spec
    masses = state.masses
    draws = (
        spec.sampling.native is NativeDraw.RANDOM and not spec.sampler.walks and spec.count is None
    )
    weighs = (
        spec.rule.has_weights or spec.by_group or type(masses) not in (ItemMasses, PriorityMasses)
    )
    weighs |= spec.priorities is not None and spec.priorities.decay is not None
    limits = state.is_limited or state.staleness is not None or state.counts is not None
    return draws and not weighs and not limits and not spec.together

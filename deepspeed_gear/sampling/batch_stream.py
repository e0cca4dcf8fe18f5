"""A stream: the global batches of one purpose (train, eval), cut once per node and read by all its ranks.

Everything lies in the store: the tree of masses, the changes that wait for a cut, the position, and a ring
of the latest cuts with what their draws resolved to. Whoever first asks for a global batch makes its cut,
under the store's lock; the others read the result. So all ranks use one resolution, and a tree never
changes under a draw.

Order of a cut, so that a process may die at any instruction: queued masses go into the tree (repeatable),
the draws into a ring entry that is marked empty, then the entry's key (the commit point), then the
position.

Ranks that sample side by side would wait for each other's cuts in every step. So they draw ahead for the
next cut, in turn, as long as nothing has changed: Position.AHEAD is the global batch whose draws lie in its
ring entry already. Any change forgets them; the cut itself is made by whoever asks for it, as ever.

Where a table lies on several nodes, one process of each node makes the cuts together with those of the other
nodes (`selector`); the others of the node follow it. If it cannot make one, they read why in a notice.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import torch

from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.global_rate_gate import GlobalRateGate
from deepspeed_gear.sampling.local_selector import GateClosedError, LocalSelector
from deepspeed_gear.sampling.rate_gate import EmptyError, GateWait, RateGate
from deepspeed_gear.sampling.rate_waiting import IDLE_S, Gated
from deepspeed_gear.sampling.sample_counts import SampleCounts
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.sampling.selecting import Drawing
from deepspeed_gear.sampling.selection import Selection, StreamSpec
from deepspeed_gear.sampling.selection_failure import SelectionFailure
from deepspeed_gear.sampling.selection_readers import SelectionReaders
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.sampling.stream_kinds import DRAWS, ORDERS, masses_of
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.stream_records import NEVER_LATE, NOTHING, Head, Position
from deepspeed_gear.store.table import Table

_POLL_S = 100e-6
TRAIN = "train"
_AFTER_KEY = struct.Struct(f"={Head.NUM_SET - 1}q")


class BatchStream(Drawing, Gated):
    """A stream in this process.

    Process safety: `cut` and `queue` want the table's lock; `take` and `consume` take it themselves.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self.spec, self.table, self.ops = spec, table, table.ops
        views = table.views
        self.masses = masses_of(spec)(spec, table)
        self.selector = LocalSelector(spec, self.masses)  # where several nodes hold the table: theirs
        self.notice = SelectionFailure(spec, table) if spec.together else None
        self.num_items_of_all: int | None = None  # where several nodes hold a data set
        self.follows = False  # another process of the node makes the cuts
        self.draws = SampleCounts(spec, table) if spec.count_draws else None
        self.position: np.ndarray = views[spec.at + "position"]
        self.consumed: np.ndarray = views[spec.at + "consumed"]
        self.heads: np.ndarray = views[spec.at + "heads"]
        self._ring_words: np.ndarray = views[spec.at + "ring"]
        self.ring = torch.from_numpy(self._ring_words)
        self.epochs = torch.from_numpy(views[spec.at + "epochs"])
        # Words one by one: behind a batch that has emptied the caches, a NumPy call takes 10 us and more.
        self._words: memoryview = self.position.data
        self._control: memoryview = table.control.data
        self._heads: list[memoryview] = [head.data for head in self.heads]
        self._entries = list(zip(self.ring, self.epochs, strict=True))
        self.origins = torch.from_numpy(views[spec.at + "origins"]) if spec.num_shards > 1 else None
        self._drawn_masses = [entry[:, Resolution.MASS] for entry in self._ring_words]
        self._coordinates = torch.empty(spec.batch, dtype=torch.int64)
        self._consumed_words: memoryview = self.consumed.data
        self._peer, self._num_peers = table.memory.peer, len(self.consumed)
        on_line = table.spec.dataset is None
        self.last_drawn: np.ndarray | None = views.get(spec.at + "last_drawn")  # cut of each slot
        self.has_item_masses = spec.priorities is not None or spec.rule.has_weights
        self.has_unit_masses = spec.rule.unit == "step" and not self.has_item_masses
        self._is_online, self._look_again = on_line, 0.0
        trains = spec.name == TRAIN and on_line
        staleness = Staleness(table) if trains else None
        self._staleness = staleness if staleness is not None and staleness.is_limited else None
        if self.draws is not None or self._staleness is not None:
            self.masses.on_change = self._note_new
        gate = RateGate(spec, table, self.masses, self.position) if trains else None
        self._gate, self._is_limited = gate, gate is not None and not gate.is_plain
        self._bells = None if not trains or table.ops.native is None else table.bells
        self.gate_wait = GateWait()
        self.joint = None
        if self._gate is not None and self.is_gated and spec.num_shards > 1:
            self.joint = GlobalRateGate(table, self._gate, self.position, self.gate_wait)
        self._pause_s = IDLE_S
        self.collects_here = False
        self.stopped = False  # set by another thread: ends a wait of `take`
        self.check: Callable[[], None] = lambda: None  # called while `take` waits: raises to end it
        self._timeout_s = table.lock.timeout_s
        self.peers = SelectionReaders(spec, table, self.consumed, self._timeout_s)
        table.on_recover(self._recover)

    @property
    def num_items(self) -> int:
        """Sum of all masses, all nodes together: of a pass, its items."""
        return self.masses.total if self.num_items_of_all is None else self.num_items_of_all

    # ---- changes ---------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Set masses and position in new memory, before it is linked."""
        self.heads[:, Head.KEY] = self.position[Position.AHEAD] = NOTHING
        if self.last_drawn is not None:
            self.last_drawn[:] = NOTHING
        self.masses.initialise()

    def _recover(self) -> None:
        """Make the stream whole after a process died inside the store."""
        self.position[Position.AHEAD] = NOTHING
        self.position[Position.RECOVERED] = self.table.control[Control.RECOVERIES]
        if self._gate is not None and self._gate.most:
            self._gate.retire_used_up()
        self.masses.recover()
        newest = int(self.heads[:, Head.KEY].argmax())
        if (
            self.heads[newest, Head.KEY] >= self.position[Head.KEY]
            and self.heads[newest, Head.KEY] != NOTHING
        ):
            self._advance(newest)

    def catch_up(self) -> None:
        """Make the stream whole if a process without streams has found a dead one. Wants the lock."""
        if self._words[Position.RECOVERED] != self._control[Control.RECOVERIES]:
            self._recover()

    # ---- cuts ------------------------------------------------------------------------------------

    def take(self, key: int) -> Selection:
        """Return the cut of a global batch; make it if nobody has.

        Raises:
            PeerError: A living rank has not consumed an older cut in time.
            StoreError: No item has mass, or the cut is older than the ring.
        """
        until = None
        entry, heard = key % self.spec.depth, 0
        while self.masses.too_early(key):  # a thread that prepares ahead: as long as a training step takes
            self._check_going_on()
            time.sleep(IDLE_S)
        while True:
            with self.table.lock:
                self.catch_up()
                held, at = self._heads[entry][Head.KEY], self._words[Head.KEY]
                if held == key:
                    self.gate_wait.end()
                    return self._seen(key, entry)
                skips = key > at and self.spec.kind != "pass"
                if held > key or key < at or skips:
                    raise StoreError(
                        f"stream {self.spec.name}: global batch {key}",
                        "must be the next one or in the ring of cuts",
                        f"the stream is at {at}",
                        "ranks of a node must ask for the same batches in the same order",
                    )
                late, slow = self.peers.late(held), self.masses.late(key)
                self.prepare(key)
                alone = self._gate if self._is_limited and self.joint is None else None
                closed = alone is not None and not late and not alone.is_open(self.count_of(key), False)
                if closed:
                    heard = self._listen()
                ready = not late and not slow and not closed and not self.follows
                empty = None
                if ready and self.selector.in_store:
                    try:
                        self._cut(key, entry)
                        self.gate_wait.end()
                        return self._seen(key, entry)
                    except EmptyError as error:
                        empty, heard = error, self._listen()
            if ready and empty is None:
                self._cut_together(key, entry)
                continue
            self._check_going_on()
            if self.follows and self.notice is not None:
                self.notice.check(key)
            if closed or empty is not None:
                self._wait_for_gate(key, heard, empty)
                continue
            if self.follows and self._words[Position.LIMITED]:  # the first rank of this node waits
                until = None
                self.gate_wait.wait()
            elif until is None:
                until = time.monotonic() + self._timeout_s
                self.peers.wait_awake(held + 1)
                self.masses.wait_awake(key)
                continue
            elif time.monotonic() > until and {*late, *slow} != {self._peer}:  # its own device will get there
                raise self._too_late(key, late, slow)
            time.sleep(_POLL_S)

    def may_cut(self, key: int) -> bool:
        """Return whether a global batch has been cut, or could be cut now from this store. Wants the lock."""
        self.catch_up()
        if self.prepare(key):
            return True
        gate = self._gate
        return self.masses.will_have_mass() if gate is None else gate.is_open(self.count_of(key))

    def _note_new(self, slots: np.ndarray) -> None:
        """Take note of slots that hold something new."""
        if self.draws is not None:
            self.draws.forget(slots)
        if self._staleness is not None:
            self._staleness.note_versions(slots)

    def _check_going_on(self) -> None:
        if self.stopped:
            raise StoreError(
                f"stream {self.spec.name}", "must be open", None, "it was closed while it waited"
            )
        self.check()

    def _cut_together(self, key: int, entry: int) -> None:
        with self.table.lock:
            self._control[Control.SELECTING] += (
                1  # what is drawn from must stay between the exchanges of the cut
            )
        is_closed = False
        try:
            self._cut(key, entry)
        except GateClosedError:
            is_closed = True
        except EmptyError as empty:  # on all nodes: the next cut begins with what they agree on
            is_closed = self.joint is not None
            self._forget(entry)
            if not is_closed:
                self._end_wait()
                self.selector.fail(key, empty.error)
                raise empty.error from None
        except Exception as error:
            self._end_wait()
            self._forget(entry)
            self.selector.fail(key, error)
            raise
        finally:
            with self.table.lock:
                self._control[Control.SELECTING] -= 1
        if is_closed:
            self._wait_together()
        else:
            self._end_wait()

    def _forget(self, entry: int) -> None:
        with self.table.lock:
            self._heads[entry][Head.KEY] = NOTHING

    def _too_late(self, key: int, late: list[int], slow: list[int]) -> PeerError:
        if late:
            room = f"find room in the ring of {self.spec.depth} cuts"
            return self.peers.error(key, late, room, "still needs an older one")
        if slow or not self.follows:
            missing = "has not asked for the batch behind them"
            return self.peers.error(key, slow, "have the priorities of all ranks", missing)
        return self.peers.error(key, [0], "be made by the first rank of this node", "has not made it")

    def _seen(self, key: int, entry: int) -> Selection:
        if (key + 1) % self._num_peers == self._peer:
            self._draw_ahead(key + 1)
        origins = None if self.origins is None else self.origins[entry]
        return Selection(key, self._heads[entry][: Head.NUM_SET].tolist(), *self._entries[entry], origins)

    def consume(self, key: int) -> None:
        """Say that this process has copied what it needs of all cuts up to `key`."""
        self._consumed_words[self._peer] = key + 1

    def leave(self) -> None:
        """Say that this process reads nothing: nobody waits for it. `seek` forgets it."""
        self.consumed[self._peer] = NEVER_LATE
        self.masses.ask(NEVER_LATE)

    def _cut(self, key: int, entry: int) -> None:
        rows, count = self._rows(key, entry)
        head = self._heads[entry]
        head[Head.KEY] = NOTHING
        after: list[int] = self._words[: Head.NUM_SET].tolist()
        self._begin(key, after)
        selector = self.selector
        selector.begin(key, entry, count, self._check_going_on)
        if self.spec.kind in ORDERS:
            self._walk(key, rows, self._entries[entry][1], torch.empty(count, dtype=torch.int64), after)
        elif count:
            is_ahead = self._words[Position.AHEAD] == key and not self.masses.waiting
            after[Head.TOTAL] = self._checked(selector.apply(key))
            if self.spec.kind not in DRAWS:
                self._take_first(rows, after[Head.SAMPLES])
            elif self._gate is not None and self._gate.most:
                self._draw_limited(rows, after[Head.SAMPLES])
            elif not is_ahead:
                self._draw(rows, count, after[Head.SAMPLES], after[Head.TOTAL])
            if selector.in_store:
                self.pin(key, rows)
        selector.finish()
        if count and isinstance(self.masses, PriorityMasses):
            masses = self._drawn_masses[entry]
            after[Head.NUMERATOR : Head.EXPONENT + 1] = selector.weigh(key, masses[:count], after[Head.TOTAL])
        after[Head.KEY], after[Head.COUNT] = key + 1, count
        after[Head.SAMPLES] += count
        if selector.in_store:
            self._commit(key, entry, after)
        else:
            with self.table.lock:
                self._commit(key, entry, after)

    def _commit(self, key: int, entry: int, after: list[int]) -> None:
        head = self._heads[entry]
        _AFTER_KEY.pack_into(head, head.itemsize, *after[1:])
        counts = self._gate is not None and self._gate.most > 0
        if counts and self._gate is not None:
            self._gate.count(self.selector.drawn(self._ring_words[entry, : after[Head.COUNT]]))
        head[Head.KEY] = key  # the commit point
        self._advance(entry)
        if counts and self._gate is not None:
            self._gate.retire_used_up()
        if self.draws is not None and self.selector.counts_draws:
            self.draws.count(self._ring_words[entry, : after[Head.COUNT]])

    def _rows(self, key: int, entry: int) -> tuple[torch.Tensor, int]:
        """Return the part of a ring entry that a cut fills, and its number of samples."""
        rows = self._entries[entry][0]
        count = self.count_of(key)
        return (rows if count == self.spec.batch else rows[:count]), count

    def _draw_ahead(self, key: int) -> None:
        """Draw for the next cut, where several ranks want it and nothing is known that comes before it."""
        words, entry = self._words, key % self.spec.depth
        if self._num_peers == 1 or self.spec.kind not in DRAWS or words[Head.KEY] != key:
            return
        if not self.selector.in_store or self.follows or self._is_limited:
            return
        if self.spec.count is not None:  # which may fail, or be 0, and is not this batch's business
            return
        if (
            words[Position.AHEAD] == key
            or self.masses.waiting
            or self.peers.late(self._heads[entry][Head.KEY])
        ):
            return
        self._heads[entry][Head.KEY] = NOTHING
        total = self.masses.total
        if total:
            self._draw(*self._rows(key, entry), words[Head.SAMPLES], total)
            words[Position.AHEAD] = key

    def _advance(self, entry: int) -> None:
        head = self._heads[entry]
        self._words[1 : Head.NUM_SET] = head[1 : Head.NUM_SET]
        self._words[Position.DONE] = 0
        self._words[Head.KEY] = head[Head.KEY] + 1

    def restart(self) -> None:
        """Let changes that wait for the end of an epoch take effect at the next cut. Wants the lock."""
        if self.spec.kind == "epoch" and self.position[Head.EPOCH_SIZE]:
            self.position[Head.EPOCH] += 1
            self.position[Position.DONE] = 0
            self.position[Head.EPOCH_FIRST], self.position[Head.EPOCH_SIZE] = self.position[Head.SAMPLES], 0

    # ---- position --------------------------------------------------------------------------------

    def seek(self, key: int, samples: int, epoch: int, epoch_first: int, epoch_size: int) -> None:
        """Continue at a global batch. Wants the lock."""
        self._control[Control.QUOTA] = 0  # until the nodes have agreed on how far writers may go from there
        self.heads[:, Head.KEY] = NOTHING
        if self.last_drawn is not None:
            self.last_drawn[:] = NOTHING
        self.consumed[:] = key
        self.masses.restart(key)
        self.position[Position.DONE], self.position[Position.AHEAD] = 0, NOTHING
        words = [Head.KEY, Head.SAMPLES, Head.EPOCH, Head.EPOCH_FIRST, Head.EPOCH_SIZE, Head.TOTAL]
        self.position[words] = (key, samples, epoch, epoch_first, epoch_size, epoch_size)

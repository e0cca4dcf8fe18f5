"""A stream: the global batches of one purpose (train, eval), cut once per node and read by all its ranks.

Everything lies in the store: the tree of masses, the changes that wait for a cut, the position, and a ring
of the latest cuts with what their draws resolved to. Whoever first asks for a global batch makes its cut,
under the store's lock; the others read the result. So all ranks use one resolution, and a tree never
changes under a draw.

Order of a cut, so that a process may die at any instruction: queued masses go into the tree (repeatable),
the draws into a ring entry that is marked empty, then the entry's key (the commit point), then the
position.

Ranks that sample side by side would wait for each other's cuts in every step. So they draw ahead for the
next cut, in turn, as long as nothing has changed: AHEAD names the global batch whose draws lie in its ring
entry already. Any change forgets them; the cut itself is made by whoever asks for it, as ever.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.constants import R_FIRST_ROW, R_SLOT
from deepspeed_gear.selection.cut import (
    AHEAD,
    APPLYING,
    COUNT,
    DONE,
    EPOCH,
    EPOCH_FIRST,
    EPOCH_SIZE,
    FAN_OUT,
    FILLERS,
    KEY,
    NOTHING,
    NUM_DIRTY,
    PASS_SHIFT,
    SAMPLES,
    TOTAL,
    Cut,
    StreamSpec,
)
from deepspeed_gear.selection.peers import Peers
from deepspeed_gear.selection.rules import UNIT_CODES
from deepspeed_gear.store.table import COMMITTED, FIRST_ROW, ID, NUM_STEPS, STATE, Table

_POLL_S = 100e-6


class Stream:
    """A stream in this process.

    Process safety: `cut` and `queue` want the table's lock; `take` and `consume` take it themselves.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self.spec, self.table, self.ops = spec, table, table.ops
        at = f"stream/{spec.name}/"
        views = table.views
        self.position: np.ndarray = views[at + "position"]
        self.consumed: np.ndarray = views[at + "consumed"]
        self.heads: np.ndarray = views[at + "heads"]
        self._queued: np.ndarray = views[at + "queued"]
        self._dirty: np.ndarray = views[at + "dirty"]
        self._sums = torch.from_numpy(views[at + "sums"])
        self._leaves: np.ndarray = views[at + "sums"][: len(table.slots)]
        self._top: np.ndarray = views[at + "sums"][-FAN_OUT:]  # the last level is one node's children
        self._ring = torch.from_numpy(views[at + "ring"])
        self._epochs = torch.from_numpy(views[at + "epochs"])
        self._slots = torch.from_numpy(table.slots)
        self._rule_words = spec.rule.anchors.as_list()
        self._unit = UNIT_CODES[spec.rule.unit]
        self._peer = table.memory.peer
        self.stopped = False  # set by another thread: ends a wait of `take`
        self._timeout_s = table.lock.timeout_s
        self.peers = Peers(spec, table, self.consumed, self._timeout_s)
        table.on_recover(self._recover)

    # ---- changes ---------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Set masses and position in new memory, before it is linked."""
        self.heads[:, KEY] = self.position[AHEAD] = NOTHING
        slots = np.nonzero(self.table.slots[:, STATE] == COMMITTED)[0]
        self._leaves[slots] = self.masses(slots)
        self.ops.tree_build_(self._sums, len(self.table.slots))
        self._queued[:] = NOTHING

    def masses(self, slots: np.ndarray) -> np.ndarray:
        """Return the masses that the rule gives to committed slots. [n] -> [n], int64."""
        records = self.table.slots[slots]
        return self.spec.rule.masses(
            records[:, ID], records[:, NUM_STEPS], lambda name: self.table.values(name, slots)
        )

    def queue(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Queue changes for the next cut; the last one of a slot wins. Wants the lock."""
        self.position[AHEAD] = NOTHING
        for slot, mass in zip(slots.tolist(), masses.tolist(), strict=True):
            if self._queued[slot] == NOTHING:
                count = self.position[NUM_DIRTY]
                self._dirty[count] = slot
                self._queued[slot] = mass
                self.position[NUM_DIRTY] = count + 1
            else:
                self._queued[slot] = mass

    def _apply(self) -> None:
        count = int(self.position[NUM_DIRTY])
        if count == 0:
            return
        dirty = self._dirty[:count]
        self.position[APPLYING] = 1
        masses = self._queued[dirty]
        self.ops.tree_update_(
            self._sums, len(self.table.slots), torch.from_numpy(dirty), torch.from_numpy(masses)
        )
        self._queued[dirty] = NOTHING
        self.position[NUM_DIRTY] = 0
        self.position[APPLYING] = 0

    def _recover(self) -> None:
        """Make the stream whole after a process died inside it."""
        slots = self.table.slots
        self.position[AHEAD] = NOTHING
        if self.position[APPLYING]:  # every leaf of the queue is old or new: finish the application
            waiting = np.nonzero(self._queued != NOTHING)[0]
            self._leaves[waiting] = self._queued[waiting]
            self._queued[waiting] = NOTHING
            self.position[NUM_DIRTY] = self.position[APPLYING] = 0
        else:
            waiting = np.nonzero(self._queued != NOTHING)[0]
            self._dirty[: len(waiting)] = waiting
            self.position[NUM_DIRTY] = len(waiting)
        # A slot that was committed or retired without its change being queued: the slot table is the truth.
        effective = np.where(self._queued != NOTHING, self._queued, self._leaves)
        committed = np.nonzero(slots[:, STATE] == COMMITTED)[0]
        wanted = np.zeros(len(slots), np.int64)
        wanted[committed] = self.masses(committed)
        missed = np.nonzero(effective != wanted)[0]
        self.queue(missed, wanted[missed])
        self.ops.tree_build_(self._sums, len(slots))
        newest = int(self.heads[:, KEY].argmax())
        if self.heads[newest, KEY] >= self.position[KEY] and self.heads[newest, KEY] != NOTHING:
            self._advance(self.heads[newest])

    # ---- cuts ------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Sum of all masses in the tree."""
        return sum(self._top.tolist())  # plain integers: with cold caches a NumPy reduction costs 30 us

    def take(self, key: int) -> Cut:
        """Return the cut of a global batch; make it if nobody has.

        Raises:
            PeerError: A living rank has not consumed an older cut in time.
            StoreError: No item has mass, or the cut is older than the ring.
        """
        until = None
        entry = key % self.spec.depth
        while True:
            with self.table.lock:
                held, at = int(self.heads[entry, KEY]), int(self.position[KEY])
                if held == key:
                    return self._seen(key, entry)
                skips = key > at and self.spec.kind != "pass"
                if held > key or key < at or skips:
                    raise StoreError(
                        f"stream {self.spec.name}: global batch {key}",
                        "must be the next one or in the ring of cuts",
                        f"the stream is at {at}",
                        "ranks of a node must ask for the same batches in the same order",
                    )
                late = self.peers.late(held)
                if not late:
                    self._cut(key, entry)
                    return self._seen(key, entry)
            if self.stopped:
                raise StoreError(
                    f"stream {self.spec.name}", "must be open", None, "it was closed while it waited"
                )
            if until is None:
                until = time.monotonic() + self._timeout_s
                self.peers.wait_awake(held)
                continue
            if time.monotonic() > until:
                raise self.peers.error(key, late)
            time.sleep(_POLL_S)

    def _seen(self, key: int, entry: int) -> Cut:
        if (key + 1) % len(self.consumed) == self._peer:
            self._draw_ahead(key + 1)
        return Cut(key, self.heads[entry], self._ring[entry], self._epochs[entry])

    def consume(self, key: int) -> None:
        """Say that this process has copied what it needs of all cuts up to `key`."""
        self.consumed[self._peer] = key + 1

    def _cut(self, key: int, entry: int) -> None:
        head, rows = self.heads[entry], self._ring[entry]
        head[KEY] = NOTHING
        after: list[int] = self.position.tolist()
        self._begin(key, after)
        count = self.spec.batch
        if self.spec.kind == "random":
            self._apply()
            after[TOTAL] = self._checked_total()
            if self.position[AHEAD] != key:
                self._draw(rows, after[SAMPLES], after[TOTAL])
        else:
            self._walk(rows, self._epochs[entry], torch.empty(count, dtype=torch.int64), after)
        after[KEY], after[COUNT] = key + 1, count
        after[SAMPLES] += count
        head[1:] = after[1:]
        head[KEY] = key  # the commit point
        self._advance(head)

    def _draw_ahead(self, key: int) -> None:
        """Draw for the next cut, where several ranks want it and nothing is known that comes before it."""
        position, entry = self.position, key % self.spec.depth
        if len(self.consumed) == 1 or self.spec.kind != "random" or position[KEY] != key:
            return
        if position[AHEAD] == key or position[NUM_DIRTY] or self.peers.late(int(self.heads[entry, KEY])):
            return
        self.heads[entry, KEY] = NOTHING
        total = self.total
        if total:
            self._draw(self._ring[entry], int(position[SAMPLES]), total)
            position[AHEAD] = key

    def _draw(self, rows: torch.Tensor, first: int, total: int) -> None:
        coordinates = torch.empty(len(rows), dtype=torch.int64)
        self.ops.draw_(coordinates, self.spec.seed, self.spec.key, first, total)
        self._resolve(rows, coordinates, first)

    def _begin(self, key: int, after: list[int]) -> None:
        """Reset what belongs to one pass when a new pass begins."""
        after[FILLERS] = 0
        if self.spec.kind == "pass" and key >> PASS_SHIFT != int(self.position[KEY]) >> PASS_SHIFT:
            after[SAMPLES] = after[EPOCH_FIRST] = after[EPOCH_SIZE] = 0
        if self.spec.kind == "pass":
            after[EPOCH] = key >> PASS_SHIFT

    def _walk(
        self, rows: torch.Tensor, epochs: torch.Tensor, coordinates: torch.Tensor, after: list[int]
    ) -> None:
        """Visit items in an order; at the end of an epoch the queue is applied and the next one begins.

        A cut that fails or dies after that point cannot resolve the old epoch's last items again, since the
        tree has changed: it is taken up behind them (DONE), where their resolutions lie in the ring already.
        """
        done, count = after[DONE], self.spec.batch
        while done < count:
            at = after[SAMPLES] + done - after[EPOCH_FIRST]
            if at >= after[EPOCH_SIZE]:
                if self.spec.kind == "pass" and after[EPOCH_SIZE] > 0:
                    after[FILLERS] = max(after[FILLERS], count - done)
                    at = 0  # fillers repeat the first items and are marked as such
                else:
                    if after[EPOCH_SIZE] > 0:
                        after[EPOCH] += 1
                    after[EPOCH_FIRST] = after[SAMPLES] + done
                    if self.position[NUM_DIRTY]:
                        self.position[DONE] = done
                    self._apply()
                    after[EPOCH_SIZE] = after[TOTAL] = self._checked_total()
                    at = 0
            n = min(count - done, after[EPOCH_SIZE] - at)
            part = coordinates[done : done + n]
            epochs[done : done + n] = after[EPOCH]
            if self.spec.kind == "epoch":
                size, epoch = after[EPOCH_SIZE], after[EPOCH]
                self.ops.permute_(part, self.spec.seed, self.spec.key, epoch, at, size)
            else:
                torch.arange(at, at + n, out=part)
            self._resolve(rows[done : done + n], part, after[SAMPLES] + done)
            if self.spec.kind == "pass" and after[FILLERS]:
                after[EPOCH_FIRST] = after[SAMPLES] + done + n - after[EPOCH_SIZE]
            done += n

    def _resolve(self, rows: torch.Tensor, coordinates: torch.Tensor, first: int) -> None:
        how = self._rule_words, self._unit, self.spec.seed, self.spec.key, first
        self.ops.resolve_(rows, self._sums, self._slots, coordinates, *how)

    def _checked_total(self) -> int:
        total = self.total
        if total == 0:
            raise StoreError(
                f"stream {self.spec.name}: table {self.table.spec.name}",
                "must hold at least one item that the sampler admits",
                f"{self.table.num_trajectories} trajectories, none admitted",
                "check sampler.where, sampler.anchors and the split, or add trajectories first",
            )
        return total

    def _advance(self, head: np.ndarray) -> None:
        self.position[1:NUM_DIRTY] = head[1:NUM_DIRTY]
        self.position[DONE] = 0
        self.position[KEY] = head[KEY] + 1

    def restart(self) -> None:
        """Let changes that wait for the end of an epoch take effect at the next cut. Wants the lock."""
        if self.spec.kind == "epoch" and self.position[EPOCH_SIZE]:
            self.position[EPOCH] += 1
            self.position[DONE] = 0
            self.position[EPOCH_FIRST], self.position[EPOCH_SIZE] = self.position[SAMPLES], 0

    # ---- freeing ---------------------------------------------------------------------------------

    def needs(self, slots: np.ndarray) -> np.ndarray:
        """Return which retired slots this stream may still read. Wants the lock. [n] -> [n], bool."""
        position, ring = self.position, self._ring[:, :, R_SLOT].numpy()
        num_walked = position[SAMPLES] + position[DONE] - position[EPOCH_FIRST]
        if self.spec.kind == "random" or num_walked >= position[EPOCH_SIZE]:
            self._apply()  # nothing is drawn between now and the next cut, so it sees the same tree
        waiting = self._leaves[slots] != 0
        for entry, head in enumerate(self.heads):
            if head[KEY] != NOTHING and self.peers.late(int(head[KEY])):
                waiting |= np.isin(slots, ring[entry])
        entry, done = int(position[KEY]) % self.spec.depth, int(position[DONE])
        return np.asarray(waiting | np.isin(slots, ring[entry, :done]))

    # ---- position --------------------------------------------------------------------------------

    def seek(self, key: int, samples: int, epoch: int, epoch_first: int, epoch_size: int) -> None:
        """Continue at a global batch. Wants the lock."""
        self.heads[:, KEY] = NOTHING
        self.consumed[:] = key
        self.position[DONE], self.position[AHEAD] = 0, NOTHING
        words = [KEY, SAMPLES, EPOCH, EPOCH_FIRST, EPOCH_SIZE, TOTAL]
        self.position[words] = (key, samples, epoch, epoch_first, epoch_size, epoch_size)

    def export(self, slots: np.ndarray, since: int) -> dict[str, np.ndarray]:
        """Return what continues this stream elsewhere. Wants the lock.

        Args:
            slots: Those that are saved, ascending. [n], int64.
            since: Cuts from this global batch on have not been used.
        """
        unused = np.nonzero(self.heads[:, KEY] >= since)[0]
        ring = self._ring.numpy()[unused].copy()
        ring[..., R_SLOT] = np.searchsorted(slots, ring[..., R_SLOT])
        return {
            "leaves": self._leaves[slots],
            "queued": self._queued[slots],
            "position": self.position[:NUM_DIRTY].copy(),
            "heads": self.heads[unused],
            "ring": ring,
            "epochs": self._epochs.numpy()[unused],
        }

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray], since: int) -> None:
        """Continue what `export` has saved; the table's slots are in place. Wants the lock.

        Cuts that were not used are kept if the global batch has still the same size and the ring the room.
        """
        self._leaves[:], self._queued[:] = 0, NOTHING
        self._leaves[slots], self._queued[slots] = content["leaves"], content["queued"]
        waiting = np.nonzero(self._queued != NOTHING)[0]
        self._dirty[: len(waiting)] = waiting
        self.position[NUM_DIRTY], self.position[APPLYING], self.position[AHEAD] = len(waiting), 0, NOTHING
        self.ops.tree_build_(self._sums, len(self.table.slots))
        heads, ring = content["heads"], content["ring"]
        if ring.shape[1] != self.spec.batch or len(heads) > self.spec.depth or len(heads) == 0:
            return
        ring[..., R_SLOT] = slots[ring[..., R_SLOT]]
        ring[..., R_FIRST_ROW] = self.table.slots[ring[..., R_SLOT], FIRST_ROW]
        entries = heads[:, KEY] % self.spec.depth
        self.heads[entries] = heads
        self._ring.numpy()[entries], self._epochs.numpy()[entries] = ring, content["epochs"]
        self.position[:NUM_DIRTY] = content["position"]


def reclaim(table: Table, streams: list[Stream]) -> None:
    """Free the slots of dead writers, and the retired ones that no stream needs any more. Wants the lock."""
    table.free(table.abandoned())
    slots = table.retired()
    if len(slots) == 0:
        return
    needed = np.zeros(len(slots), bool)
    for stream in streams:
        needed |= stream.needs(slots)
    table.free(slots[~needed])

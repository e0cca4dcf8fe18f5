"""Masses from priorities: every rank reports into a log of its own, a cut applies all of them in one order.

An item is a trajectory (a leaf for each slot) or a step (a leaf for each row of the store). The stored
priorities are the truth; masses, sums and minima are derived from them, and rebuilt after a death.

A cut of global batch n sees exactly the reports that belong to batches before n - lag. A report belongs to
the batch that its rank had last asked for, so a rank's reports for a batch are complete when it asks for a
later one: no clock decides. Among those of one batch the order is that of the sample numbers, reports by id
come behind them, and the last one wins.
"""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.errors import DataError, ShapeError, StoreError
from deepspeed_gear.ops.constants import (
    APPLIED,
    CLAMPED,
    DRAWABLE,
    FAN_OUT,
    HIGHEST_PRIORITY,
    NUM_UPDATE_COUNTS,
    ONE_Q62,
    R_ANCHOR,
    R_GENERATION,
    R_NUMBER,
    R_SLOT,
    REPORT_WORDS,
    RESOLUTION_WORDS,
    STALE,
    UPDATE_WORDS,
    minima_size,
)
from deepspeed_gear.selection.cut import StreamSpec
from deepspeed_gear.selection.masses import Masses
from deepspeed_gear.selection.peers import Peers
from deepspeed_gear.selection.rules import UNIT_CODES
from deepspeed_gear.store.layout import Region
from deepspeed_gear.store.table import FIRST_ROW, ID, NUM_ROWS, NUM_STEPS, Table

ALPHA, TAKING = 2, 3  # words of the changes
BATCH, ORDER = UPDATE_WORDS, UPDATE_WORDS + 1  # words of a log entry behind those of the update
BY_ID = 1 << 62  # order of reports by id: behind every sample number
NEVER = -(1 << 62)  # asked for nothing yet
HEAD, TAIL, NEXT = 0, 1, 2  # words of a log's ends, counted up for ever; NEXT: the head behind a cut
ENDS_WORDS = 16
MOST_CLAMPED, LEAST_APPLIED = 1e-3, 10_000  # part of all updates that may be clamped, once there are so many


class PriorityMasses(Masses):
    """A mass for each trajectory or step: priority ** alpha in units of 2^-24.

    Process safety: reports and `ask` belong to one thread of each process and take the lock themselves; the
    rest as in Masses.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        super().__init__(spec, table)
        assert spec.priorities is not None
        self.rule = spec.priorities
        views, at = table.views, spec.at
        self.values: np.ndarray = views[at + "priorities"]
        self.counts: np.ndarray = views[at + "counts"]
        self.by_step = spec.rule.unit == "step"
        self._row_slots = views[at + "row_slots"] if self.by_step else np.empty(0, np.int32)
        self._bases: np.ndarray = views[at + "bases"]
        self._log: np.ndarray = views[at + "log"]
        self._ends: memoryview = views[at + "ends"].data
        self._asked: np.ndarray = views[at + "asked"]
        self._asked_words: memoryview = self._asked.data
        keeps_minima = self.rule.normalize == "table" and minima_size(self.num_items) > 0
        minima = views[at + "minima"] if keeps_minima else np.empty(0, np.int64)
        self._minima = torch.from_numpy(minima)
        self._values, self._counts = torch.from_numpy(self.values), torch.from_numpy(self.counts)
        self._peer, self._num_peers = table.memory.peer, len(self._asked)
        self._my_log = torch.from_numpy(self._log[self._peer])
        self._peers = Peers(spec, table, self._asked, table.lock.timeout_s)

    @staticmethod
    def count_items(spec: StreamSpec, num_slots: int, num_rows: int) -> int:
        return num_rows if spec.rule.unit == "step" else num_slots

    @classmethod
    def regions(cls, spec: StreamSpec, num_slots: int, num_rows: int, num_peers: int) -> list[Region]:
        rule, items = spec.priorities, cls.count_items(spec, num_slots, num_rows)
        assert rule is not None
        regions = [
            Region(spec.at + "priorities", "float32", (items,)),
            Region(spec.at + "counts", "int64", (NUM_UPDATE_COUNTS,)),
            Region(spec.at + "bases", "int64", (num_slots,)),
            Region(spec.at + "log", "int64", (num_peers, rule.log_size, REPORT_WORDS)),
            Region(spec.at + "ends", "int64", (num_peers, ENDS_WORDS)),
            Region(spec.at + "asked", "int64", (num_peers,)),
        ]
        if spec.rule.unit == "step":
            regions.append(Region(spec.at + "row_slots", "int32", (num_rows,)))
        if rule.normalize == "table" and minima_size(items):
            regions.append(Region(spec.at + "minima", "int64", (minima_size(items),)))
        return [*super().regions(spec, num_slots, num_rows, num_peers), *regions]

    def initialise(self) -> None:
        self._asked[:] = NEVER
        self.words[ALPHA] = self._alpha_at(0)
        self.counts[HIGHEST_PRIORITY] = _bits(np.ones(1, np.float32))[0]
        super().initialise()

    # ---- reports ---------------------------------------------------------------------------------

    def ask(self, key: int) -> None:
        """Say that this process asks for a global batch: what it reports from now on belongs to that one."""
        self._asked_words[self._peer] = key

    def restart(self, key: int) -> None:
        self._asked[:] = NEVER
        for peer in range(self._num_peers):
            waiting = np.arange(self._ends[peer, HEAD], self._ends[peer, TAIL]) % self.rule.log_size
            if (self._log[peer, waiting, BATCH] >= key).any():  # of batches that come again: due now
                self._log[peer, waiting, BATCH] = NEVER

    def too_early(self, key: int) -> bool:
        return bool(self._asked_words[self._peer] < key - self.rule.lag)

    def report(self, updates: np.ndarray, priorities: np.ndarray, order: np.ndarray | int) -> None:
        """Report priorities of any items; as `report_samples`.

        Args:
            updates: Slot, generation and anchor of each item. [n, 3], int64.
            priorities: Finite, at least 0. [n], float32.
            order: Their sample numbers, or BY_ID. [n], int64.
        """
        samples = np.zeros((len(updates), RESOLUTION_WORDS), np.int64)
        samples[:, (R_SLOT, R_GENERATION, R_ANCHOR)], samples[:, R_NUMBER] = updates, order
        self.report_samples(torch.from_numpy(samples), np.array(priorities, np.float32))

    def report_samples(self, samples: torch.Tensor, priorities: np.ndarray) -> None:
        """Report priorities of what was drawn; a later cut applies them.

        Args:
            samples: Their resolutions. [n, 8], int64.
            priorities: Finite, at least 0. [n], float32.
        Raises:
            DataError: A priority is negative, infinite or NaN; nothing has changed.
            StoreError: More wait than the log holds; nothing has changed.
        """
        count, peer = len(priorities), self._peer
        self.check_room(count)
        tail, values = self._ends[peer, TAIL], torch.from_numpy(priorities).contiguous()
        try:
            self.ops.report_(self._my_log, samples.contiguous(), values, tail, self._asked_words[peer])
        except (RuntimeError, ShapeError):
            check_priorities(priorities)
            raise
        with self.table.lock:  # so that whoever makes the next cut sees the entries behind the tail
            self._ends[peer, TAIL] = tail + count

    def check_room(self, count: int) -> None:
        """Refuse more reports than the log holds.

        Raises:
            StoreError: There are more.
        """
        waiting = self._ends[self._peer, TAIL] - self._ends[self._peer, HEAD]
        if count > self.rule.log_size - waiting:
            raise StoreError(
                f"stream {self.spec.name}: priorities",
                f"must be at most {self.rule.log_size} between two global batches on a rank",
                f"{waiting} wait, {count} more",
                "report them in parts, with a sample() between the parts",
            )

    def late(self, key: int) -> list[int]:
        """Return the living processes whose reports are not complete for a global batch."""
        return self._peers.behind(key - self.rule.lag)

    def wait_awake(self, key: int) -> None:
        """Wait for their reports without sleeping, but not for long."""
        self._peers.wait_awake(key - self.rule.lag)

    # ---- changes ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return True  # reports may come at any time

    def apply(self, key: int) -> None:
        super().apply(key)
        alpha = self._alpha_at(key)
        if alpha != self.words[ALPHA]:
            self.words[ALPHA] = alpha
            self._build()
        due = self._due(key - self.rule.lag)
        if due:
            updates = _ordered([entries for _, entries in due])
            self.ops.prioritize_(
                self.sums,
                self._minima,
                self._values,
                self._counts,
                self._slots,
                torch.from_numpy(updates),
                self.words[ALPHA],
                UNIT_CODES[self.spec.rule.unit],
            )
            self._take(due)
        self._check_clamped()

    def _take(self, due: list[tuple[int, np.ndarray]]) -> None:
        """Take applied reports out of all logs, or out of none: some alone, applied again, would win."""
        for peer, entries in due:
            self._ends[peer, NEXT] = self._ends[peer, HEAD] + len(entries)
        self.words[TAKING] = 1  # the commit point
        for peer, _ in due:
            self._ends[peer, HEAD] = self._ends[peer, NEXT]
        self.words[TAKING] = 0

    def recover(self) -> None:
        wanted, other = (HEAD, NEXT) if self.words[TAKING] else (NEXT, HEAD)
        for peer in range(self._num_peers):
            self._ends[peer, wanted] = self._ends[peer, other]
        self.words[TAKING] = 0
        super().recover()

    def _due(self, batch: int) -> list[tuple[int, np.ndarray]]:
        """Return the reports of each process that belong to batches before this one."""
        due = []
        for peer in range(self._num_peers):
            head, tail = self._ends[peer, HEAD], self._ends[peer, TAIL]
            if head == tail:
                continue
            entries = self._entries(peer, head, tail)
            if entries[-1, BATCH] >= batch:
                entries = entries[: np.searchsorted(entries[:, BATCH], batch)]
            if len(entries):
                due.append((peer, entries))
        return due

    def _entries(self, peer: int, head: int, tail: int) -> np.ndarray:
        size = self.rule.log_size
        first, end = head % size, head % size + tail - head
        log = self._log[peer]
        return log[first:end] if end <= size else np.concatenate([log[first:], log[: end - size]])

    def _alpha_at(self, key: int) -> int:
        return int(self.rule.alpha(key) * ONE_Q62)  # exact: a power of two

    def _check_clamped(self) -> None:
        applied, clamped = int(self.counts[APPLIED]), int(self.counts[CLAMPED])
        if applied >= LEAST_APPLIED and clamped > MOST_CLAMPED * applied:
            raise StoreError(
                f"stream {self.spec.name}: priority ** alpha",
                f"must lie in [2^-25, 2^16] for all but {MOST_CLAMPED:.1%} of the updates",
                f"{clamped} of {applied} lie outside",
                "scale the priorities",
            )

    def _set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Give new items their first priority, and take that of items that are gone."""
        items, admitted = self._items_of(slots, masses)
        priorities = np.where(admitted, self._initial(), np.float32(0))
        new = torch.empty(len(items), dtype=torch.int64)
        self.ops.mass_(new, torch.from_numpy(priorities), self.words[ALPHA])
        before = np.count_nonzero(self.leaves[items])
        self.values[items] = priorities
        changed = torch.from_numpy(items)
        self.ops.tree_update_(self.sums, self.num_items, changed, new)
        if len(self._minima):
            self.ops.minima_update_(self._minima, self.sums, self.num_items, changed)
        self.counts[DRAWABLE] += np.count_nonzero(new.numpy()) - before
        self._bases[slots] = masses

    def _items_of(self, slots: np.ndarray, bases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all items of slots, and which of them may be drawn. [m], int64, and [m], bool."""
        if not self.by_step:
            return np.ascontiguousarray(slots), bases > 0
        records = self.table.slots[slots]
        rows = records[:, NUM_ROWS]
        first = np.repeat(records[:, FIRST_ROW], rows)
        steps = np.arange(len(first)) - np.repeat(np.cumsum(rows) - rows, rows)
        items = first + steps
        self._row_slots[items] = np.repeat(slots, rows)
        admitted = self.spec.rule.anchors.admits(steps, np.repeat(records[:, NUM_STEPS], rows))
        return items, admitted & np.repeat(bases > 0, rows)

    def _initial(self) -> np.ndarray:
        """Return the priority of new items. [], float32."""
        if self.rule.initial is not None:
            return np.array(self.rule.initial, np.float32)
        return np.array(self.counts[HIGHEST_PRIORITY], np.int32).view(np.float32)

    @property
    def applied(self) -> np.ndarray:
        return self._bases

    def _build(self) -> None:
        """Derive everything from the priorities."""
        leaves = self.sums[: self.num_items]
        self.ops.mass_(leaves, self._values, self.words[ALPHA])
        self.ops.tree_build_(self.sums, self.num_items)
        if len(self._minima):
            self.ops.minima_build_(self._minima, self.sums, self.num_items)
        self.counts[DRAWABLE] = np.count_nonzero(self.leaves)

    # ---- draws -----------------------------------------------------------------------------------

    def resolve(self, rows: torch.Tensor, coordinates: torch.Tensor, first: int) -> None:
        if not self.by_step:
            super().resolve(rows, coordinates, first)
            return
        row_slots = torch.from_numpy(self._row_slots)
        self.ops.resolve_rows_(rows, self.sums, self._slots, row_slots, coordinates, first)

    def highest(self, count: int) -> torch.Tensor:
        """Return the coordinates of the items of highest priority; fewer if there are not so many. [n]."""
        items = torch.empty(count, dtype=torch.int64)
        self.ops.top_k_(items, self._values, self.sums)
        items = items[items >= 0]
        if self.table.spec.dataset is None and len(items):
            items = torch.from_numpy(self._by_id(items.numpy()))
        return self.coordinates_of(items)

    def _by_id(self, items: np.ndarray) -> np.ndarray:
        """Of items in falling order, let those of the lowest ids come first among equal priorities.

        In a table with a capacity a newer trajectory may lie before an older one.
        """
        values, least = self.values, self.values[items[-1]]
        equal = np.nonzero((values == least) & (self.leaves > 0))[0]
        above = items[values[items] > least]
        ids = self._ids_of(equal)
        wanted = len(items) - len(above)
        equal = equal[ids <= np.partition(ids, wanted - 1)[wanted - 1]]
        found = np.concatenate([above, equal])
        return found[np.lexsort((found, self._ids_of(found), -values[found]))][: len(items)]

    def _ids_of(self, items: np.ndarray) -> np.ndarray:
        slots = self._row_slots[items] if self.by_step else items
        return np.asarray(self.table.slots[slots, ID])

    def weigh(self, key: int, masses: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor and exponent (Q62) of a cut's importance weights.

        The weight of a sample is (numerator / (divisor * mass)) ** exponent.

        Args:
            key: Number of the global batch.
            masses: Of what was drawn. [B], int64.
            total: Sum of all masses.
        """
        beta = int(self.rule.beta(key) * ONE_Q62)
        if self.rule.normalize == "batch":
            return int(masses.min()), 1, beta
        if self.rule.normalize == "table":
            return self.least, 1, beta
        return total, int(self.counts[DRAWABLE]), beta

    @property
    def least(self) -> int:
        """The smallest mass that is not 0."""
        top = self._minima[-FAN_OUT:].numpy() if len(self._minima) else self.leaves
        return int(top[top > 0].min())

    def statistics(self) -> dict[str, int]:
        """Return how many reports were applied, ignored because their item was gone, and clamped."""
        words = {"priorities_applied": APPLIED, "priorities_ignored": STALE, "priorities_clamped": CLAMPED}
        return {name: int(self.counts[word]) for name, word in words.items()}

    # ---- content ---------------------------------------------------------------------------------

    def export(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        items, _ = self._items_of(slots, self._bases[slots])
        logs = [self._entries(p, self._ends[p, HEAD], self._ends[p, TAIL]) for p in range(self._num_peers)]
        log = _sorted(np.concatenate(logs))
        saved = np.isin(log[:, 0], slots)
        log, counts = log[saved], self.counts.copy()
        log[:, 0] = np.searchsorted(slots, log[:, 0])
        counts[STALE] += len(saved) - len(log)
        return {
            "priorities": self.values[items],
            "bases": self._bases[slots],
            "queued": self.queued[slots],
            "counts": counts,
            "alpha": np.array([self.words[ALPHA]]),
            "log": log,
        }

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
        log = content["log"]
        if len(log) > self.rule.log_size:
            raise StoreError(
                f"stream {self.spec.name}: the checkpoint's reports",
                f"must be at most {self.rule.log_size}",
                len(log),
                "raise the batch size or gear.prefetch to what they were",
            )
        self.values[:], self.queued[:], self._bases[:] = 0, -1, 0
        items, _ = self._items_of(slots, content["bases"])
        self.values[items] = content["priorities"]
        self._bases[slots], self.queued[slots] = content["bases"], content["queued"]
        self.counts[:], self.words[ALPHA] = content["counts"], int(content["alpha"][0])
        for peer in range(self._num_peers):
            self._ends[peer, HEAD] = self._ends[peer, TAIL] = self._ends[peer, NEXT] = 0
        self._log[0, : len(log)] = log
        self._log[0, : len(log), 0] = slots[log[:, 0]]
        self._ends[0, TAIL] = len(log)
        self._asked[:] = NEVER
        self._requeue()
        self._build()


def check_priorities(priorities: np.ndarray) -> None:
    """Refuse what is no priority.

    Raises:
        DataError: One is negative, infinite or NaN.
    """
    if len(priorities) == 0 or (priorities.min() >= 0 and priorities.max() < np.inf):  # a NaN is neither
        return
    with np.errstate(invalid="ignore"):
        at = int(np.nonzero(~((priorities >= 0) & (priorities < np.inf)))[0][0])
    raise DataError(
        f"priority {at}", "must be finite and at least 0", float(priorities[at]), "nothing was changed"
    )


def _bits(priorities: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(priorities, np.float32).view(np.int32)


def _ordered(parts: list[np.ndarray]) -> np.ndarray:
    """Bring the reports of all processes into their order. [n, 6], int64, contiguous."""
    entries = parts[0] if len(parts) == 1 else np.concatenate(parts)
    order = entries[:, ORDER]
    if len(parts) > 1 or (order[1:] < order[:-1]).any():
        entries = _sorted(entries)
    return entries


def _sorted(entries: np.ndarray) -> np.ndarray:
    return entries[np.lexsort((entries[:, ORDER], entries[:, BATCH]))]

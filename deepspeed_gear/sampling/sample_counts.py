"""Sample counts: draws of each item, ages and effective size of samples, recent selections."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import NOTHING, Head
from deepspeed_gear.store.row_allocator import rows_of
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec

_ONE = np.int32(1)  # of the counters' type: a plain 1 takes a hundred times as long


class SampleCounts:
    """A counter for each trajectory, or for each row where items are steps. Every method requires
    the lock.

    A process that dies inside a selection may lose its counts, or count it twice: nothing depends
    on them.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self.counts: np.ndarray = table.views[spec.at + "draws"]
        self._table = table
        self._by_step = spec.rule.unit == "step"
        self._generations = table.views.get(spec.at + "draws_of")  # of the counted trajectories

    @staticmethod
    def regions(spec: StreamSpec, table: TableSpec) -> list[Region]:
        """Return the regions of a stream's counters: 4 bytes an item; none without
        `count_draws`.
        """
        items = table.num_rows if spec.rule.unit == "step" else table.num_slots
        if not spec.count_draws:
            return []
        counts = Region(spec.at + "draws", "int32", (items,))
        of = (
            [Region(spec.at + "draws_of", "int64", (table.num_slots,))]
            if table.dataset is None
            else []
        )
        return [counts, *of]

    def count(self, resolutions: np.ndarray) -> None:
        """Count the draws of the resolutions of a selection. [B, 8], int64."""
        if self._by_step:
            items = resolutions[:, Resolution.FIRST_ROW] + resolutions[:, Resolution.ANCHOR]
        else:
            items = np.ascontiguousarray(resolutions[:, Resolution.SLOT])
        np.add.at(self.counts, items, _ONE)

    def forget(self, slots: np.ndarray) -> None:
        """Reset the counters of slots that hold other trajectories now. [n], int64."""
        assert self._generations is not None
        generations = self._table.slots[slots, Slot.GENERATION]
        self.counts[self._items(slots[self._generations[slots] != generations])] = 0
        self._generations[slots] = generations

    def export(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        return {"draws": self.counts[self._items(slots)]}

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
        """Restore counters that `export` returned; without any in the checkpoint they
        begin at 0.
        """
        self.counts[:] = 0
        if self._generations is not None:
            self._generations[:] = self._table.slots[:, Slot.GENERATION]
        if "draws" in content:
            self.counts[self._items(slots)] = content["draws"]

    def drawable(self, masses: ItemMasses) -> np.ndarray:
        """Return the counters of the items that can be drawn now. [n], int32."""
        if masses.spec.priorities is not None or not self._by_step:
            return np.asarray(self.counts[masses.leaves > 0])
        slots = np.nonzero(masses.leaves)[0]
        records = self._table.slots[slots]
        rows, steps, owner = rows_of(records)
        admitted = masses.spec.rule.anchors.admits(steps, records[owner, Slot.NUM_STEPS])
        return np.asarray(self.counts[rows[admitted]])

    def _items(self, slots: np.ndarray) -> np.ndarray:
        """Return all items of slots, one after the other. [m], int64."""
        return rows_of(self._table.slots[slots])[0] if self._by_step else slots


def stored_samples(resolutions: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the resolutions of samples whose trajectories are still in this store. [n, 8]."""
    resolutions = resolutions[resolutions[:, Resolution.SLOT] < len(slots)]
    generations = slots[resolutions[:, Resolution.SLOT], Slot.GENERATION]
    return np.asarray(resolutions[generations == resolutions[:, Resolution.GENERATION]])


def sample_ages(
    resolutions: np.ndarray, slots: np.ndarray, next_id: int, num_shards: int
) -> np.ndarray:
    """Return how many newer trajectories a store has received for each sample. [n], int64.

    Over several nodes each node adds at its own rate, so a store knows the ages of the samples
    that it holds itself. The others are left out.

    Args:
        resolutions: Resolutions of samples. [m, 8], int64.
        slots: The store's slots.
        next_id: Counter of the store's ids.
        num_shards: Nodes that number the table's trajectories together; 1 for a data set.
    """
    if num_shards > 1:
        resolutions = stored_samples(resolutions, slots)
    # Ids alternate between nodes: of 2 nodes, the third trajectory of a node is number 4 or 5.
    return np.asarray(next_id - 1 - resolutions[:, Resolution.ID] // num_shards)


def recent_selections(spec: StreamSpec, table: Table, most: int) -> dict[int, Selection]:
    """Return copies of the latest selections of a stream by their numbers, ascending. Takes the
    lock.
    """
    heads = table.views[spec.at + "heads"]
    ring = table.views[spec.at + "ring"]
    with table.lock:
        numbers = heads[:, Head.NUMBER].tolist()
        entries = sorted(
            (i for i, number in enumerate(numbers) if number != NOTHING), key=numbers.__getitem__
        )[-most:]
        copies = [(heads[entry, : Head.NUM_SET].tolist(), ring[entry].copy()) for entry in entries]
    selections = {}
    for head, resolutions in copies:
        known = resolutions[: head[Head.COUNT]]
        known = known[known[:, Resolution.ID] >= 0]  # without samples that only other nodes resolve
        selections[head[Head.NUMBER]] = Selection(head, torch.from_numpy(known))
    return selections


def effective_share(weights: np.ndarray) -> float:
    """Return the effective sample size of weighted samples, as a fraction of their number.

    Args:
        weights: Importance weights up to a common factor. [n], float64, n > 0.
    Source: Kish, "Survey Sampling", 1965, section 8.2.
    """
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

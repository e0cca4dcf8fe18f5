"""What the streams of a store still need of its trajectories, as any process sees it that is attached.

A writer has no streams of its own: it knows those of the ranks by the regions that they keep in the store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops.constants import DRAWABLE
from deepspeed_gear.selection.cut import DONE, EPOCH_FIRST, EPOCH_SIZE, SAMPLES
from deepspeed_gear.store.native import address
from deepspeed_gear.store.table import FIRST_ROW, NUM_ROWS, PEER_PID, Table

NEVER_LATE = 1 << 62
_LAST_DRAWN = "/last_drawn"


@dataclass(frozen=True)
class _Reader:
    """What a stream keeps in a store.

    Args:
        position: Where it is.
        last_drawn: The newest global batch that drew from each slot. [slots], int64.
        consumed: What each process has done with: its newest global batch plus 1. [peers], int64.
        leaves: Masses of the slots or, where items are steps with priorities, of the rows.
        priorities, minima, counts: Where items are steps with priorities.
    """

    position: np.ndarray
    last_drawn: np.ndarray
    consumed: np.ndarray
    leaves: np.ndarray
    sums: torch.Tensor
    minima: torch.Tensor | None = None
    priorities: np.ndarray | None = None
    counts: np.ndarray | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether it walks through an epoch, whose items stay until its end."""
        position = self.position
        walked = position[SAMPLES] + position[DONE] - position[EPOCH_FIRST]
        return bool(walked < position[EPOCH_SIZE])


class Readers:
    """The streams of a store. Every method wants the store's lock.

    Args:
        table: The store.
    """

    def __init__(self, table: Table) -> None:
        self._table, views = table, table.views
        names = [name.removesuffix(_LAST_DRAWN) for name in views if name.endswith(_LAST_DRAWN)]
        self._readers = [self._reader(name) for name in names]
        self.orders = [name for name in names if self._kind(name) in ("epoch", "pass")]

    def _kind(self, name: str) -> str:
        described = self._table.layout.meaning.get(name.removeprefix("stream/"), {})
        return str(described.get("kind", ""))

    def _reader(self, name: str) -> _Reader:
        views, spec = self._table.views, self._table.spec
        sums = views[f"{name}/sums"]
        parts = views[f"{name}/position"], views[f"{name}/last_drawn"], views[f"{name}/consumed"]
        if f"{name}/row_slots" not in views:
            return _Reader(*parts, sums[: spec.num_slots], torch.from_numpy(sums))
        minima = views.get(f"{name}/minima")
        return _Reader(
            *parts,
            sums[: spec.num_rows],
            torch.from_numpy(sums),
            None if minima is None else torch.from_numpy(minima),
            views[f"{name}/priorities"],
            views[f"{name}/counts"],
        )

    @property
    def pins(self) -> list[tuple[int, int, int]]:
        """Return addresses as `store_life` takes them."""
        return [(address(r.last_drawn), address(r.consumed), len(r.consumed)) for r in self._readers]

    @property
    def are_frozen(self) -> bool:
        """Whether an epoch is under way, whose items stay until the ranks have walked through it."""
        return any(reader.priorities is None and reader.is_frozen for reader in self._readers)

    @property
    def have_step_priorities(self) -> bool:
        """Whether rows have priorities that must go with their trajectory."""
        return any(reader.priorities is not None for reader in self._readers)

    def pinned(self, slots: np.ndarray) -> np.ndarray:
        """Return which retired slots are still read or may be drawn. [n] -> [n], bool."""
        pinned = np.zeros(len(slots), bool)
        for reader in self._readers:
            pinned |= reader.last_drawn[slots] >= self._consumed(reader)
            if reader.priorities is None and reader.is_frozen:
                pinned |= reader.leaves[slots] != 0
        return pinned

    def _consumed(self, reader: _Reader) -> int:
        """Return the number of cuts that all processes have done with; wait no longer for dead ones."""
        memory, attached = self._table.memory, self._table.peers[: len(reader.consumed), PEER_PID] != 0
        drawn = reader.last_drawn.max()
        for peer in np.nonzero((reader.consumed <= drawn) & attached)[0].tolist():
            if not memory.is_alive(peer):
                reader.consumed[peer] = NEVER_LATE
        return int(reader.consumed[attached].min(initial=NEVER_LATE))

    def forget(self, slot: int) -> None:
        """Take the masses of a retired slot's rows, so that they can be another's."""
        first, count = self._table.slots[slot, [FIRST_ROW, NUM_ROWS]].tolist()
        for reader in self._readers:
            if reader.priorities is None:
                continue
            assert reader.counts is not None
            rows = slice(first, first + count)
            reader.counts[DRAWABLE] -= np.count_nonzero(reader.leaves[rows])
            reader.priorities[rows] = 0
            items, ops = torch.arange(first, first + count), self._table.ops
            num_items = len(reader.leaves)
            ops.tree_update_(reader.sums, num_items, items, torch.zeros_like(items))
            if reader.minima is not None:
                ops.minima_update_(reader.minima, reader.sums, num_items, items)

    def highest_priorities(self, slots: np.ndarray) -> np.ndarray:
        """Return the priority of each trajectory, or the highest one of its steps. [n] -> [n], float32."""
        table, end = self._table, "/priorities"
        name = next(name for name in table.views if name.endswith(end))
        values = table.views[name]
        if name.removesuffix(end) + "/row_slots" not in table.views:
            return np.asarray(values[slots])
        records = table.slots[slots]
        first, count = records[:, FIRST_ROW], records[:, NUM_ROWS]
        return np.array([values[f : f + n].max() for f, n in zip(first, count, strict=True)], np.float32)

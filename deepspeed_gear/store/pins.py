"""Pins: which trajectories the batch streams of a store still read. A writer, which has no batch
streams, computes them from the streams' regions in the store.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.native_rows import address
from deepspeed_gear.store.records import NEVER_LATE, NOTHING, Head, Peer, Position
from deepspeed_gear.store.step_priorities import StepPriorities
from deepspeed_gear.store.table import Table

_LAST_DRAWN = "/last_drawn"


class _Reader(NamedTuple):
    """A batch stream's regions in a store."""

    position: np.ndarray  # words of its position
    last_drawn: np.ndarray  # the newest global batch that drew from each slot. [slots], int64
    consumed: (
        np.ndarray
    )  # the newest global batch that each process has released, plus 1. [peers], int64
    leaves: np.ndarray  # masses of the slots, unless steps have priorities. [slots], int64
    steps: StepPriorities | None  # the priorities of steps, if they have any
    skips: bool  # whether an epoch skips evicted items

    @property
    def is_frozen(self) -> bool:
        """Whether a pass is under way, whose items stay until its end."""
        if self.skips or self.steps is not None:
            return False
        position = self.position
        walked = position[Head.SAMPLES] + position[Position.DONE] - position[Head.EPOCH_FIRST]
        return bool(walked < position[Head.EPOCH_SIZE])


class SelectionPins:
    """The streams of a store. Every method requires the store's lock."""

    def __init__(self, table: Table) -> None:
        self._table = table
        views = table.views
        names = [name.removesuffix(_LAST_DRAWN) for name in views if name.endswith(_LAST_DRAWN)]
        self._readers = [
            _Reader(
                views[f"{name}/position"],
                views[f"{name}/last_drawn"],
                views[f"{name}/consumed"],
                views[f"{name}/sums"][: table.spec.num_slots],
                StepPriorities.find(table.ops, views, name),
                f"{name}/walked" in views,
            )
            for name in names
        ]
        self._steps = [reader.steps for reader in self._readers if reader.steps is not None]
        #: Whether rows have priorities that must move with their trajectory.
        self.have_step_priorities = bool(self._steps)
        meaning = table.layout.meaning
        described = [meaning.get(name.removeprefix("stream/"), {}) for name in names]
        #: Whether a stream may walk epochs, whose items stay until their end; one that is not
        #: described may.
        self.may_walk: bool = any(stream.get("walks", True) for stream in described)

    @property
    def pins(self) -> list[tuple[int, int, int]]:
        """Return the addresses of pins as the native `Store.set_retention` takes them."""
        return [
            (address(r.last_drawn), address(r.consumed), len(r.consumed)) for r in self._readers
        ]

    @property
    def ahead(self) -> list[int] | None:
        """The address of each stream's word of draws made ahead; None: rows have more that moves
        along.
        """
        if not self._table.rows_are_columns:
            return None
        return [address(reader.position[Position.AHEAD :]) for reader in self._readers]

    @property
    def are_frozen(self) -> bool:
        """Whether a pass is under way in any stream, whose items stay until its end."""
        return any(reader.is_frozen for reader in self._readers)

    def pinned(self, slots: np.ndarray) -> np.ndarray:
        """Return which retired slots are still read or may be drawn. [n] -> [n], bool."""
        pinned = self.reading(slots)
        items = slots if self._table.groups is None else self._table.groups.items(slots)
        for reader in self._readers:
            if reader.is_frozen:
                pinned |= reader.leaves[items] != 0
        return pinned

    def reading(self, slots: np.ndarray) -> np.ndarray:
        """Return which slots a selection has drawn that some process still reads. [n]
        -> [n], bool.
        """
        found = np.zeros(len(slots), bool)
        for reader in self._readers:
            consumed = reader.consumed
            attached = self._table.peers[: len(consumed), Peer.PID] != 0
            for peer in np.nonzero((consumed <= reader.last_drawn.max()) & attached)[0].tolist():
                if not self._table.memory.is_alive(peer):
                    consumed[peer] = NEVER_LATE
            # Below the smallest number, all living processes have released the selections.
            found |= reader.last_drawn[slots] >= consumed[attached].min(initial=NEVER_LATE)
        return found

    def forget(self, slot: int) -> None:
        """Clear the priorities of a retired slot's rows, so that another trajectory can
        use them.
        """
        first, count = self._table.slots[slot, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
        for steps in self._steps:
            steps.forget(first, count)

    def replace(self, source: int, to: int, num_rows: int, spare: range) -> None:
        """Derive the masses of rows anew, after their trajectory was moved."""
        for steps in self._steps:
            steps.replace(source, to, num_rows, spare)

    def forget_ahead(self) -> None:
        """Discard draws made before their selection: they hold old rows of trajectories."""
        for reader in self._readers:
            reader.position[Position.AHEAD] = NOTHING

    def highest_priorities(self, slots: np.ndarray) -> np.ndarray:
        """Return priorities, or the highest of steps; inf: newer than the latest selection. [n] ->
        [n].
        """
        table = self._table
        end = "/priorities"
        name = next(name for name in table.views if name.endswith(end)).removesuffix(end)
        values = table.views[name + end]
        records = table.slots[slots]
        if f"{name}/row_slots" in table.views:
            extents = records[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
            highest = [values[first : first + count].max() for first, count in extents]
            found = np.array(highest, np.float32)
        else:
            found = values[slots].copy()
        found[table.views[f"{name}/generations"][slots] != records[:, Slot.GENERATION]] = np.inf
        return found

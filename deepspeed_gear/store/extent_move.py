"""Moves of extents to lower rows, which a death at any instruction leaves to the next owner of the lock.

The rows are copied in pieces. A piece is as long as the distance, so that it overlaps no row that is still to
be copied, or as the spare rows, through which it goes then. Control words hold the move and how many rows of
it are done: a piece that is copied again is copied from rows that are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.records import Control


class ExtentMove:
    """The move of an extent that is under way in a store. Every method requires the store's lock.

    Args:
        control: Control words of the store.
        arrays: All that is stored by row. [rows, ...] each.
    """

    def __init__(
        self, control: np.ndarray, slots: np.ndarray, arrays: Sequence[np.ndarray], spare: range
    ) -> None:
        self._control, self._slots, self._arrays, self._spare = control, slots, arrays, spare

    def run(self, slot: int, to: int) -> int:
        """Move an extent; `end` follows when what is derived from its place is derived anew.

        Args:
            slot: Of the extent; no process reads its rows.
            to: Its new first row, before the old one; all rows between them are free.
        Returns:
            Number of rows that were copied, those through the spare rows twice.
        """
        control = self._control
        control[Control.MOVE_FROM], control[Control.MOVE_TO] = self._slots[slot, Slot.FIRST_ROW], to
        control[Control.MOVE_DONE] = 0
        control[Control.MOVING] = slot + 1  # from here on the next owner of the lock finishes it
        return self.finish()

    def finish(self) -> int:
        """Finish the move that is under way, if there is one; return the number of copied rows."""
        control, copied = self._control, 0
        if not control[Control.MOVING]:
            return 0
        record = self._slots[int(control[Control.MOVING]) - 1]
        source, to = int(control[Control.MOVE_FROM]), int(control[Control.MOVE_TO])
        num_rows, distance = int(record[Slot.NUM_ROWS]), source - to
        longest = max(distance, len(self._spare))
        # Twice the rows that are done, and 1 if the next piece lies in the spare rows: one word, one store.
        while (word := int(control[Control.MOVE_DONE])) < 2 * num_rows:
            done, is_spare = divmod(word, 2)
            count, begin = min(longest, num_rows - done), source + done
            if count > distance:
                if not is_spare:
                    self._copy(begin, self._spare.start, count)
                    control[Control.MOVE_DONE] = word + 1
                begin, copied = self._spare.start, copied + count
            self._copy(begin, to + done, count)
            control[Control.MOVE_DONE], copied = 2 * (done + count), copied + count
        record[Slot.FIRST_ROW] = to  # publishes the new place
        return copied

    def end(self) -> None:
        """End the move that was finished."""
        self._control[Control.MOVING] = 0

    def _copy(self, source: int, to: int, count: int) -> None:
        for rows in self._arrays:
            rows[to : to + count] = rows[source : source + count]

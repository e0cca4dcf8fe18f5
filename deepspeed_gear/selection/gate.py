"""Whether a cut may be made now: the rate of a table, and how often its trajectories may be drawn."""

from __future__ import annotations

import time

import numpy as np

from deepspeed_gear.errors import NotReadyError
from deepspeed_gear.ops.constants import R_SLOT
from deepspeed_gear.selection.cut import SAMPLES, StreamSpec
from deepspeed_gear.selection.masses import Masses
from deepspeed_gear.selection.readers import Readers
from deepspeed_gear.store.extents import INSERTED, NUM_COMMITTED, STEPS_COMMITTED, STEPS_INSERTED
from deepspeed_gear.store.life import TIMES_SAMPLED
from deepspeed_gear.store.table import COMMITTED, STATE, Table

DEFAULT_TIMEOUT_S = 600.0


class Gate:
    """Opens when a global batch may be drawn. Every method wants the table's lock.

    Args:
        spec: The training stream.
        table: Its table, with a capacity.
        masses: Of its items.
        position: Of the stream.
    """

    def __init__(self, spec: StreamSpec, table: Table, masses: Masses, position: np.ndarray) -> None:
        self._spec, self._table, self._masses, self._position = spec, table, masses, position
        self.life = table.spec.life
        self.most = self.life.max_times_sampled
        self._times: np.ndarray = table.views["life"][:, TIMES_SAMPLED]
        self._readers = Readers(table)

    @property
    def is_plain(self) -> bool:
        """Whether it is always open."""
        return self.life.rate is None and not self.most

    def is_open(self, count: int) -> bool:
        """Return whether so many samples may be drawn."""
        rate, control = self.life.rate, self._table.control
        if rate is not None:
            by_step = rate.unit == "step"
            size = control[STEPS_COMMITTED if by_step else NUM_COMMITTED]
            inserted = control[STEPS_INSERTED if by_step else INSERTED]
            if not rate.may_sample(int(size), int(inserted), int(self._position[SAMPLES]), count):
                return False
        return self._left(count) >= count

    def _left(self, count: int) -> int:
        """Return how many samples the table is good for, or `count` if for as many."""
        each_once = self._spec.kind in ("oldest", "newest", "top")
        if not self.most and not each_once:
            return count if self._masses.total > 0 or self._masses.will_have_mass() else 0
        committed = np.nonzero(self._table.slots[:, STATE] == COMMITTED)[0]
        drawable = committed[self._masses.of(committed) > 0]
        return len(drawable) if each_once else int((self.most - self._times[drawable]).sum())

    # ---- how often -------------------------------------------------------------------------------

    def num_admitted(self, records: np.ndarray, counted: np.ndarray) -> int:
        """Return how many of some draws come before, and with, the first that uses a trajectory up.

        Args:
            records: Resolutions of draws, in their order. [n, 8], int64.
            counted: Draws of each slot in this cut so far; those that are admitted are added. [slots].
        """
        slots = records[:, R_SLOT]
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.searchsorted(ordered, ordered, side="left")
        nth = np.empty(len(slots), np.int64)
        nth[order] = np.arange(len(slots)) - first + 1
        used_up = np.nonzero(self._times[slots] + counted[slots] + nth >= self.most)[0]
        admitted = int(used_up[0]) + 1 if len(used_up) else len(slots)
        np.add.at(counted, slots[:admitted], 1)
        return admitted

    def count(self, records: np.ndarray) -> None:
        """Count what a cut has drawn. [n, 8], int64."""
        np.add.at(self._times, records[:, R_SLOT], 1)

    def retire_used_up(self) -> None:
        """Let those go that were drawn as often as they may be."""
        committed = np.nonzero(self._table.slots[:, STATE] == COMMITTED)[0]
        for slot in committed[self._times[committed] >= self.most].tolist():
            self._table.retire(slot)
            self._readers.forget(slot)

    def too_late(self, key: int, count: int, waited_s: float) -> NotReadyError:
        """Return the error of a batch that may not be drawn yet."""
        size = f"{self._table.num_trajectories} trajectories, {self._table.num_steps} steps held"
        within = f" within {waited_s:g} s" if waited_s else " first"
        rule = f"must be filled{within}, as its rate says, for the {count} samples of global batch {key}"
        remedy = (
            "look whether the actors run" if waited_s else "ask can_sample() first, and collect meanwhile"
        )
        return NotReadyError(f"table {self._table.spec.name}", rule, size, remedy)


class Waiting:
    """How long a stream has waited for its gate, in this process."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since: float | None = None

    def wait(self) -> float:
        """Note that it waits; return for how long already, in seconds."""
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since

    def end(self) -> None:
        """Note that it waits no more."""
        if self._since is not None:
            self.total_s += time.monotonic() - self._since
            self._since = None

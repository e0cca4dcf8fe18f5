"""Warnings in the log: priorities whose masses are clamped or coarse, and what a table of groups drops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from deepspeed_gear.context import LOG
from deepspeed_gear.ops.constants import EXACT_MASS_BITS, MASS_BITS
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.priority_masses import WINDOW
from deepspeed_gear.sampling.rate_limiting import MOST_ASKED
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.groups import TableGroups
from deepspeed_gear.store.records import Control, Head

MOST_REJECTED = 10  # batches of groups that may fail the conditions while one batch is generated
MOST_CLAMPED = 1e-3  # fraction of the updates that may be clamped without a warning
PAUSE_S = 600.0  # between two warnings of one kind


class ClampWarning:
    """Logs that many priority updates of a table were clamped, at most once in `PAUSE_S` seconds. `most_bits`
    is log2 of the largest mass; `counts` and `recent` return the numbers of updates applied and clamped:
    ever, and in the latest global batches (None: since the last `check`).
    """

    def __init__(
        self,
        table: str,
        most_bits: int,
        counts: Callable[[], tuple[int, int]],
        recent: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._table, self._largest = table, most_bits - MASS_BITS
        self._counts, self._recent = counts, recent
        self._seen, self._next = counts(), 0.0

    def check(self) -> None:
        """Log a warning if one is due. Cost: reads a few words if nothing was clamped."""
        now, before = self._counts(), self._seen
        if now[1] == before[1] or time.monotonic() < self._next:
            return
        self._seen, when = now, "since the last check()"
        applied, clamped = now[0] - before[0], now[1] - before[1]
        if self._recent is not None:
            (applied, clamped), when = self._recent(), f"in the latest {WINDOW} global batches"
        if clamped <= MOST_CLAMPED * applied:
            return
        self._next = time.monotonic() + PAUSE_S
        LOG.warning(
            f"gear: table {self._table}: priority ** alpha should be in [2^{EXACT_MASS_BITS - MASS_BITS}, "
            f"2^{self._largest}], got {clamped} of {applied} reports outside {when}: smaller ones are "
            "rounded by more than 1%, larger ones count as the bound; scale or clip what is reported, or "
            "lower sampler.alpha; with sampler.initial an outlier is not the first priority of new items"
        )


class GroupWarning:
    """Logs what a table of groups leaves out, each kind at most once in `PAUSE_S` seconds."""

    def __init__(self, stream: BatchStream, groups: TableGroups) -> None:
        self._stream, self._groups, self._table = stream, groups, stream.table.spec.name
        limited = stream.table.spec.retention.max_times_sampled
        self._draws_each = bool(limited) or stream.spec.sampler.each_once  # no group may leave unsampled
        self._first, self._loads = groups.counts.copy(), stream.table.control[Control.LOADS]
        # The next global batch, and the counts when it became that.
        self._key, self._at_key = stream.position[Head.KEY], self._first
        self._next: dict[str, float] = {}  # when each kind may be logged again

    def check(self) -> None:
        """Log the warnings that are due. Cost: reads a few words."""
        counts, spec, key = self._groups.counts.copy(), self._groups.spec, self._stream.position[Head.KEY]
        if self._loads != self._stream.table.control[Control.LOADS]:
            self._first, self._loads, self._key = counts, self._stream.table.control[Control.LOADS], -1
        if key != self._key:
            self._key, self._at_key = key, counts
        since = counts - self._at_key  # the latest selection
        failed = int(since[GroupCount.REJECTED] + since[GroupCount.OVERSIZED])
        if failed >= MOST_REJECTED * self._stream.spec.batch:
            judged = failed + int(since[GroupCount.INSERTED])
            self._log(
                "conditions",
                f"{failed} of {judged} groups since the latest batch failed group.where or were too large "
                f"({1 - failed / judged:.1%} passed), and were evicted; check the column of the condition, "
                f"or relax it. missing_groups() asks for up to {MOST_ASKED} times as many groups",
            )
        reused = int(since[GroupCount.LATE_CONSUMED])
        if reused >= spec.size * self._stream.spec.batch:
            self._log(
                "reused",
                f"{reused} trajectories since the latest batch had the number of a group that has left the "
                f"table, and were dropped; column {spec.column} is the number of a group: give new "
                "responses a new number, or lower group.remember",
            )
        new = counts - self._first
        late = int(new[[GroupCount.LATE, GroupCount.SURPLUS]].sum())
        if late and spec.after_s is None:
            self._log(
                "late",
                f"{late} trajectories came when their group was complete, and were dropped; column "
                f"{spec.column} is the number of a group: give new responses a number that no stored group "
                f"has, and each group {spec.size} members. statistics()['groups'] counts them as late and "
                "surplus",
                pause_s=np.inf,
            )
        unsampled = int(new[GroupCount.EVICTED_UNSAMPLED])
        if unsampled and self._draws_each:
            self._log(
                "unsampled",
                f"{unsampled} complete groups were evicted before any batch drew them: the table is too "
                f"small, or they are too old; raise capacity_steps or capacity_trajectories, lower the "
                f"groups of a batch ({self._stream.spec.batch}), or generate fewer at once",
            )

    def _log(self, kind: str, text: str, pause_s: float = PAUSE_S) -> None:
        if time.monotonic() >= self._next.get(kind, 0.0):
            self._next[kind] = time.monotonic() + pause_s
            LOG.warning("gear: table %s: %s", self._table, text)


def warnings_of(streams: Sequence[BatchStream]) -> list[ClampWarning | GroupWarning]:
    """Return the warnings of streams that have priorities, and of those whose tables have groups."""
    found: list[ClampWarning | GroupWarning] = []
    for stream in streams:
        masses, groups = stream.state.priorities, stream.table.groups
        if masses is not None:
            name, most_bits = stream.table.spec.name, masses.rule.most_bits
            found.append(ClampWarning(name, most_bits, masses.priority_counts, masses.recent))
        if groups is not None and stream.table.spec.dataset is None:
            found.append(GroupWarning(stream, groups))
    return found

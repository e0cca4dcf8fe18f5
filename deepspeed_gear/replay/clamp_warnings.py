"""Clamp warnings: priorities whose masses are clamped or coarse have another probability than they should."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from deepspeed_gear.ops.constants import EXACT_MASS_BITS, MASS_BITS
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.priority_masses import WINDOW

LOG = logging.getLogger("deepspeed_gear")
MOST_CLAMPED = 1e-3  # fraction of the updates that may be clamped without a warning
PAUSE_S = 600.0  # between two warnings


class ClampWarning:
    """Logs that many priority updates of a table were clamped, at most once in `PAUSE_S` seconds.

    Args:
        table: Name of the table.
        most_bits: log2 of the largest mass.
        num_clamped: Returns the number of updates ever clamped.
        recent: Returns the number of updates applied recently, and how many of them were clamped.
        when: Text of the period of `recent`.
    """

    def __init__(
        self,
        table: str,
        most_bits: int,
        num_clamped: Callable[[], int],
        recent: Callable[[], tuple[int, int]],
        when: str,
    ) -> None:
        self._table, self._largest, self._when = table, most_bits - MASS_BITS, when
        self._num_clamped, self._recent = num_clamped, recent
        self._seen, self._next = num_clamped(), 0.0

    def check(self) -> None:
        """Log a warning if one is due. Cost: reads one word if nothing was clamped."""
        count = self._num_clamped()
        if count == self._seen or time.monotonic() < self._next:
            return
        self._seen = count
        applied, clamped = self._recent()
        if clamped <= MOST_CLAMPED * applied:
            return
        self._next = time.monotonic() + PAUSE_S
        LOG.warning(
            "gear: table %s: priority ** alpha should be in [2^%d, 2^%d], got %d of %d reports outside %s: "
            "smaller ones are rounded by more than 1%%, larger ones count as the bound; scale or clip what "
            "is reported, or lower sampler.alpha; with sampler.initial an outlier is not the first priority "
            "of new items",
            self._table,
            EXACT_MASS_BITS - MASS_BITS,
            self._largest,
            clamped,
            applied,
            self._when,
        )


def warnings_of(streams: Sequence[BatchStream]) -> list[ClampWarning]:
    """Return the clamp warnings of the streams that have priorities."""
    found = []
    for stream in streams:
        masses = stream.state.priorities
        if masses is not None:
            name, when = stream.table.spec.name, f"in the latest {WINDOW} global batches"
            most_bits = masses.rule.most_bits
            found.append(ClampWarning(name, most_bits, masses.num_clamped, masses.recent, when))
    return found

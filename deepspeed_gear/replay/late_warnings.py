"""Late warnings: trajectories that were dropped because their group was complete without them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.groups import TableGroups

LOG = logging.getLogger("deepspeed_gear")


class LateWarning:
    """Logs once that late trajectories of a table's groups were dropped.

    Args:
        table: Name of the table.
        groups: Its groups, for which no stragglers are expected.
    """

    def __init__(self, table: str, groups: TableGroups) -> None:
        self._table, self._groups, self._first = table, groups, self._count(groups)
        self._is_due = True

    @staticmethod
    def _count(groups: TableGroups) -> int:
        return int(groups.counts[GroupCount.LATE])

    def check(self) -> None:
        """Log the warning if it is due. Cost: reads one word."""
        if not self._is_due or self._count(self._groups) == self._first:
            return
        self._is_due = False
        spec = self._groups.spec
        LOG.warning(
            "gear: table %s: %d trajectories came when their group was complete, and were dropped; column %s "
            "tells groups apart: give new responses a number that no stored group has, and each group "
            "%d members. statistics()['groups'] counts them as late",
            self._table,
            self._count(self._groups) - self._first,
            spec.column,
            spec.size,
        )


def warnings_of(streams: Sequence[BatchStream]) -> list[LateWarning]:
    """Return the late warnings of the streams' tables that have groups without stragglers."""
    known = ((stream.table.spec.name, stream.table.groups) for stream in streams)
    return [LateWarning(name, groups) for name, groups in known if groups and groups.spec.after_s is None]

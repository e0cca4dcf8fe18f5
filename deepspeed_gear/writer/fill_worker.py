"""FillWorker: leases trajectories that lack a late column, such as a reward, and fills it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.store.late_columns import absent, fill_leased
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

_POLL_S = 5e-3


class FillLease:
    """A trajectory without a late column, leased by the worker that computes the column.

    Attributes:
        trajectory_id: Its permanent id.
        columns: Copies of the columns that it has.
    """

    def __init__(self, worker: FillWorker, lease: LeaseRecord, columns: dict[str, Any]) -> None:
        self._worker = worker
        self._lease = lease
        self.trajectory_id = lease.number
        self.columns = columns

    def fill(self, value: Any) -> None:
        """Write the column, as `Replay.fill`.

        A value is ignored if the trajectory has been evicted, and ignored and counted if another
        worker has filled the column.
        """
        self._worker._fill(self._lease, value)


class FillWorker(ProcessBound):
    """Leases trajectories that lack a late column, to fill it: a reward model, for example.

    `FillWorker.attach(config, "reward")` attaches to a store of this node. One thread at a time.
    """

    def __init__(self, writer: TrajectoryWriter, column: str, lease_s: float) -> None:
        late = writer.schema.late_columns
        if column not in [one.name for one in late]:
            writer.close()
            has = f"there are: {', '.join(one.name for one in late) or 'none'}"
            raise ConfigError(
                f"table {writer.table}: column {column!r}", "must be a late column", None, has
            )
        self._writer = writer
        self._table = writer.parts[0]
        self._column = writer.schema[column]
        self._late = late.index(self._column)
        self._lease_ns = int(lease_s * 1e9)

    @classmethod
    def attach(
        cls,
        config: str | Path | Mapping[str, Any],
        column: str,
        lease_s: float = 600.0,
        **options: Any,
    ) -> FillWorker:
        """Attach to the store of a run of this node.

        Args:
            config: As `TrajectoryWriter.attach`.
            column: Name of the late column.
            lease_s: How long a lease lasts, in seconds; then another worker may lease its
                trajectory.
            **options: As `TrajectoryWriter.attach`.
        Raises:
            ConfigError: The table has no such late column; or as `TrajectoryWriter.attach`.
            StoreError: As `TrajectoryWriter.attach`.
        """
        check_timeout("lease_s", lease_s)
        return cls(TrajectoryWriter.attach(config, **options), column, lease_s)

    def lease(self, count: int = 1, timeout_s: float = 60.0) -> list[FillLease]:
        """Lease up to `count` trajectories that lack the column and that no living worker holds.

        Those of the smallest group numbers come first; without groups, the oldest. A lease comes
        back when its worker closes or dies, or after `lease_s`.

        Returns:
            1 to `count` leases; none after `timeout_s` seconds.
        Raises:
            StoreError: The worker is closed, or the run has ended.
        """
        wanted = arguments.count("count", count)
        timeout_s = check_timeout("timeout_s", timeout_s)
        self._writer.check_goes_on()
        take = partial(self._take, wanted)
        return wait_until(take, timeout_s, _POLL_S, self._writer.check_goes_on) or []

    def _take(self, count: int) -> list[FillLease] | None:
        """Lease up to `count` trajectories now; None if there are none."""
        table = self._table
        assert table.fills is not None
        with table.lock:
            lacking = absent(table, self._column.name)
            leases = table.fills.lease(self._late, lacking, count, self._lease_ns)
            # An id names the same trajectory only while the lineage is the same.
            named = [lease._replace(origin=table.lineage) for lease in leases]
            return [FillLease(self, lease, self._columns(lease.entry)) for lease in named] or None

    def _columns(self, slot: int) -> dict[str, Any]:
        """Copy the columns that a trajectory has. The caller holds the lock."""
        schema = self._table.schema
        rows = self._table.rows(slot)
        present = self._table.late_present(slot)
        columns = dict[str, Any]()
        for column in schema:
            if column.late and not present & schema.late_bits([column.name]):
                continue
            values = np.array(rows[column.name])
            if column.is_opaque:
                columns[column.name] = decode(values, column, column.name)
            else:
                columns[column.name] = as_numbers(values, column)
        return columns

    def _fill(self, lease: LeaseRecord, value: Any) -> None:
        self._writer.check_goes_on()
        fill_leased(self._table, self._column, lease, value)

    def close(self) -> None:
        """Return the leases that this process holds, and detach. Safe to call twice."""
        self._writer.close()

"""FillWorker: leases trajectories that lack a late column, such as a reward, and fills it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.records import FillClaim, SlotRetention
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.late_columns import absent, fill_each
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter


class FillLease:
    """A trajectory, `trajectory_id`, whose late column a worker computes from `columns` that are there."""

    def __init__(self, worker: FillWorker, table: Table, record: np.ndarray) -> None:
        """Copy the columns that are there. Requires the lock."""
        self._worker, self._record, self._lineage = worker, record, table.lineage
        self.trajectory_id, slot = record[[Resolution.ID, Resolution.SLOT]].tolist()
        rows, self.columns = table.rows(slot), dict[str, Any]()
        lacks = ~int(table.views["retention"][slot, SlotRetention.PRESENT])
        for column in table.schema:
            if not table.schema.late_bits([column.name]) & lacks:
                name, values = column.name, np.array(rows[column.name])
                value = decode(values, column, name) if column.is_opaque else as_numbers(values, column)
                self.columns[name] = value

    def fill(self, value: Any) -> None:
        """Write the column, as `Replay.fill`; ignored if the trajectory has it (counted), or is gone."""
        self._worker._writer.check_goes_on()
        table, column = self._worker._table, self._worker._column
        values = [value] if column.rows == "1" else value
        fill_each(table, column, self._record[None], values, self._lineage)


class FillWorker(ProcessBound):
    """Leases trajectories that lack a late column: `FillWorker.attach(config, "reward")`. One thread."""

    def __init__(self, writer: TrajectoryWriter, column: str, lease_s: float) -> None:
        self._writer, self._table, late = writer, writer.parts[0], writer.schema.late_columns
        if column not in [one.name for one in late]:
            writer.close()
            has = f"there are: {', '.join(one.name for one in late) or 'none'}"
            raise ConfigError(f"table {writer.table}: column {column!r}", "must be a late column", None, has)
        self._column = writer.schema[column]
        self._claims: np.ndarray = self._table.views["fill_claims"][late.index(self._column)]
        self._lease_ns = int(lease_s * 1e9)

    @classmethod
    def attach(
        cls, config: str | Path | Mapping[str, Any], column: str, lease_s: float = 600.0, **options: Any
    ) -> FillWorker:
        """Attach as a TrajectoryWriter; `lease_s` is the time of a lease, after which others may have it."""
        check_timeout("lease_s", lease_s)
        return cls(TrajectoryWriter.attach(config, **options), column, lease_s)

    def lease(self, count: int = 1, timeout_s: float = 60.0) -> list[FillLease]:
        """Lease up to `count` trajectories that lack the column and that no living worker holds.

        The smallest numbers of groups come first, else the oldest trajectories; after `timeout_s` none. A
        lease returns when its worker closes or dies, or after `lease_s`. Raises as `RolloutWorker.lease`.
        """
        wanted, timeout_s = arguments.count("count", count), check_timeout("timeout_s", timeout_s)
        table, claims = self._table, self._claims
        self._writer.check_goes_on()

        def take() -> list[FillLease] | None:
            now = time.monotonic_ns()
            with table.lock:
                records = absent(table, self._column.name)
                ids, slots = records[:, [Resolution.ID, Resolution.SLOT]].T
                owners, is_held = claims[slots, FillClaim.OWNER], claims[slots, FillClaim.ID] == ids + 1
                is_held &= claims[slots, FillClaim.DEADLINE] > now
                dead = [at for at in set(owners[is_held].tolist()) if not table.memory.is_alive(at)]
                chosen = np.nonzero(~is_held | np.isin(owners, dead))[0][:wanted]
                claims[slots[chosen], FillClaim.OWNER] = table.memory.peer
                claims[slots[chosen], FillClaim.DEADLINE] = now + self._lease_ns
                claims[slots[chosen], FillClaim.ID] = ids[chosen] + 1
                return [FillLease(self, table, record) for record in records[chosen]] or None

        return wait_until(take, timeout_s, 5e-3, self._writer.check_goes_on) or []

    def close(self) -> None:
        """Return the leases that this process holds, and detach. Safe to call twice."""
        self._writer.close()

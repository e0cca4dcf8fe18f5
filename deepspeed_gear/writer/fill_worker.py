"""FillWorker: leases trajectories that lack late columns, such as a reward, and fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.store.late_columns import absent, check_leased, fill_leased
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

_POLL_S = 5e-3


class FillLease:
    """A trajectory without late columns, leased by the worker that computes them.

    Attributes:
        trajectory_id: Its permanent id.
        columns: Copies of the columns that it has.
    """

    def __init__(self, worker: FillWorker, lease: LeaseRecord, columns: dict[str, Any]) -> None:
        self._worker = worker
        self._lease = lease
        self.trajectory_id = lease.number
        self.columns = columns

    def fill(self, *value: Any, **columns: Any) -> None:
        """Write the columns, as `Replay.fill`.

        A value is ignored if the trajectory has been evicted, and ignored and counted if another
        worker has filled its column.

        Args:
            *value: The value of a worker of one column.
            **columns: The values by column, of all columns of the worker.
        Raises:
            DataError: A value does not fit or is not finite, or a column lacks one; nothing is
                written.
            StoreError: The worker is closed, or the run has ended.
        """
        self._worker._fill(self._lease, value, columns)


class FillWorker(ProcessBound):
    """Leases trajectories that lack a late column, to fill it: a reward model, for example.

    `FillWorker.attach(config, "reward")` attaches to a store of this node. A worker of several
    columns leases what lacks one of them. One thread at a time.
    """

    def __init__(self, writer: TrajectoryWriter, names: Sequence[str], lease_s: float) -> None:
        late = writer.schema.late_columns
        known = [one.name for one in late]
        for name in names:
            if name not in known:
                writer.close()
                has = f"there are: {', '.join(known) or 'none'}"
                raise ConfigError(
                    f"table {writer.table}: column {name!r}", "must be a late column", None, has
                )
        self._writer = writer
        self._table = writer.parts[0]
        self._columns_to_fill = {name: writer.schema[name] for name in names}
        # Workers of the same columns take the same one for their leases.
        self._late = min(map(known.index, names))
        self._lease_ns = int(lease_s * 1e9)

    @classmethod
    def attach(
        cls,
        config: str | Path | Mapping[str, Any],
        column: str | Sequence[str],
        lease_s: float = 600.0,
        **options: Any,
    ) -> FillWorker:
        """Attach to the store of a run of this node.

        Args:
            config: As `TrajectoryWriter.attach`.
            column: Name of the late column, or names of several that are filled together.
            lease_s: How long a lease lasts, in seconds; then another worker may lease its
                trajectory.
            **options: As `TrajectoryWriter.attach`.
        Raises:
            ConfigError: The table has no such late column; or as `TrajectoryWriter.attach`.
            StoreError: As `TrajectoryWriter.attach`.
        """
        check_timeout("lease_s", lease_s)
        names = (column,) if isinstance(column, str) else tuple(column)
        if not names or len({*names}) < len(names):
            remedy = 'for example "reward", or ["teacher_ids", "teacher_logp"]'
            raise ConfigError("column", "must name one or more columns, each once", names, remedy)
        return cls(TrajectoryWriter.attach(config, **options), names, lease_s)

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
            lacking = absent(table, *self._columns_to_fill)
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
            if column.is_ragged:
                assert self._table.media is not None
                number = rows[column.name].reshape(1)
                items = self._table.media.ragged(column, number, nullcontext())
                columns[column.name] = items[int(number[0])]
                continue
            values = np.array(rows[column.name])
            if column.is_opaque:
                columns[column.name] = decode(values, column, column.name)
            else:
                columns[column.name] = as_numbers(values, column)
        return columns

    def _fill(self, lease: LeaseRecord, value: tuple[Any, ...], columns: Mapping[str, Any]) -> None:
        self._writer.check_goes_on()
        to_fill = self._columns_to_fill
        given = dict(columns)
        if len(value) == 1 and len(to_fill) == 1:
            given.update(dict.fromkeys(to_fill, value[0]))
        if given.keys() != to_fill.keys() or len(value) + len(columns) != len(to_fill):
            rule = f"must be given the worker's columns: {', '.join(to_fill)}"
            got = sorted(columns) or f"{len(value)} values without names"
            remedy = f"call lease.fill({', '.join(f'{name}=...' for name in to_fill)})"
            raise DataError("lease.fill", rule, got, remedy)
        if len(given) > 1:  # so that a value that does not fit leaves nothing written
            for name, column in to_fill.items():
                check_leased(self._table, column, lease, given[name])
        for name, column in to_fill.items():
            fill_leased(self._table, column, lease, given[name])

    def close(self) -> None:
        """Return the leases that this process holds, and detach. Safe to call twice."""
        self._writer.close()

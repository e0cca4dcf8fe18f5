"""Access to the tables of a replay by name, for additions and reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_gear.errors import ConfigError, StoreFullError
from deepspeed_gear.replay import table_edits
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.inserter import Inserter


class TableAccess:
    """Finds the tables of a replay by name, and adds to them.

    Args:
        parts: Of the replay.
    """

    def __init__(self, parts: ReplayParts) -> None:
        self._parts, self._config = parts, parts.plan.config
        self._inserters: dict[str, Inserter] = {}

    def find(self, name: str | None) -> Table:
        """Return a table; None: the only one that is sampled.

        Raises:
            ConfigError: There is no such table, or the name must be given.
        """
        tables, sampled = self._parts.tables, self._config.sampled_tables
        known = ", ".join(tables)
        if name is None and len(sampled) > 1:
            raise ConfigError("table", "must be given where there are several", None, f"one of {known}")
        name = sampled[0] if name is None else name
        if not isinstance(name, str) or name not in tables:
            raise ConfigError("table", f"must be one of {known}", name)
        return tables[name]

    @property
    def sampled(self) -> list[Table]:
        """The tables that are sampled."""
        return [self._parts.tables[name] for name in self._config.sampled_tables]

    def streams(self, table: Table) -> list[BatchStream]:
        """Return the streams that sample from a table."""
        return list(self._parts.streams[table.spec.name].values())

    def inserter(self, name: str | None) -> Inserter:
        """Return the inserter of a table."""
        table = self.find(name)
        if table.spec.name not in self._inserters:
            max_length = self._config.resolved_tables[table.spec.name].max_length
            made = table_edits.inserter_of(table, self.streams(table), max_length, self._parts.context)
            self._inserters[table.spec.name] = made
        return self._inserters[table.spec.name]

    def add(self, trajectory: Mapping[str, Any], name: str | None) -> int:
        """Store a trajectory, after releasing what the device has read. Returns its id."""
        inserter = self.inserter(name)
        self._parts.releases.settle()
        try:
            return inserter.add(trajectory)
        except StoreFullError:
            if not self._parts.releases.drain():
                raise
            return inserter.add(trajectory)

    def note_writer(self, table: Table) -> None:
        """Mark this process as a writer: its selections must not wait for items that it would add."""
        for stream in self.streams(table):
            stream.note_writer()

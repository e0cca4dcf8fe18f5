"""Pickles of trajectories: lists of dicts (CS285, hand_dapg), imitation's trajectories, dicts of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_gear.data.ingest.array_pickles import PICKLED, Record, load_pickle
from deepspeed_gear.data.ingest.npz import NpzReader, streams_of
from deepspeed_gear.errors import DataError


class PickleReader(NpzReader):
    """Reads a pickle of a list of trajectories, each a dict (or imitation's class) of arrays.

    A dict of arrays is read as an npz file of them is.
    """

    format = "pickle"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(2)
        return start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")

    def _load(self) -> Any:
        if not self.options.get("allow_pickle"):
            raise DataError(str(self.path), "must not be a pickle", None, PICKLED)
        found = load_pickle(str(self.path), self.path.read_bytes())
        if isinstance(found, (list, tuple)):
            return [self._flat(f"{self.path}: trajectory {i}", part) for i, part in enumerate(found)]
        return self._flat(str(self.path), found)

    def _flat(self, where: str, found: Any) -> dict[str, Any]:
        """Return the arrays of a trajectory; those of a dict in it have the key "dict/key"."""
        values = vars(found) if isinstance(found, Record) else found
        if not isinstance(values, dict):
            raise DataError(where, "must be a dict of arrays", type(found).__name__)
        arrays = {}
        for key, value in values.items():
            parts = value.items() if isinstance(value, dict) else (("", value),)
            for part, rows in parts:
                name = f"{key}/{part}" if part else str(key)
                arrays[name] = self._as_array(f"{where}: {name}", rows, self.path.stat().st_size)
        return arrays

    def _streams(self) -> Iterator[tuple[str, dict[str, Any], bool]]:
        if isinstance(self._arrays, dict):
            yield from streams_of(str(self.path), self._arrays)
            return
        for i, arrays in enumerate(self._arrays):
            yield f"trajectory {i}", arrays, True

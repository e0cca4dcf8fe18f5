"""Reader of d3rlpy's HDF5 files: arrays of each episode (version 2) or over all (version 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deepspeed_gear.data.ingest.decoding.hdf5_arrays import (
    RowReader,
    hdf5_arrays,
    hdf5_members,
    open_hdf5,
)
from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.data.ingest.step_arrays import ArrayReader, Streams
from deepspeed_gear.errors import DataError

_LISTS = ("columns", "num_episodes", "version")
_FIRST_ENDS = "episode_terminals"
_MOST_COLUMNS = 256
_WRITE = "write the file again with ReplayBuffer.dump of d3rlpy 2"


class D3rlpyReader(ArrayReader):
    """Reads files of `ReplayBuffer.dump` (version 2) and `MDPDataset.dump` (version 1).

    Version 2 has arrays `KEY_i` of episode i, or `KEY_i_j` for part j of a tuple of observations,
    which becomes the column `observation.j`. Version 1 has arrays over all episodes. There is no
    observation after the last step, so an episode that does not terminate loses that step, as its
    transitions in d3rlpy do.
    """

    format = "d3rlpy"
    takes = ()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        members = hdf5_members(path)
        return members.keys() >= {*_LISTS} or members.keys() >= {_FIRST_ENDS, "terminals"}

    def judged(self, key: str) -> tuple[str, ...]:
        return ("done",) if key == _FIRST_ENDS else super().judged(key)

    def open(self) -> None:
        """Check the layout and find the episodes.

        Cost: one pass over the flags of version 1; the shapes of version 2.
        """
        self._file = self.files.enter_context(open_hdf5(self.path))
        self._is_first = _FIRST_ENDS in self._file
        if self._is_first:
            self._describe()
            self.description["version"] = 1
            return
        for name in _LISTS:
            if not isinstance(self._file.get(name), h5py.Dataset):
                raise DataError(f"{self.path}: {name}", "must be in the file", None, _WRITE)
        kinds = (OSError, TypeError, ValueError, AttributeError, OverflowError)
        with DataError.on(
            f"{self.path}: {', '.join(_LISTS)}",
            "must be names of arrays, a number and a text",
            *kinds,
            remedy=DAMAGED,
        ):
            names = self._file["columns"]
            if names.ndim != 1 or len(names) > _MOST_COLUMNS:
                raise ValueError(f"columns of the shape {list(names.shape)}")
            self._keys = [name.decode() for name in names[:]]
            self._num_episodes = int(self._file["num_episodes"][()])
            version = self._file["version"][()].decode()
        if version == "2.0":
            raise DataError(
                f"{self.path}: version",
                "must be 2.1 or later, as for d3rlpy itself",
                version,
                _WRITE,
            )
        self._describe()
        self.description["version"] = version

    def _streams(self) -> Streams:
        if self._is_first:
            arrays = hdf5_arrays(self._file)
            yield "", {key: self._rows(key, node) for key, node in arrays.items()}, False
            return
        for number in range(self._num_episodes):
            parts: dict[str, Any] = {}
            for key in self._keys:
                name = f"{key}_{number}"
                node = self._file.get(name)
                if isinstance(node, h5py.Dataset) and node.shape is not None:
                    parts[key] = self._rows(name, node)
                    continue
                part = 0
                while isinstance(node := self._file.get(f"{name}_{part}"), h5py.Dataset):
                    parts[f"{key}/{part}"] = self._rows(f"{name}_{part}", node)
                    part += 1
                if not part:
                    raise DataError(
                        f"{self.path}: {name}",
                        f"must be in the file, which states {self._num_episodes} episodes",
                        None,
                        DAMAGED,
                    )
            yield f"episode {number}", parts, True

    def _rows(self, name: str, node: Any) -> Any:
        """Return an array with rows, or the single value."""
        if node.shape == () and node.dtype.kind != "O":
            return np.asarray(node[()])
        return RowReader(f"{self.path}: {name}", node)

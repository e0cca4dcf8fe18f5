"""D4RL HDF5: one array per quantity, all episodes after each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from deepspeed_gear.data.ingest.reader import RowReader, hdf5_arrays, hdf5_members, open_hdf5
from deepspeed_gear.data.ingest.step_arrays import KINDS, ArrayReader


class D4rlReader(ArrayReader):
    """Reads D4RL's layout, rows of all episodes in arrays at the root. They are read in blocks.

    Where `next_observations` are the shifted observations inside every episode, to the last bit,
    `observation` gets one more row per episode, the last next observation; otherwise both are stored. Without
    them the observation after the last step of an episode is not known: a terminated episode repeats its last
    one there, which nothing bootstraps from, and the last step of any other episode is left out, so that its
    observation is the last one. Other arrays with a row per step become columns (`infos/qpos` is
    `infos.qpos`); groups named `metadata` are left out.
    """

    format = "d4rl"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any(kind is h5py.Dataset and key in KINDS for key, kind in hdf5_members(path).items())

    def open(self) -> None:
        """Check the layout and find the episodes. Cost: one pass over the flags and observations."""
        file = self.files.enter_context(open_hdf5(self.path))
        found = {key: file.get(key) for key in KINDS} | hdf5_arrays(file)  # also where it is a link
        self._arrays = {
            key: RowReader(f"{self.path}: {key}", node)
            for key, node in found.items()
            if isinstance(node, h5py.Dataset) and "metadata" not in key.split("/")[:-1]
        }
        self._describe()

    def _streams(self) -> Iterator[tuple[str, dict[str, Any], bool]]:
        yield "", dict(self._arrays), False

"""HDF5 of steps: D4RL, an array per quantity of all episodes, and robomimic, a group for each of
them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.reader import (
    RowReader,
    hdf5_arrays,
    hdf5_members,
    open_hdf5,
    single_attributes,
)
from deepspeed_gear.data.ingest.source_checks import check_description
from deepspeed_gear.data.ingest.step_arrays import KINDS, ArrayReader, Streams
from deepspeed_gear.errors import DataError, known_names


class D4rlReader(ArrayReader):
    """Reads D4RL's layout, rows of all episodes in arrays at the root. They are read in blocks.

    Where `next_observations` are the shifted observations inside every episode, to the last bit,
    `observation` gets one more row per episode, the last next observation; otherwise both are
    stored. Without them the observation after the last step of an episode is not known: a
    terminated episode repeats its last one there, which nothing bootstraps from, and the last step
    of any other episode is left out, so that its observation is the last one. Other arrays with a
    row per step become columns (`infos/qpos` is `infos.qpos`); groups named `metadata` are left
    out.
    """

    format = "d4rl"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any(
            kind is h5py.Dataset and key in KINDS for key, kind in hdf5_members(path).items()
        )

    def open(self) -> None:
        """Check the layout and find the episodes. Cost: one pass over the flags and
        observations.
        """
        file = self.files.enter_context(open_hdf5(self.path))
        found = {key: file.get(key) for key in KINDS} | hdf5_arrays(file)  # also where it is a link
        self._arrays = {
            key: RowReader(f"{self.path}: {key}", node)
            for key, node in found.items()
            if getattr(node, "shape", None) is not None and "metadata" not in key.split("/")[:-1]
        }
        self._describe()

    def _streams(self) -> Streams:
        yield "", dict(self._arrays), False


class RobomimicReader(ArrayReader):
    """Reads robomimic's layout: data/demo_N/{actions,rewards,dones,states,obs,next_obs}, mask/NAME.

    Each group is a trajectory; `dones` inside it, which mark states of success, do not end it.
    """

    format = "robomimic"
    takes = (*ArrayReader.takes, "mask")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any(re.fullmatch(r"demo_\d+", name) for name in hdf5_members(path, "data"))

    def open(self) -> None:
        """Choose the demonstrations. Cost: a pass over observations and next ones, if there are
        some.
        """
        file = self.files.enter_context(open_hdf5(self.path))
        if not isinstance(file.get("data"), h5py.Group):
            raise DataError(f"{self.path}: data", "must be a group of demonstrations", sorted(file))
        self._data = file["data"]
        numbers = (re.fullmatch(r"demo_(\d+)", name) for name in self._data)
        self._names = [f"demo_{n}" for n in sorted(int(match[1]) for match in numbers if match)]
        masks = file.get("mask", {})
        if (mask := self.options.get("mask")) is not None:
            if mask not in masks:
                remedy = known_names(mask, sorted(masks))
                raise DataError(
                    f"{self.path}: --mask", "must be a filter of the file", mask, remedy
                )
            names = (
                masks[mask][i] for i in range(len(masks[mask]))
            )  # not all: a file may repeat a text
            chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in names}
            if unknown := sorted(chosen - set(self._names)):
                rule = "must name demonstrations of the file"
                raise DataError(f"{self.path}: mask/{mask}", rule, unknown[:8])
            self._names = [name for name in self._names if name in chosen]
        self._num_inner = 0
        self._describe()
        if self._num_inner:
            self.notes.append(
                f"dones before the last step of {self._num_inner} demonstrations end nothing"
            )
        environment = single_attributes(self._data).get("env_args", "{}")
        with DataError.on(f"{self.path}: data: env_args", "must be JSON", TypeError, ValueError):
            environment = parse_json(environment)
        check_description(f"{self.path}: data: env_args", environment)
        self.description.update(env_args=environment, masks=sorted(masks), mask=mask)

    def _streams(self) -> Streams:
        for name in self._names:
            arrays: dict[str, Any] = {
                key: RowReader(f"{self.path}: {name}/{key}", node)
                for key, node in hdf5_arrays(self._data[name]).items()
            }
            flags = [key for key in arrays if KINDS.get(key) == "done" and arrays[key].ndim]
            for key in (key for key in flags if arrays[key].dtype.kind != "O"):
                dones = arrays[key][()]
                self._num_inner += bool(np.any(dones[:-1]))
                arrays[key] = np.asarray(dones[-1:].reshape(-1)[0]) if dones.size else dones
            yield name, arrays, True

"""Readers of D4RL (HDF5 arrays over all episodes) and robomimic (an HDF5 group for each)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import (
    RowReader,
    hdf5_arrays,
    hdf5_members,
    open_hdf5,
    single_attributes,
)
from deepspeed_gear.data.ingest.source_checks import DAMAGED, check_description
from deepspeed_gear.data.ingest.source_names import KINDS
from deepspeed_gear.data.ingest.step_arrays import ArrayReader, Streams
from deepspeed_gear.errors import DataError, known_names


class D4rlReader(ArrayReader):
    """Reads D4RL's layout, arrays at the root with the rows of all episodes, in blocks.

    Where `next_observations` equal the shifted observations bit for bit inside every episode,
    `observation` gets one more row per episode, the last next observation; otherwise both are
    stored. Without them the observation after an episode's last step is unknown: a terminated
    episode repeats its last one there, which nothing bootstraps from; any other episode loses its
    last step, whose observation then is the last one. Other arrays with a row per step become
    columns (`infos/qpos` is `infos.qpos`); groups named `metadata` are left out.
    """

    format = "d4rl"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the root has an array of a usual name, or rewards of several agents."""
        return any(
            key in KINDS and (kind is h5py.Dataset or KINDS[key] == "reward")
            for key, kind in hdf5_members(path).items()
        )

    def open(self) -> None:
        """Check the layout and find the episodes.

        Cost: one pass over the flags and observations.
        """
        file = self.files.enter_context(open_hdf5(self.path))
        self.reads_ahead = True
        # `hdf5_arrays` does not follow links, so the usual names are looked up as well.
        nodes = {key: file.get(key) for key in KINDS} | hdf5_arrays(file)
        self._arrays = {
            key: RowReader(f"{self.path}: {key}", node)
            for key, node in nodes.items()
            if getattr(node, "shape", None) is not None and "metadata" not in key.split("/")[:-1]
        }
        self._describe()

    def _streams(self) -> Streams:
        yield "", dict(self._arrays), False


class RobomimicReader(ArrayReader):
    """Reads robomimic's layout: data/demo_N/{actions,rewards,dones,states,obs,next_obs}, mask/NAME.

    Each group is a trajectory; `dones` inside it mark states of success, and do not end it.
    """

    format = "robomimic"
    takes = (*ArrayReader.takes, "mask")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any(re.fullmatch(r"demo_\d+", name) for name in hdf5_members(path, "data"))

    def open(self) -> None:
        """Choose the demonstrations and check the layout.

        Cost: one pass over the observations, and over the next ones if there are any.
        """
        file = self.files.enter_context(open_hdf5(self.path))
        if not isinstance(file.get("data"), h5py.Group):
            raise DataError(
                f"{self.path}: data",
                "must be a group of demonstrations",
                sorted(file),
                "give a robomimic or LIBERO file, or name its layout with --format",
            )
        self._data = file["data"]
        numbers = (re.fullmatch(r"demo_(\d+)", name) for name in self._data)
        self._names = [f"demo_{n}" for n in sorted(int(match[1]) for match in numbers if match)]
        masks = file.get("mask", {})
        if (mask := self.options.get("mask")) is not None:
            if mask not in masks:
                raise DataError(
                    f"{self.path}: --mask",
                    "must be a filter of the file",
                    mask,
                    known_names(mask, sorted(masks)),
                )
            # Read one by one into a set: a file may repeat one text any number of times.
            names = (masks[mask][i] for i in range(len(masks[mask])))
            chosen = {name.decode() if isinstance(name, bytes) else str(name) for name in names}
            if unknown := sorted(chosen - set(self._names)):
                raise DataError(
                    f"{self.path}: mask/{mask}",
                    "must name demonstrations of the file",
                    unknown[:8],
                    "choose another mask, or leave --mask out",
                )
            self._names = [name for name in self._names if name in chosen]
        self._num_inner = 0
        self.reads_ahead = True
        self._describe()
        self.note("dones before the last step of {} demonstrations end nothing", self._num_inner)
        environment = single_attributes(self._data).get("env_args", "{}")
        with DataError.on(
            f"{self.path}: data: env_args", "must be JSON", TypeError, ValueError, remedy=DAMAGED
        ):
            environment = parse_json(environment)
        check_description(f"{self.path}: data: env_args", environment)
        self.description.update(env_args=environment, masks=sorted(masks), mask=mask)

    def _streams(self) -> Streams:
        self._num_inner = 0
        for name in self._names:
            arrays: dict[str, Any] = {
                key: RowReader(f"{self.path}: {name}/{key}", node)
                for key, node in hdf5_arrays(self._data[name]).items()
            }
            flags = [key for key in arrays if self.kind(key) == "done" and arrays[key].ndim]
            for key in (key for key in flags if arrays[key].dtype.kind != "O"):
                dones = arrays[key][()]
                self._num_inner += bool(np.any(dones[:-1]))
                arrays[key] = np.asarray(dones[-1:].reshape(-1)[0]) if dones.size else dones
            yield name, arrays, True

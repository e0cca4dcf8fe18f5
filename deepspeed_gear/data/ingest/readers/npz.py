"""Readers of npz files, OGBench's npz files, and pickles of arrays.

They are trajectories of imitation, CS285 and hand_dapg, recordings, and rollouts.
"""

from __future__ import annotations

import zipfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import deepspeed_gear.data.ingest.last_rows as last_rows
from deepspeed_gear.data.ingest.decoding.array_pickles import PICKLED, load_pickle
from deepspeed_gear.data.ingest.decoding.npz_entries import NPY, read_entry
from deepspeed_gear.data.ingest.source_checks import DAMAGED, first_bytes
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS, KEYS, KINDS
from deepspeed_gear.data.ingest.step_arrays import ArrayReader, Streams
from deepspeed_gear.data.sources.opened_files import zip_file
from deepspeed_gear.errors import DataError

_BUFFERS = b"stable_baselines3.common.buffers"
_HEAD_BYTES = 4096
# A buffer is a ring: the oldest step is at `pos` if it is full, and at 0 otherwise.
_EXPORT = (
    'b = load_from_pkl("FILE.pkl"); np.savez_compressed("FILE.npz", **{k: np.roll(v, -b.pos, 0)'
    "[-b.size():] for k, v in vars(b).items() if isinstance(v, np.ndarray)}), with load_from_pkl "
    "of stable_baselines3.common.save_util; docs/how-to/formats.md has a form for dict observations"
)


class NpzReader(ArrayReader):
    """Reads npz files; all arrays of a file are in memory.

    - With `indices`: imitation's layout. Trajectories one after the other, divided before the
      actions `indices`, each with one observation more than actions.
    - Object arrays of actions: an array for each trajectory.
    - Rewards or flags [T, N]: rollouts of N environments, whose arrays are [T, N, ...].
    - Otherwise: steps [T] of one environment.
    """

    format = "npz"
    takes = (*ArrayReader.takes, "allow_pickle")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        try:
            with zip_file(path) as archive:
                return any(name.endswith(NPY) for name in archive.namelist())
        except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
            return False

    def open(self) -> None:
        self._arrays = self._load()
        self._describe()

    @property
    def held_bytes(self) -> int:
        parts = self._arrays if isinstance(self._arrays, list) else [self._arrays or {}]
        return sum(array.nbytes for part in parts for array in part.values())

    def release(self) -> None:
        self._arrays = None
        self._num_bytes = 0
        # Decompression releases the interpreter's lock; unpickling does not.
        self.reads_ahead = not self.options.get("allow_pickle")

    def _load(self) -> Any:
        arrays = {}
        with (
            # A malformed file can raise any exception.
            DataError.on(str(self.path), "must be a readable npz file", Exception, remedy=DAMAGED),
            zip_file(self.path) as archive,
        ):
            for entry in archive.infolist():
                if entry.filename.endswith(NPY):
                    name = entry.filename.removesuffix(NPY)
                    unpickle = partial(self._unpickled, name)
                    arrays[name] = read_entry(f"{self.path}: {name}", archive, entry, unpickle)
        return arrays

    def _unpickled(self, name: str, content: bytes) -> Any:
        where = f"{self.path}: {name}"
        if self.options.get("allow_pickle"):
            file_bytes = self.path.stat().st_size
            return self._objects(where, load_pickle(where, content, self.expansion, file_bytes))
        if self.kind(name) in KEYS:
            raise DataError(where, "must not be Python objects", "object", PICKLED)
        return np.empty(0, object)  # left out with a note

    def _objects(self, where: str, values: Any) -> Any:
        if not isinstance(values, np.ndarray) or values.ndim != 1:
            raise DataError(
                where,
                "must be an array of a value for each trajectory",
                type(values).__name__,
                "store one value for each trajectory in an array",
            )
        objects = np.empty(len(values), object)
        for i, value in enumerate(values):
            objects[i] = self._as_array(where, value, self.path.stat().st_size)
        return objects

    def _streams(self) -> Streams:
        yield from self._divided(self._load() if self._arrays is None else self._arrays)

    def _divided(self, arrays: dict[str, Any]) -> Streams:
        kinds = {self.kind(key): array for key, array in reversed(arrays.items())}
        action = kinds.get("action")
        state = kinds.get("observation")
        if action is None or state is None or not action.ndim or not state.ndim:
            yield "", arrays, False  # which names what is missing
            return
        if "indices" in arrays:
            yield from self._of_indices(arrays, len(action))
            return
        if action.dtype.kind == "O":
            for i in range(len(action)):
                parts = {
                    k: np.asarray(a[i]) for k, a in arrays.items() if a.shape[:1] == action.shape
                }
                yield f"trajectory {i}", parts, True
            return
        flat = next((kinds[kind] for kind in ("reward", *FLAG_KINDS) if kind in kinds), np.empty(0))
        num = len(flat[0]) if flat.ndim == 2 and len(flat) else 0
        if num > 1 or (num == 1 and state.ndim > 2 and state.shape[1] == 1):
            rows = (len(flat), len(flat) + 1)
            divided = {
                k for k, a in arrays.items() if a.ndim > 1 and a.shape[1] == num and len(a) in rows
            }
            for i in range(num):
                parts = {key: a[:, i] if key in divided else a for key, a in arrays.items()}
                yield f"environment {i}", parts, False
            return
        yield "", arrays, False

    def _of_indices(self, arrays: dict[str, Any], num_steps: int) -> Streams:
        """Yield imitation's trajectories; `terminal` has one value for each."""
        indices = arrays["indices"]
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise DataError(
                f"{self.path}: indices",
                "must be the first actions of trajectories",
                list(indices.shape),
                "store the index of the first step of each trajectory but the first",
            )
        bounds = [0, *indices.tolist(), num_steps]
        if any(low >= high for low, high in pairwise(bounds)):
            raise DataError(
                f"{self.path}: indices",
                f"must rise, from 1 to {num_steps - 1}",
                bounds[1:-1][:8],
                "sort them, without repeats",
            )
        count = len(bounds) - 1
        for i, (low, high) in enumerate(pairwise(bounds)):
            parts = {}
            for key, array in arrays.items():
                if self.kind(key) == "done" and array.shape == (count,):
                    parts[key] = array[i]
                elif key != "indices":
                    # Observations may have one row more per trajectory: with actions [0, 2) and
                    # [2, 5), their rows are [0, 3) and [3, 7).
                    is_longer = self.kind(key) == "observation" and array.ndim > 0
                    more = int(is_longer and len(array) == num_steps + count)
                    parts[key] = (
                        array[low + i * more : high + (i + 1) * more] if array.ndim else array
                    )
            yield f"trajectory {i}", parts, True


class OgbenchReader(NpzReader):
    """Reads OGBench's npz files, whose `terminals` mark the last row of a trajectory.

    That row holds only the observation after the last action, and no trajectory terminates: a
    trajectory of N rows has N-1 steps and is truncated.
    """

    format = "ogbench"
    takes = ("allow_pickle",)
    last_step = last_rows.OBSERVATION

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether terminals alone divide an npz file into trajectories of equal lengths.

        Terminal states would not come at equal distances. A file with rewards, time limits or next
        observations is none of OGBench.
        """
        if not NpzReader.recognises(path):
            return False
        with zip_file(path) as archive:
            entries = {entry.filename.removesuffix(NPY): entry for entry in archive.infolist()}
            others = {KINDS[key] for key in entries.keys() & KINDS.keys()}
            if others != {"observation", "action", "terminated"} or "terminals" not in entries:
                return False
            try:
                flags = read_entry(str(path), archive, entries["terminals"], np.frombuffer)
            except (DataError, ValueError):
                return False
        if flags.ndim != 1 or not len(flags) or not flags[-1]:
            return False
        lengths = np.diff(np.flatnonzero(flags), prepend=-1)
        return len(lengths) > 1 and lengths[0] > 1 and bool((lengths == lengths[0]).all())

    def judged(self, key: str) -> tuple[str, ...]:
        return ("truncated",) if key == "terminals" else super().judged(key)


class PickleReader(NpzReader):
    """Reads a pickle of a list of trajectories, each a dict (or imitation's class) of arrays.

    A dict of arrays is read as an npz file of them is.
    """

    format = "pickle"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return first_bytes(path, 2) in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

    def _load(self) -> Any:
        if _BUFFERS in first_bytes(self.path, _HEAD_BYTES):
            raise DataError(
                str(self.path),
                "must not be a buffer pickled by Stable-Baselines3, which is an object with code",
                None,
                f"where Stable-Baselines3 is installed, this writes its arrays: {_EXPORT}",
            )
        if not self.options.get("allow_pickle"):
            raise DataError(str(self.path), "must not be a pickle", None, PICKLED)
        content = self.path.read_bytes()
        value = load_pickle(str(self.path), content, self.expansion, len(content))
        if isinstance(value, (list, tuple)):
            return [
                self._flat(f"{self.path}: trajectory {i}", part) for i, part in enumerate(value)
            ]
        return self._flat(str(self.path), value)

    def _flat(self, where: str, trajectory: Any) -> dict[str, Any]:
        """Return the arrays of a trajectory by key; an array in a nested dict has "dict/key"."""
        if not isinstance(trajectory, dict):
            raise DataError(
                where,
                "must be a dict of arrays",
                type(trajectory).__name__,
                "store each trajectory as a dict of arrays",
            )
        arrays = {}
        for key, value in trajectory.items():
            for part, rows in value.items() if isinstance(value, dict) else (("", value),):
                name = f"{key}/{part}" if part else str(key)
                arrays[name] = self._as_array(f"{where}: {name}", rows, self.path.stat().st_size)
        return arrays

    def _divided(self, arrays: Any) -> Streams:
        if isinstance(arrays, dict):
            yield from super()._divided(arrays)
            return
        for i, part in enumerate(arrays):
            yield f"trajectory {i}", part, True

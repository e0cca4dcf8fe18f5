"""D4RL HDF5: one array per quantity, all episodes after each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.reader import (
    Reader,
    RowReader,
    column_name,
    convert,
    end_episode,
    make_column,
    open_hdf5,
    read_rows,
)
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

_NEXT = "next_observations"
_COLUMNS = {  # name and role
    "observations": ("observation", "observation"),
    _NEXT: ("next_observation", "observation"),
    "actions": ("action", "action"),
    "rewards": ("reward", "reward"),
    "terminals": ("terminated", "terminated"),
    "timeouts": ("truncated", "truncated"),
}
_REQUIRED = [key for key in _COLUMNS if key != _NEXT]
_FLAGS = ("terminals", "timeouts")
_BLOCK_ROWS = 1 << 16
_REMEDIES = {
    "terminals": "add an array of zeros if no episode ends in a terminal state",
    "timeouts": "add an array of zeros if no episode ends by a time limit",
}


class D4rlReader(Reader):
    """Reads D4RL's layout. An episode ends where `terminals` or `timeouts` is set.

    The two flags become `terminated` and `truncated`. A fragment at the end of the file without either is
    truncated. Where `next_observations` are the shifted observations inside every episode, to the last bit,
    `observation` gets one more row per episode, the last next observation; otherwise both are stored. Without
    them the observation after the last step of an episode is not known: a terminated episode repeats its last
    one there, which nothing bootstraps from, and the last step of any other episode is left out, so that its
    observation is the last one. Other arrays with a row per step become columns (`infos/qpos` is
    `infos.qpos`); groups named `metadata` are left out.
    """

    format = "d4rl"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not path.is_file() or not h5py.is_hdf5(path):
            return False
        with open_hdf5(path) as file:
            return any(isinstance(file.get(key), h5py.Dataset) for key in _REQUIRED)

    def open(self) -> None:
        """Check the layout and find the episodes. Cost: one pass over the flags and observations."""
        self._file = self.files.enter_context(open_hdf5(self.path))
        self._check_required()
        extras = self._choose_extras()
        self._ends, self._terminates, trailing = self._find_episodes()
        self._has_next = _NEXT in self._file
        self._shifted = self._has_next and self._next_is_shifted()
        is_own = self._has_next and not self._shifted  # next observations are a column
        kept = {key: name for key, (name, _) in _COLUMNS.items() if key != _NEXT or is_own}
        self._names = {**kept, **extras}
        self.columns = tuple(self._column(key, name) for key, name in self._names.items())
        self.num_steps = len(self._file["rewards"])
        is_cut = np.zeros(len(self._ends), bool) if self._has_next else ~self._terminates
        self.num_steps -= int(is_cut.sum())
        num_episodes = int((np.diff(self._ends, prepend=0) > is_cut).sum())
        self.description.update(episodes=num_episodes, steps=self.num_steps, shifted=self._shifted)
        if trailing:
            self.notes.append(f"the last {trailing} steps have no end flag: kept as a truncated episode")
        if not self._has_next:
            self.notes.append(
                f"there is no {_NEXT}: the last step of {is_cut.sum()} episodes that do not terminate is "
                "left out, as the observation after it is not known"
            )
        elif not self._shifted:
            self.notes.append(f"{_NEXT} are not the shifted observations: stored as a column of their own")

    def _where(self, key: str) -> str:
        return f"{self.path}: {key}"

    def _reader(self, key: str) -> RowReader:
        return RowReader(self._where(key), self._file[key])

    def _check_required(self) -> None:
        for key in _REQUIRED:
            if key not in self._file:
                found = sorted(self._file)
                remedy = _REMEDIES.get(key, "the file is not D4RL data")
                raise DataError(self._where(key), "must be in the file", found, remedy)
        length = None
        for key in (key for key in (*_REQUIRED, _NEXT) if key in self._file):
            array = self._file[key]
            if not isinstance(array, h5py.Dataset) or not array.ndim:
                raise DataError(self._where(key), "must be an array with a row per step")
            length = len(array) if length is None else length
            if len(array) != length:
                raise DataError(self._where(key), f"must have {length} rows as observations has", len(array))
            if key in ("rewards", "terminals", "timeouts") and array.shape not in ((length,), (length, 1)):
                raise DataError(self._where(key), "must be one value per step", list(array.shape))
        if not length:
            raise DataError(str(self.path), "must hold at least one step", 0, "the data set is empty")
        if _NEXT in self._file and self._file[_NEXT].shape != self._file["observations"].shape:
            rule = f"must have the shape of observations, {list(self._file['observations'].shape)}"
            raise DataError(self._where(_NEXT), rule, list(self._file[_NEXT].shape))

    def _choose_extras(self) -> dict[str, str]:
        """Return the optional arrays that are kept: column name by key."""
        found: dict[str, str] = {}

        def visit(key: str, node: Any) -> None:
            parts = key.split("/")
            known = parts[0] in _COLUMNS or "metadata" in parts[:-1]
            if isinstance(node, h5py.Dataset) and not known:
                found[key] = column_name(*parts)

        self._file.visititems(visit)
        kept = {key: name for key, name in sorted(found.items()) if self.select(name)}
        length = len(self._file["rewards"])
        for key in list(kept):
            array = self._file[key]
            if not array.ndim:
                self.notes.append(f"{key} is a single value and not a column: left out")
                del kept[key]
            elif len(array) != length:
                rule = f"must have {length} rows as observations has"
                raise DataError(self._where(key), rule, len(array), "leave it out with --columns")
        return kept

    def _find_episodes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], int]:
        """Return the end row of each episode, whether it terminates, and the length of an unflagged one."""
        length, ends, terminates = len(self._file["rewards"]), [], []
        flag = Column("flag", "bool", role="terminated")
        for low in range(0, length, _BLOCK_ROWS):
            high = min(low + _BLOCK_ROWS, length)
            rows = {key: read_rows(self._where(key), self._file[key], low, high) for key in _FLAGS}
            terminals, timeouts = (convert(self._where(key), rows[key].reshape(-1), flag) for key in _FLAGS)
            last = np.flatnonzero(terminals | timeouts)
            ends.append(low + 1 + last)
            terminates.append(terminals[last])
        found, flags = np.concatenate(ends).astype(np.int64), np.concatenate(terminates)
        trailing = length - (int(found[-1]) if len(found) else 0)
        if trailing:
            found, flags = np.append(found, length), np.append(flags, False)
        return found, flags, trailing

    def _next_is_shifted(self) -> bool:
        """Return whether next_observations[i] is observations[i + 1], bit for bit, inside all episodes."""
        observations = self._file["observations"]
        if observations.dtype != self._file[_NEXT].dtype:
            return False
        here, there = self._reader("observations"), self._reader(_NEXT)
        for low in range(0, len(observations) - 1, here.block_rows):
            high = min(low + here.block_rows, len(observations) - 1)
            inside = np.ones(high - low, dtype=np.bool_)
            first, last = np.searchsorted(self._ends, (low + 1, high + 1))
            inside[self._ends[first:last] - 1 - low] = False
            if here(low + 1, high + 1)[inside].tobytes() != there(low, high)[inside].tobytes():
                return False
        return True

    def _column(self, key: str, name: str) -> Column:
        array, (_, role) = self._file[key], _COLUMNS.get(key, (name, "other"))
        shape = () if role in ("reward", "terminated", "truncated") else array.shape[1:]
        has_last = key == "observations" and (self._shifted or not self._has_next)
        return make_column(self._where(key), name, array.dtype, shape, role, "T+1" if has_last else "T")

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        readers = {key: self._reader(key) for key in self._names}
        following = self._reader(_NEXT) if self._shifted else None
        low = 0
        for number, (high, terminates) in enumerate(zip(self._ends.tolist(), self._terminates, strict=True)):
            end = high if self._has_next or terminates else high - 1  # of the steps that are kept
            if end == low:
                low = high
                continue
            arrays = {}
            for (key, read), column in zip(readers.items(), self.columns, strict=True):
                if column.rows == "T":
                    rows = read(low, end)
                elif following is not None:
                    rows = np.concatenate([read(low, end), following(high - 1, high)])
                else:
                    rows = read(low, high)
                    rows = np.concatenate([rows, rows[-1:]]) if terminates else rows
                where = f"{self._where(key)}, episode {number}"
                arrays[column.name] = convert(where, rows.reshape(len(rows), *column.shape), column)
            end_episode(arrays)
            yield f"episode {number}", arrays
            low = high

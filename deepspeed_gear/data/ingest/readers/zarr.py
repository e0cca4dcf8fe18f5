"""Reader of zarr stores of demonstrations: Diffusion Policy's replay buffers, UMI."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.decoding.hdf5_arrays import RowReader
from deepspeed_gear.data.ingest.decoding.zarr_arrays import METADATA, ZarrArray, ZarrFiles
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_checks import DAMAGED, Expansion
from deepspeed_gear.data.ingest.source_columns import (
    FLAGS,
    LEAVE_OUT,
    column_name,
    convert,
    in_order_of_roles,
    make_column,
)
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS, KINDS, meaning
from deepspeed_gear.data.ingest.step_blocks import (
    EpisodeBounds,
    RowsByName,
    episode_blocks,
    episode_name,
)
from deepspeed_gear.data.sources.opened_files import is_zip, zip_file
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

_ENDS = "meta/episode_ends"
_ROOT = re.compile(rf"(.*/)?{_ENDS}/({'|'.join(map(re.escape, METADATA))})")
_LOSSY = 20  # factor by which images may compress more than other chunks


class ZarrReader(Reader):
    """Reads a store with arrays `data/NAME` over all episodes and their ends, `meta/episode_ends`.

    It is a folder or a zip file, in version 2 or 3. All columns have T rows, because no observation
    is recorded after the last action. Arrays of the usual names have their usual roles; other
    floats and images are observations. Arrays of `meta` with a value per episode become columns of
    one value per trajectory.
    """

    format = "zarr"
    early_roles = ("observation", "action", "reward", "terminated", "truncated")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return bool(_roots(path))

    def open(self) -> None:
        """Read the ends of episodes and the metadata of all arrays.

        Cost: the metadata; no chunk of `data` is read, but for the indexes of sharded arrays.
        """
        roots = _roots(self.path)
        if len(roots) != 1:
            raise DataError(
                f"{self.path}: {_ENDS}",
                "must be in the source once: the row after the last one of each episode",
                roots or None,
                "give the folder of one store" if roots else "write it, as Diffusion Policy does",
            )
        is_folder = self.path.is_dir()
        self._store = ZarrFiles(self.path / roots[0] if is_folder else self.path, self.files)
        prefix = "" if is_folder else roots[0]
        keys = self._store.arrays(prefix)
        if _ENDS not in keys:
            raise DataError(f"{self._store.path}: {_ENDS}", "must be an array", "a group", DAMAGED)
        self._ends = self._read_ends(keys[_ENDS])
        self._readers: dict[str, RowReader] = {}
        self._places: dict[str, str] = {}  # of each array, for errors
        self._per_episode: dict[str, NDArray[Any]] = {}
        data = "data/"
        names = {name[len(data) :]: key for name, key in keys.items() if name.startswith(data)}
        self.names.compare(name.replace("/", ".") for name in names)
        arrays = [*self._arrays(names)]
        self._check_sizes([array for _, array in arrays])
        columns = [*self._columns(arrays), *self._columns_of_episodes(keys)]
        self.columns = in_order_of_roles([*columns, *FLAGS])
        self.num_steps = int(self._ends[-1])
        self.description.update(
            episodes=len(self._ends), steps=self.num_steps, zarr_format=self._format
        )

    def _read_ends(self, key: str) -> NDArray[np.int64]:
        where = f"{self._store.path}: {_ENDS}"
        array = ZarrArray(self._store, key)
        self._format = array.format
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            rule = "must be whole numbers, one for each episode, and at least one"
            raise DataError(where, rule, f"{array.dtype} {list(array.shape)}", DAMAGED)
        self.expansion.check(where, array.num_bytes, self._store.num_bytes)
        ends = array[()].astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        if (lengths < 1).any():
            at = int(np.argmax(lengths < 1))
            rule = f"must rise: episode {at} has no step"
            raise DataError(where, rule, ends[max(0, at - 1) : at + 1].tolist(), DAMAGED)
        return ends

    def _arrays(self, names: dict[str, str]) -> Iterator[tuple[str, ZarrArray]]:
        """Yield the column's name and the array of each one that is kept."""
        others = []
        for name, key in names.items():
            column = column_name(*meaning(self.names.name(name.replace("/", "."))))
            if column == "start" or (column not in FLAG_KINDS and not self.select(column)):
                continue
            if column in self._places:
                rule = "must come from one array only"
                raise DataError(f"{self._store.path}: {column}", rule, name, LEAVE_OUT)
            where = f"{self._store.path}: data/{name}"
            array = ZarrArray(self._store, key)
            if not array.is_numeric:
                others.append(name)
                continue
            if array.shape[:1] != (self._ends[-1],):
                rule = f"must have {self._ends[-1]} rows, as {_ENDS} states"
                raise DataError(
                    where,
                    rule,
                    list(array.shape),
                    f"{LEAVE_OUT} if its rows are no steps; otherwise the store is incomplete",
                )
            self._places[column] = where
            yield column, array
        self.note("{}: not arrays of numbers, left out", others)

    def _check_sizes(self, arrays: list[ZarrArray]) -> None:
        where = str(self._store.path)
        plain = sum(array.num_bytes for array in arrays if not array.codecs.is_image)
        lossy = sum(array.num_bytes for array in arrays if array.codecs.is_image)
        self.expansion.check(where, plain, self._store.num_bytes)
        Expansion(_LOSSY * self.expansion.most).check(where, lossy, self._store.num_bytes)

    def _columns(self, arrays: list[tuple[str, ZarrArray]]) -> Iterator[Column]:
        taken = []
        for name, array in arrays:
            where = self._places[name]
            self._readers[name] = RowReader(where, array)
            if absent := array.num_absent():
                self.notes.append(
                    f"{name}: {absent} chunks are absent and hold the fill value {array.fill}"
                )
            if name in FLAG_KINDS:
                continue
            head = name.split(".")[0]
            # "next_observation" and "final_observation" have the role of observations.
            role = head.rpartition("_")[2] if KINDS.get(head) == head else "other"
            shape = array.shape[1:]
            is_image = len(shape) == 3 and shape[-1] in (1, 3, 4)
            if role == "other" and (array.dtype.kind == "f" or is_image):
                role = "observation"
                taken.append(name)
            yield make_column(where, name, array.dtype, shape, role)
        self.note("taken as observations: {} (--role NAME=other changes it)", taken)
        if not {"terminated", "done"} & self._readers.keys():
            self.notes.append("there are no end flags: every episode is truncated at its last step")

    def _columns_of_episodes(self, keys: dict[str, str]) -> Iterator[Column]:
        unused = []
        for key in sorted(keys):
            name = column_name(*key.removeprefix("meta/").split("/"))
            if key == _ENDS or not key.startswith("meta/") or not self.select(name):
                continue
            array = ZarrArray(self._store, keys[key])
            is_other = not array.is_numeric or array.shape[:1] != self._ends.shape
            if is_other or name in self._readers or name in KINDS:
                unused.append(key)
                continue
            where = f"{self._store.path}: {key}"
            self.expansion.check(where, array.num_bytes, self._store.num_bytes)
            column = make_column(where, name, array.dtype, array.shape[1:], rows="1")
            self._per_episode[name] = convert(where, array[()], column)
            yield column
        self.note("{}: not one number for each episode, left out", unused)

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        for block in self.blocks():
            for one in block.divided():
                yield one.name_of(0), one.arrays

    def blocks(self) -> Iterator[TrajectoryBlock]:
        """Yield the episodes in order, in blocks of about 2 MiB."""
        bounds = EpisodeBounds(np.append(0, self._ends[:-1]), self._ends, self._ends)
        row_bytes = sum(column.row_bytes for column in self.columns)
        yield from episode_blocks(bounds, row_bytes, 0, self._read, self._block)

    def _read(self, bounds: EpisodeBounds) -> RowsByName:
        low = int(bounds.low[0])
        high = int(bounds.high[-1])
        return {name: reader[low:high] for name, reader in self._readers.items()}

    def _block(self, bounds: EpisodeBounds, number: int, rows: RowsByName) -> TrajectoryBlock:
        columns = {column.name: column for column in self.columns}
        arrays = {}
        for name, values in rows.items():
            if name in columns and name not in FLAG_KINDS:
                where = f"{self._places[name]}, {episode_name(number)}"
                arrays[name] = convert(where, values, columns[name])
        arrays.update(self._flags(bounds, number, rows))
        own = slice(number, number + len(bounds))
        arrays.update({name: values[own] for name, values in self._per_episode.items()})
        return TrajectoryBlock(
            partial(episode_name, number),
            bounds.lengths,
            arrays,
            {column.name: column.rows for column in self.columns},
        )

    def _flags(self, bounds: EpisodeBounds, number: int, rows: RowsByName) -> RowsByName:
        """Return the flags of consecutive episodes, whose ends `meta/episode_ends` states.

        `done` before the last step marks states of success, as robomimic has it.
        """
        low = bounds.low[0]
        last = bounds.high - 1 - low
        given = {}
        for kind in ("terminated", "truncated", "done"):
            given[kind] = np.zeros(int(last[-1]) + 1, np.bool_)
            if kind not in rows:
                continue
            where = f"{self._places[kind]}, {episode_name(number)}"
            flags = convert(where, rows[kind], FLAGS[0])
            if flags.ndim != 1:
                raise DataError(where, "must have one flag per row", list(flags.shape), DAMAGED)
            given[kind][last] = flags[last]
            is_inner = flags & ~given[kind]
            if kind != "done" and is_inner.any():
                rule = "must be set at the last step of an episode only"
                key = self._places[kind].rpartition(": data/")[2]
                raise DataError(
                    where,
                    rule,
                    f"row {low + int(np.argmax(is_inner))}",
                    f"correct the flag, or {_ENDS}; --rename {key}=dones ends nothing",
                )
        terminated = given["terminated"] | (given["done"] & ~given["truncated"])
        truncated = given["truncated"]
        truncated[last] |= ~terminated[last]
        return {"terminated": terminated, "truncated": truncated}


def _roots(path: Path) -> list[str]:
    """Return the folders of a source, or of a zip file, that are stores: "" or "NAME/"."""
    if path.is_dir():
        inside = ["", *sorted(f"{one.name}/" for one in path.iterdir() if one.is_dir())]
        names = [Path(_ENDS, name) for name in METADATA]
        return [root for root in inside if any((path / root / name).is_file() for name in names)]
    if not is_zip(path):
        return []
    try:
        with zip_file(path) as archive:
            found = [_ROOT.fullmatch(name) for name in archive.namelist()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return []
    return sorted({match[1] or "" for match in found if match})

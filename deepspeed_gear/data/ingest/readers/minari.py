"""Reader of Minari: an HDF5 group, or a folder of Arrow or Parquet, for each episode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import (
    hdf5_arrays,
    hdf5_members,
    open_hdf5,
    read_rows,
    single_attributes,
)
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.readers.exported import SCHEMA_KEY, read_schema
from deepspeed_gear.data.ingest.source_checks import (
    Expansion,
    check_description,
    pyarrow_for,
    read_source_json,
)
from deepspeed_gear.data.ingest.source_columns import (
    LEAVE_OUT,
    column_name,
    convert,
    end_episode,
    make_column,
    stored_dtype,
)
from deepspeed_gear.data.ingest.table_blocks import read_table, readable
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

Key = tuple[str, ...]
_MAIN_FILE = "main_data.hdf5"
_METADATA_FILE = "metadata.json"
_TABLE_FORMS = ("arrow", "parquet")
GROUPS = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "truncations": "truncated",
}
_DESCRIBED = (
    "dataset_id",
    "minari_version",
    "algorithm_name",
    "author",
    "code_permalink",
    "description",
)
_JPEG = b"\xff\xd8\xff"


class Hdf5Store:
    """The episodes of one HDF5 file: its groups `episode_<n>`, in numerical order."""

    def __init__(self, path: Path, file: h5py.File, expansion: Expansion) -> None:
        self._path = path
        self._file = file
        self._expansion = expansion
        matches = (re.fullmatch(r"episode_(\d+)", name) for name in file)
        self.numbers = sorted(int(match[1]) for match in matches if match)

    def where(self, number: int, *key: str) -> str:
        """Return the name of a part of an episode in errors."""
        return f"{self._path}: episode_{number}" + "".join(f"/{part}" for part in key)

    def facts(self, number: int) -> dict[str, Any]:
        """Return the metadata of an episode: id, seed and other numbers.

        `total_steps` is returned even if it is no number, for its check.
        """
        attributes = single_attributes(self._file[f"episode_{number}"])
        return {
            name: value
            for name, value in attributes.items()
            if isinstance(value, np.generic) or name == "total_steps"
        }

    def keys(self, number: int) -> list[Key]:
        """Return the paths of all arrays of an episode."""
        return [tuple(key.split("/")) for key in hdf5_arrays(self._file[f"episode_{number}"])]

    def load(self, number: int, key: Key) -> NDArray[Any]:
        """Read an array: T + 1 rows for observations, T or T + 1 for infos, T for the rest."""
        array = self._file["/".join((f"episode_{number}", *key))]
        where = self.where(number, *key)
        if not array.ndim:
            raise DataError(where, "must have a row per step", None, LEAVE_OUT)
        if h5py.check_vlen_dtype(array.dtype) == np.uint8:
            file_bytes = array.file.id.get_filesize()
            frames = self._ragged(where, array, file_bytes)
            return decode_images(where, frames, self._expansion, file_bytes)
        stored_dtype(where, array.dtype, LEAVE_OUT)  # before texts of any length are read
        rows = read_rows(where, array, 0, len(array))
        packed = (
            array.dtype == np.uint8
            and array.ndim == 2
            and len(rows)
            and rows[0, :3].tobytes() == _JPEG
        )
        if packed:
            frames = [row.tobytes() for row in rows]
            return decode_images(where, frames, self._expansion, array.file.id.get_filesize())
        return rows

    def _ragged(self, where: str, array: h5py.Dataset, file_bytes: int) -> list[bytes]:
        """Read rows of bytes of any length, and check their sum as they are read.

        Rows may share their content in the file, so the file's size does not bound it.
        """
        rows: list[bytes] = []
        num_bytes = 0
        for number in range(len(array)):
            (row,) = read_rows(where, array, number, number + 1)
            num_bytes += row.nbytes
            self._expansion.check(where, num_bytes, file_bytes)
            rows.append(row.tobytes())
        return rows


class MinariReader(Reader):
    """Reads Minari data sets; episodes come in numerical order.

    `infos` become columns `infos.<name>`. `observation` has one more row than steps. An episode
    whose last step has no flag is truncated. `episode_id` and `seed`, one value per trajectory,
    exist if every episode has them.
    """

    format = "minari"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return _is_minari(path / "data") or _is_minari(path)
        return any(re.fullmatch(r"episode_\d+", name) for name in hdf5_members(path))

    def open(self) -> None:
        """Check the layout by the first episode, and the metadata by all."""
        path = self.path
        folder = path.parent if path.is_file() else path
        if _is_minari(path / "data"):
            folder = path / "data"
        metadata: dict[str, Any] = {}
        if (folder / _METADATA_FILE).is_file():
            metadata = read_source_json(folder / _METADATA_FILE)
        if "data_format" not in metadata:  # a file of another program, with the same name
            metadata = {}
        if metadata.get("total_episodes") == 0:
            raise DataError(str(path), "must hold at least one episode", 0, "the data set is empty")
        self._store = self._open_store(folder, metadata)
        self.reads_ahead = True
        numbers = self._store.numbers
        if not numbers:
            raise DataError(
                str(path),
                "must hold at least one episode",
                0,
                "the data set is empty, or not in Minari's layout",
            )
        if metadata.get("total_episodes", len(numbers)) != len(numbers):
            raise DataError(
                str(path),
                f"must hold the {metadata['total_episodes']} episodes that {_METADATA_FILE} counts",
                len(numbers),
                "the data set is incomplete; download it again",
            )
        facts = [self._store.facts(number) for number in numbers]
        with DataError.on(
            f"{path}: total_steps",
            "must be a whole number in every episode",
            TypeError,
            ValueError,
            OverflowError,
            remedy="the data set is damaged; download it again",
        ):
            self.num_steps = sum(int(fact.get("total_steps", 0)) for fact in facts)
        self._names = {key: _name_of(key) for key in self._ordered_keys(numbers[0])}
        self._keys = {
            k: n for k, n in self._names.items() if "/".join(k) in GROUPS or self.select(n)
        }
        self._values: dict[str, NDArray[np.int64]] = {}
        for name, fact in (("episode_id", "id"), ("seed", "seed")):
            having = [one[fact] for one in facts if isinstance(one.get(fact), (int, np.integer))]
            if not self.select(name):
                continue
            if len(having) == len(facts):  # seeds beyond int64 keep their 64 bits
                values = np.array([int(value) % (1 << 64) for value in having], dtype=np.uint64)
                self._values[name] = values.view(np.int64)
            elif having:
                some = f"{len(having)} of {len(facts)} episodes"
                self.notes.append(f"{fact} is known for {some} only: left out")
        columns = [self._column(numbers[0], key, name) for key, name in self._keys.items()]
        self._columns = dict(zip(self._keys, columns, strict=True))
        self.columns = (*columns, *(Column(name, "int64", rows="1") for name in self._values))
        if isinstance(stated := metadata.get(SCHEMA_KEY), str):
            self._restore(*read_schema(f"{folder / _METADATA_FILE}: {SCHEMA_KEY}", stated))
        self.counted = tuple({"episode_id"} & self._values.keys())
        known = {key: metadata[key] for key in _DESCRIBED if key in metadata}
        check_description(f"{folder / _METADATA_FILE}: {', '.join(known)}", known)
        self.description.update(known, episodes=len(numbers), steps=self.num_steps)

    def _restore(self, schema: Schema, whole: Schema | None) -> None:
        """Restore the columns' order and options from gear export, if they fit the episodes."""
        stated = {c.name: c for c in schema}
        given = {c.name: c for c in self.columns}
        plain = {name: replace(c, late=False, allow_nan=False) for name, c in stated.items()}
        if {name: c for name, c in plain.items() if name in given} != given:
            self.notes.append(
                f"{SCHEMA_KEY} of {_METADATA_FILE} does not fit the episodes: not used"
            )
            return
        self.columns = tuple(column for name, column in stated.items() if name in given)
        self._columns = {key: stated[column.name] for key, column in self._columns.items()}
        self.has_schema = True
        self.whole = whole

    def _open_store(self, folder: Path, metadata: dict[str, Any]) -> Hdf5Store | TableStore:
        form = "hdf5" if self.path.is_file() else metadata.get("data_format", "hdf5")
        if form in _TABLE_FORMS:
            return TableStore(folder, form, metadata, self.expansion)
        if form != "hdf5":
            raise DataError(
                f"{folder / _METADATA_FILE}: data_format",
                f"must be one of hdf5, {', '.join(_TABLE_FORMS)}",
                form,
                "convert it with Minari, or download it in one of these formats",
            )
        file = self.path if self.path.is_file() else folder / _MAIN_FILE
        if not file.is_file():
            raise DataError(
                str(file), "must exist", None, "the data set is incomplete; download it again"
            )
        return Hdf5Store(file, self.files.enter_context(open_hdf5(file)), self.expansion)

    def _ordered_keys(self, number: int) -> list[Key]:
        """Return an episode's keys: groups in Minari's order, then by name, and tuples by index."""
        keys = self._store.keys(number)
        for group in GROUPS:
            is_array = group in ("rewards", "terminations", "truncations")
            if not any(key == (group,) if is_array else key[0] == group for key in keys):
                groups = sorted({key[0] for key in keys})
                raise DataError(
                    self._store.where(number, group),
                    "must be in the episode",
                    groups,
                    "the data set is incomplete; download it again",
                )
        rank = {group: i for i, group in enumerate(GROUPS)}

        def natural(part: str) -> tuple[int, str]:
            # Names come before indices, and _index_10 after _index_9.
            match = re.fullmatch(r"(?:_index_)?(\d+)", part)
            return (int(match[1]), "") if match else (-1, part)

        return sorted(keys, key=lambda key: (rank.get(key[0], len(rank)), [*map(natural, key)]))

    def _column(self, number: int, key: Key, name: str) -> Column:
        length = len(self._store.load(number, ("rewards",)))
        array = self._load(number, key, length)
        role = GROUPS.get(key[0], "other")
        final = role == "observation" or (role == "other" and len(array) == length + 1)
        where = self._store.where(number, *key)
        return make_column(where, name, array.dtype, array.shape[1:], role, "T+1" if final else "T")

    def _load(self, number: int, key: Key, length: int) -> NDArray[Any]:
        """Read an array and check its number of rows, for an episode of `length` steps."""
        array = self._store.load(number, key)
        legal = (length,) if key[0] in GROUPS else (length, length + 1)
        legal = (length + 1,) if key[0] == "observations" else legal
        where = self._store.where(number, *key)
        if len(array) not in legal:
            rows = " or ".join(str(n) for n in legal)
            raise DataError(
                where,
                f"must have {rows} rows for {length} rewards",
                len(array),
                "the episode is incomplete; download the data set again",
            )
        if key[0] in ("rewards", "terminations", "truncations") and array.size != length:
            raise DataError(
                where,
                "must be one value per step",
                list(array.shape),
                "store one number for each step",
            )
        return array

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        for i, number in enumerate(self._store.numbers):
            present = set(self._ordered_keys(number))
            length = len(self._store.load(number, ("rewards",)))
            arrays: dict[str, NDArray[Any]] = {
                name: values[i] for name, values in self._values.items()
            }
            for key in sorted(present ^ self._names.keys()):
                if key in self._keys or self.select(_name_of(key)):
                    where = self._store.where(number, *key)
                    raise DataError(where, "must be in every episode", None, LEAVE_OUT)
            for key, column in self._columns.items():
                where = self._store.where(number, *key)
                arrays[column.name] = convert(where, self._load(number, key, length), column)
            end_episode(arrays)
            yield f"episode {number}", arrays


def _name_of(key: Key) -> str:
    parts = (re.sub(r"^_index_(\d+)$", r"\1", part) for part in key[1:])
    return column_name(GROUPS.get(key[0], key[0]), *parts)


def _is_minari(folder: Path) -> bool:
    if (folder / _MAIN_FILE).is_file():
        return True
    with suppress(DataError):
        return "data_format" in read_source_json(folder / _METADATA_FILE)
    return False


class TableStore:
    """The episodes of folders `<n>` with a table each; methods as those of `Hdf5Store`.

    Row T + 1 of a table is padding, except in observations and infos.
    """

    def __init__(
        self, folder: Path, form: str, metadata: Mapping[str, Any], expansion: Expansion
    ) -> None:
        self._arrow = pyarrow_for(str(folder), f"must be read with pyarrow, as its form is {form}")
        self._folder = folder
        self._form = form
        self._expansion = expansion
        names = (entry.name for entry in folder.iterdir() if entry.is_dir())
        self.numbers = sorted(int(name) for name in names if name.isdigit())
        self._shapes: dict[Key, tuple[int, ...]] = {}
        for group in ("observation", "action"):
            space = metadata.get(f"{group}_space")
            if space is not None:
                where = f"{folder / _METADATA_FILE}: {group}_space"
                kinds = ValueError, TypeError, KeyError, AttributeError, RecursionError
                with DataError.on(
                    where,
                    "must be a serialised space",
                    *kinds,
                    remedy="the data set is damaged; download it again",
                ):
                    space = parse_json(space) if isinstance(space, str) else space
                    self._shapes.update(leaf_shapes(space, f"{group}s"))
        self._leaves = lru_cache(maxsize=1)(self._read)  # one episode is kept in memory

    def where(self, number: int, *key: str) -> str:
        return f"{self._folder / str(number)}" + (f": {'/'.join(key)}" if key else "")

    def facts(self, number: int) -> dict[str, Any]:
        path = self._folder / str(number) / _METADATA_FILE
        return read_source_json(path) if path.is_file() else {}

    def keys(self, number: int) -> list[Key]:
        return list(self._leaves(number))

    def load(self, number: int, key: Key) -> NDArray[Any]:
        leaves = self._leaves(number)
        where = self.where(number, *key)
        if key not in leaves:
            raise DataError(
                where,
                "must be in the episode",
                sorted({group for group, *_ in leaves}),
                "the data set is incomplete; download it again",
            )
        array, field = leaves[key]
        if key[0] not in ("observations", "infos"):
            array = array.slice(0, len(array) - 1)
        if array.null_count:
            step = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise DataError(f"{where}, step {step}", "must not be null", None, LEAVE_OUT)
        if self._arrow.types.is_binary(array.type):
            files = (self._folder / str(number)).glob(f"*.{self._form}")
            size = sum(file.stat().st_size for file in files)
            return decode_images(where, array.to_pylist(), self._expansion, size)
        if not self._arrow.types.is_fixed_size_list(array.type):
            return np.asarray(array.to_numpy(zero_copy_only=False))
        size = array.type.list_size
        text = (field.metadata or {}).get(b"shape", str(size).encode())
        # That of its space, else of its field's metadata, else flat.
        shape = self._shapes.get(key, tuple(int(n) for n in text.decode().split(",") if n))
        if int(np.prod(shape)) != size:
            raise DataError(
                where, f"must have rows of shape {list(shape)} as in the space", [size], LEAVE_OUT
            )
        return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(
            len(array), *shape
        )

    def _read(self, number: int) -> dict[Key, Any]:
        path = self._folder / str(number)
        files = sorted(path.glob(f"*.{self._form}"))
        if not files:
            raise DataError(
                str(path), f"must hold a .{self._form} file", None, "download the data set again"
            )
        with readable(files[0]):
            table = self._arrow.concat_tables([read_table(file, self._expansion) for file in files])
        steps = self.facts(number).get("total_steps", table.num_rows - 1)
        if table.num_rows != steps + 1:
            raise DataError(
                str(path),
                f"must have {steps + 1} rows for {steps} steps",
                table.num_rows,
                "the data set is incomplete; download it again",
            )
        leaves: dict[Key, Any] = {}

        def visit(key: Key, array: Any, field: Any) -> None:
            if self._arrow.types.is_struct(array.type):
                for i, child in enumerate(array.type):
                    visit((*key, child.name), array.field(i), child)
            else:
                leaves[key] = (array, field)

        for field, column in zip(table.schema, table.combine_chunks().columns, strict=True):
            visit(
                (field.name,),
                column.chunk(0) if column.num_chunks else column.combine_chunks(),
                field,
            )
        return leaves


def leaf_shapes(space: Mapping[str, Any], *key: str) -> dict[Key, tuple[int, ...]]:
    """Return the row shape of every leaf of a serialised gymnasium space, by its path."""
    if (kind := space.get("type")) in ("Dict", "Tuple"):
        children = space["subspaces"].items() if kind == "Dict" else enumerate(space["subspaces"])
        shapes = [leaf_shapes(child, *key, str(name)) for name, child in children]
        return {path: shape for leaves in shapes for path, shape in leaves.items()}
    read: dict[Any, Callable[[], tuple[int, ...]]] = {
        "Box": lambda: tuple(space["shape"]),
        "MultiDiscrete": lambda: np.shape(space["nvec"]),
        "MultiBinary": lambda: tuple(np.atleast_1d(space["n"]).tolist()),
    }
    return {key: read[kind]()} if kind in read else {}

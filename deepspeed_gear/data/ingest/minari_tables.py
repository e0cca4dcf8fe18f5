"""Minari's Arrow and Parquet form: a folder per episode, a struct column per dict or tuple space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.arrow_messages import decompressed_bytes
from deepspeed_gear.data.dataset_files import read_json
from deepspeed_gear.data.ingest.minari_episodes import EpisodeStore, Key, decode_jpeg
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import DataError

_METADATA_FILE = "metadata.json"
_ARROW_MAGIC_BYTES = 8  # of a file, before the messages
_BATCH_ROWS = 1024


class TableStore(EpisodeStore):
    """Folders `<n>` with one table each, of T + 1 rows; the last is padding but in observations and infos."""

    def __init__(self, folder: Path, form: str, metadata: Mapping[str, Any], expansion: Expansion) -> None:
        self._folder, self._form, self._expansion = folder, form, expansion
        names = (entry.name for entry in folder.iterdir() if entry.is_dir())
        self.numbers = sorted(int(name) for name in names if name.isdigit())
        self._shapes: dict[Key, tuple[int, ...]] = {}
        for group in ("observation", "action"):
            space = metadata.get(f"{group}_space")
            if space is not None:
                try:
                    space = parse_json(space) if isinstance(space, str) else space
                    self._shapes.update(leaf_shapes(space, f"{group}s"))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    where = f"{folder / _METADATA_FILE}: {group}_space"
                    raise DataError(where, "must be a serialised space", None, repr(error)) from error
        self._loaded: tuple[int, dict[Key, Any]] | None = None

    def where(self, number: int, *key: str) -> str:
        return f"{self._folder / str(number)}" + (f": {'/'.join(key)}" if key else "")

    def facts(self, number: int) -> dict[str, Any]:
        path = self._folder / str(number) / _METADATA_FILE
        return read_json(path) if path.is_file() else {}

    def keys(self, number: int) -> list[Key]:
        return list(self._leaves(number))

    def load(self, number: int, key: Key) -> NDArray[Any]:
        leaves = self._leaves(number)
        where = self.where(number, *key)
        if key not in leaves:
            raise DataError(where, "must be in the episode", sorted({found[0] for found in leaves}))
        array, field = leaves[key]
        if key[0] not in ("observations", "infos"):
            array = array.slice(0, len(array) - 1)
        return self._decode(where, key, array, field)

    def close(self) -> None:
        self._loaded = None

    def _leaves(self, number: int) -> dict[Key, Any]:
        """Return (array, field) of every leaf of an episode; one episode is kept in memory."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = (number, _flatten(self._read(number)))
        return self._loaded[1]

    def _read(self, number: int) -> Any:
        try:
            import pyarrow
            import pyarrow.dataset
        except ImportError:
            rule = f"must be read with pyarrow, as its form is {self._form}"
            raise DataError(str(self._folder), rule, None, "pip install pyarrow") from None
        path = self._folder / str(number)
        files = sorted(path.glob(f"*.{self._form}"))
        if not files:
            raise DataError(str(path), f"must hold a .{self._form} file", None, "download the data set again")
        try:
            table = self._read_bounded(path, files)
        except (pyarrow.ArrowException, OSError) as error:
            remedy = "the file is damaged or incomplete; download the data set again"
            raise DataError(
                str(files[0]), f"must be a readable {self._form} file", str(error), remedy
            ) from error
        steps = self.facts(number).get("total_steps", table.num_rows - 1)
        if table.num_rows != steps + 1:
            raise DataError(str(path), f"must have {steps + 1} rows for {steps} steps", table.num_rows)
        return table.combine_chunks()

    def _read_bounded(self, path: Path, files: list[Path]) -> Any:
        """Read tables, as long as they are not too large for their files.

        A record batch of Arrow is checked before it is decompressed. Parquet is read in small batches, since
        a value that is repeated takes no bytes there.
        """
        import pyarrow
        import pyarrow.dataset

        file_bytes = sum(file.stat().st_size for file in files)
        if self._form == "arrow":
            for file in files:
                with pyarrow.memory_map(str(file)) as source:
                    source.seek(_ARROW_MAGIC_BYTES)
                    stated = sum(
                        decompressed_bytes(message) or 0
                        for message in pyarrow.ipc.MessageReader.open_stream(source)
                        if message.type in ("record batch", "dictionary")
                    )
                self._expansion.check(str(file), stated, file.stat().st_size)
        read = pyarrow.dataset.dataset([str(file) for file in files], format=self._form)
        ahead = {"batch_size": _BATCH_ROWS, "batch_readahead": 1, "fragment_readahead": 1}
        batches, num_bytes = [], 0
        for batch in read.scanner(**ahead).to_batches():
            num_bytes += batch.nbytes
            self._expansion.check(str(path), num_bytes, file_bytes)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, read.schema)

    def _decode(self, where: str, key: Key, array: Any, field: Any) -> NDArray[Any]:
        import pyarrow

        if array.null_count:
            raise DataError(
                where, "must not have empty values", array.null_count, "leave it out with --columns"
            )
        if pyarrow.types.is_binary(array.type):
            return decode_jpeg(where, array.to_pylist(), self._expansion)
        if not pyarrow.types.is_fixed_size_list(array.type):
            return np.asarray(array.to_numpy(zero_copy_only=False))
        size, shape = array.type.list_size, self._shape(key, field, array.type.list_size)
        if int(np.prod(shape)) != size:
            raise DataError(where, f"must have rows of shape {list(shape)} as in the space", [size])
        return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(len(array), *shape)

    def _shape(self, key: Key, field: Any, size: int) -> tuple[int, ...]:
        """Return the shape of a row: of its space, else of its field's metadata, else flat."""
        if key in self._shapes:
            return self._shapes[key]
        text = (field.metadata or {}).get(b"shape")
        if text is None:
            return (size,)
        return tuple(int(n) for n in text.decode().split(",") if n)


def _flatten(table: Any) -> dict[Key, Any]:
    import pyarrow

    leaves: dict[Key, Any] = {}

    def visit(key: Key, array: Any, field: Any) -> None:
        if pyarrow.types.is_struct(array.type):
            for i, child in enumerate(array.type):
                visit((*key, child.name), array.field(i), child)
        else:
            leaves[key] = (array, field)

    for field in table.schema:
        column = table.column(field.name)
        visit((field.name,), column.chunk(0) if column.num_chunks else column.combine_chunks(), field)
    return leaves


def leaf_shapes(space: Mapping[str, Any], *key: str) -> dict[Key, tuple[int, ...]]:
    """Return the row shape of every leaf of a serialised gymnasium space, by its path."""
    kind = space.get("type")
    if kind == "Dict":
        children = space["subspaces"].items()
    elif kind == "Tuple":
        children = ((str(i), child) for i, child in enumerate(space["subspaces"]))
    elif kind == "Box":
        return {key: tuple(space["shape"])}
    elif kind == "MultiDiscrete":
        return {key: np.shape(space["nvec"])}
    elif kind == "MultiBinary":
        return {key: tuple(np.atleast_1d(space["n"]).tolist())}
    else:
        return {}
    return {path: shape for name, child in children for path, shape in leaf_shapes(child, *key, name).items()}

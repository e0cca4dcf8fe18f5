"""Writing the parts of a data set: contiguous slices, each a data set of its own."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import (
    REMAKE,
    STATS_FILE,
    DatasetPart,
    FileRecord,
    read_json,
    write_json,
)
from deepspeed_gear.data.dataset_writer import DatasetWriter, unwritable
from deepspeed_gear.errors import DataError

_BLOCK_BYTES = 4 * 1024 * 1024
_PARTIAL = ".partial"


def write_parts(
    dataset: Dataset, folder: str | Path, bounds: NDArray[np.int64], overwrite: bool = False
) -> list[Dataset]:
    """Write every part of a data set to FOLDER/part-0, FOLDER/part-1 ...

    Each part is complete before it gets its name; the last one only if all bytes read are those written when
    the data set was made. On a failure, all that was written is removed.

    Args:
        bounds: First trajectory of each part, and their number. [count + 1], int64, strictly growing.
        overwrite: Replace the parts that are there; anything else is never replaced.
    Returns:
        The parts, opened, in order.
    Raises:
        DataError: The data set is a part or has changed, a part would be empty, or `folder` exists or cannot
            be written.
    Cost: reads and writes all bytes once, a few MiB at a time.
    """
    folder = Path(folder)
    if dataset.part is not None:
        raise DataError(str(dataset.path), "must be a whole data set", str(dataset.part), "split the whole")
    are_ends = len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == len(dataset)
    if not are_ends or (np.diff(bounds) < 1).any():
        rule = f"must divide its {len(dataset)} trajectories into parts of at least one"
        raise DataError(str(dataset.path), rule, np.asarray(bounds).tolist(), "ask for fewer parts")
    _make_folder(folder, overwrite)
    digests = {column.name: hashlib.sha256() for column in dataset.schema}
    parts: list[Dataset] = []
    try:
        for index in range(len(bounds) - 1):
            with _PartWriter(dataset, folder, index, bounds, overwrite) as writer:
                writer.copy(digests)
                for column in dataset.schema if index == len(bounds) - 2 else ():
                    if digests[column.name].hexdigest() != dataset.digest_of(column):
                        rule = "must hold the bytes that were written"
                        raise DataError(f"{dataset.path}: column {column.name}", rule, None, REMAKE)
                parts.append(writer.close())
    except BaseException:
        for part in parts:  # together with older parts they could pass for a complete set
            shutil.rmtree(part.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    for left in _entries(folder):
        if not left.name.endswith(_PARTIAL) and int(left.name.removeprefix("part-")) >= len(parts):
            shutil.rmtree(left)
    return parts


def _make_folder(folder: Path, overwrite: bool) -> None:
    """Make the folder, or raise DataError unless it holds nothing but parts and may be replaced."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        if not overwrite:
            remedy = "choose another OUT or overwrite it (--overwrite)"
            raise DataError(str(folder), "must not exist yet", None, remedy) from None
        is_folder = folder.is_dir() and not folder.is_symlink()
        if not is_folder or len(_entries(folder)) < len(list(folder.iterdir())):
            rule = "must hold parts only to be overwritten"
            raise DataError(str(folder), rule, None, "choose another OUT") from None
    except OSError as error:
        raise unwritable(folder, error) from error


def _entries(folder: Path) -> list[Path]:
    """Return the parts in a folder, and what an interrupted split left of them."""
    found = []
    for path in folder.glob("part-*"):
        number = path.name.removeprefix("part-").removesuffix(_PARTIAL)
        if path.is_dir() and not path.is_symlink() and number.isdecimal():
            found.append(path)
    return found


class _PartWriter(DatasetWriter):
    """Write one part by copying rows; statistics, split and source are those of the whole."""

    def __init__(
        self, whole: Dataset, folder: Path, index: int, bounds: NDArray[np.int64], overwrite: bool
    ) -> None:
        path = folder / f"part-{index}"
        super().__init__(path, whole.schema, split=whole.split, overwrite=overwrite, source=whole.source)
        self._whole = whole
        self._first, self._end = int(bounds[index]), int(bounds[index + 1])
        self._part = DatasetPart(
            index=index,
            count=len(bounds) - 1,
            first=self._first,
            end=self._end,
            trajectories=len(whole),
            rows=whole.num_rows,
            steps=whole.num_steps,
            longest=whole.longest,
            whole=whole.fingerprint,
        )

    def __enter__(self) -> _PartWriter:
        return self

    def copy(self, digests: Mapping[str, Any]) -> None:
        """Copy the part's rows, and add them to a running digest of each column."""
        whole = self._whole
        first, end = whole.row_of(self._first), whole.row_of(self._end)
        for column in whole.schema:
            low, high = (self._first, self._end) if column.rows == "1" else (first, end)
            rows = max(1, _BLOCK_BYTES // max(1, column.row_bytes))
            for at in range(low, high, rows):
                block = whole.columns[column.name][at : min(at + rows, high)]
                self._files[column.name].append(block)
                digests[column.name].update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        self._lengths.extend(whole.lengths[self._first : self._end].tolist())
        self._num_rows = end - first

    def _write_statistics(self, extents: NDArray[np.int64]) -> FileRecord:
        return write_json(self._partial / STATS_FILE, read_json(self._whole.path / STATS_FILE))

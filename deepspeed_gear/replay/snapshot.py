"""What has changed in tables, as checksummed files of a checkpoint.

A folder per table: the rows of its trajectories in stored order and their slots, unless they are those of a
data set, and of each stream the masses or priorities of its latest cut, the changes that wait for the next
one, and the cuts that nobody has used yet. So what is loaded continues with the batches that would have come,
although prefetching was ahead and an epoch was under way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.errors import CheckpointError, StoreFullError
from deepspeed_gear.replay.sizes import TRAIN
from deepspeed_gear.schema import Schema
from deepspeed_gear.selection import saved
from deepspeed_gear.selection.stream import Stream
from deepspeed_gear.store.table import COMMITTED, FIRST_ROW, NEXT_ID, NUM_ROWS, RETIRED, STATE, Table

FORMAT = 1
MANIFEST = "manifest.json"
_BLOCK = 1 << 22


def save_table(table: Table, streams: list[Stream], folder: Path, batches: int) -> None:
    """Write a table's content. Wants the lock.

    Args:
        table: A table with a capacity.
        streams: Those that draw from it.
        folder: Where to; replaced as a whole.
        batches: Global batches of the training stream that were used.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    slots = np.nonzero(np.isin(table.slots[:, STATE], (COMMITTED, RETIRED)))[0]
    if table.spec.dataset is None:
        _save_rows(table, slots, partial)
    for stream in streams:
        for name, array in saved.export(stream, slots, batches).items():
            np.save(partial / f"stream.{stream.spec.name}.{name}.npy", array)
    manifest = {
        "format": FORMAT,
        "schema": table.spec.schema.to_json(),
        "next_id": int(table.control[NEXT_ID]),
        **{stream.spec.name: stream.spec.describe() for stream in streams if stream.spec.name == TRAIN},
        "files": {path.name: _sha256(path) for path in sorted(partial.glob("*.npy"))},
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def _save_rows(table: Table, slots: np.ndarray, folder: Path) -> None:
    records = table.slots[slots]
    np.save(folder / "slots.npy", records)
    for column in table.spec.schema:
        data, path = table.columns[column.name], folder / f"column.{column.name}.npy"
        if column.rows == "1":
            np.save(path, data[slots])
            continue
        shape = (int(records[:, NUM_ROWS].sum()), *column.shape)
        out = (
            np.lib.format.open_memmap(path, mode="w+", dtype=column.numpy_dtype, shape=shape)
            if shape[0]
            else None
        )
        if out is None:
            np.save(path, np.empty(shape, column.numpy_dtype))
            continue
        at = 0
        for first, count in records[_in_rows(records)][:, [FIRST_ROW, NUM_ROWS]].tolist():
            out[at : at + count] = data[first : first + count]
            at += count
        out.flush()


def load_table(table: Table, streams: list[Stream], folder: Path) -> None:
    """Replace a table's content by a saved one. Wants the lock.

    Raises:
        CheckpointError: A file is missing or changed, or the schema differs; nothing has changed.
        StoreFullError: The table is too small; nothing has changed.
    """
    manifest = check_saved(folder, table.spec.schema)
    if table.spec.dataset is None:
        slots = _load_rows(table, folder, int(manifest["next_id"]))
    else:
        slots = np.arange(len(table.slots))
    for stream in streams:
        prefix = f"stream.{stream.spec.name}."
        names = [name for name in manifest["files"] if name.startswith(prefix)]
        content = {name[len(prefix) : -len(".npy")]: np.load(folder / name) for name in names}
        saved.restore(stream, slots, content)


def _load_rows(table: Table, folder: Path, next_id: int) -> np.ndarray:
    """Replace slots and rows; return the slots that are used."""
    records = np.load(folder / "slots.npy")
    rows = int(records[:, NUM_ROWS].sum())
    if len(records) > len(table.slots) or rows > table.spec.num_rows:
        raise StoreFullError(
            f"table {table.spec.name}",
            f"must hold the {len(records)} trajectories and {rows} rows of the checkpoint",
            f"{len(table.slots)} and {table.spec.num_rows}",
            "raise its capacity",
        )
    slots = np.arange(len(records))
    order = _in_rows(records)
    firsts = np.empty(len(records), np.int64)
    firsts[order] = np.cumsum(records[order, NUM_ROWS]) - records[order, NUM_ROWS]
    table.slots[:, STATE] = 0
    table.slots[slots] = records
    table.slots[slots, FIRST_ROW] = firsts
    for column in table.spec.schema:
        saved = np.load(folder / f"column.{column.name}.npy", mmap_mode="r")
        table.columns[column.name][: len(saved)] = saved
    table.restored(next_id)
    return slots


def _in_rows(records: np.ndarray) -> np.ndarray:
    """Return the order of extents by their rows, which a tree over rows must find again. [n], int64."""
    return np.argsort(records[:, FIRST_ROW], kind="stable")


def check_saved(folder: Path, schema: Schema) -> dict[str, Any]:
    """Check a saved table's files and schema; return its manifest.

    Raises:
        CheckpointError: Something is missing, changed, or of another schema.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(str(folder / MANIFEST), "must be readable", None, str(error)) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(str(folder), f"must have format {FORMAT}", manifest.get("format"))
    if Schema.from_json(manifest["schema"]) != schema:
        raise CheckpointError(str(folder), f"must have the schema {schema}", manifest["schema"])
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise CheckpointError(str(path), "must be as it was saved", None, "take another checkpoint")
    return manifest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

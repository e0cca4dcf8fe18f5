"""Table files: the content of tables, as checksummed files of a checkpoint.

A folder per table: the rows and slots of its trajectories in stored order, unless they are a data set's, and
of each stream the masses or priorities of its latest selection, the changes that wait for the next one, and
the unused selections. So a loaded run continues with the same batches as the saved one, also with prefetched
selections and within an epoch.

The folder of a table that is spread over nodes has a folder per shard, shard-0 to shard-<S - 1>, each like
that of a table in one store. Shards are loaded into any number of nodes (`reshard.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.checkpoint.reshard import SavedShard, ShardDivision, groups_of, in_rows, merge, packed
from deepspeed_gear.errors import CheckpointError, StoreFullError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.table import Table

FORMAT = 2


# ---- saving --------------------------------------------------------------------------------------


def save_table(
    table: Table, streams: list[BatchStream], part: Path, batches: int, save_id: str
) -> dict[str, str]:
    """Write the content of a store: a table, or its shard of one. Requires the lock.

    Args:
        streams: The streams that sample from it.
        part: Folder of the table, between `save_folders.begin` and `save_folders.publish`.
        batches: Used global batches of the training stream.
    Returns:
        The SHA-256 of the manifest, by its path in `part`.
    """
    more: dict[str, Any] = {}
    shard, to, name = table.spec.shard, part, save_folders.MANIFEST
    if shard is not None:
        to, more = shard_folder(part, shard.index), {"shard": asdict(shard)}
        name = f"{to.name}/{name}"
        to.mkdir()
    with nullcontext() if table.groups is None else table.groups.kept():
        return {name: _write(table, streams, to, batches, {"save": save_id, **more})}


def shard_folder(folder: Path, index: int) -> Path:
    """Return the folder of a shard in its table's folder."""
    return folder / f"shard-{index}"


def _write(table: Table, streams: list[BatchStream], to: Path, batches: int, more: dict[str, Any]) -> str:
    is_saved = np.isin(table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
    for stream in streams:
        is_saved[stream.state.skipped_slots] = True
    slots = np.nonzero(is_saved)[0]
    if table.spec.dataset is None:
        _save_rows(table, slots, to)
        if table.spec.shard is not None:  # priority updates and selections refer to slots of the store
            np.save(to / "numbers.npy", slots)
    for stream in streams:
        for name, array in stream.state.export(slots, batches).items():
            np.save(to / f"stream.{stream.spec.name}.{name}.npy", array)
    manifest = {
        "format": FORMAT,
        "schema": table.spec.schema.to_json(),
        "next_id": int(table.control[Control.NEXT_ID]),
        "inserted": table.control[[Control.INSERTED, Control.STEPS_INSERTED]].tolist(),
        **({} if table.spec.group is None else {"group": table.spec.group.to_json()}),
        **{stream.spec.name: stream.spec.describe() for stream in streams if stream.spec.name == TRAIN},
        **more,
    }
    return save_folders.complete(to, manifest)


def _save_rows(table: Table, slots: np.ndarray, folder: Path) -> None:
    records = table.slots[slots]
    skipped = ~np.isin(records[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
    records[skipped, Slot.STATE] = SlotState.FREE
    records[skipped, Slot.NUM_STEPS : Slot.NUM_ROWS + 1] = 0
    np.save(folder / "slots.npy", records)
    np.save(folder / "retention.npy", table.views["retention"][slots])
    if table.groups is not None:
        np.save(folder / "groups.npy", table.groups.export(slots))
        np.save(folder / "group_counts.npy", table.groups.counts)
        np.save(folder / "consumed_groups.npy", table.groups.consumed)
    for column in table.spec.schema:
        data, path = table.columns[column.name], folder / file_of(column.name)
        if column.rows == "1":
            np.save(path, data[slots])
            continue
        shape = (int(records[:, Slot.NUM_ROWS].sum()), *column.shape)
        out = (
            np.lib.format.open_memmap(path, mode="w+", dtype=column.numpy_dtype, shape=shape)
            if shape[0]
            else None
        )
        if out is None:
            np.save(path, np.empty(shape, column.numpy_dtype))
            continue
        at = 0
        for first, count in records[in_rows(records)][:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist():
            out[at : at + count] = data[first : first + count]
            at += count
        out.flush()


# ---- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint: its folders, and all contents except rows.

    Args:
        folders: Of its shards; of the table itself where it was in one store.
        columns: Of each folder its columns by name, mapped by `open_rows`: a save that replaces the files
            meanwhile changes nothing.
    """

    folders: list[Path]
    manifests: list[dict[str, Any]]
    shards: list[SavedShard]
    whole: SavedShard
    columns: list[dict[str, np.ndarray]] = field(default_factory=list)


def read_table(folder: Path, schema: Schema | None = None) -> SavedTable:
    """Read a table of a checkpoint except its rows, and check the files.

    Args:
        schema: The schema that it must have; None: any.
    Raises:
        CheckpointError: A file is missing or changed, or the schema differs.
    """
    folders, manifests = find_shards(folder)
    for one, manifest in zip(folders, manifests, strict=True):
        if schema is not None and Schema.from_json(manifest["schema"]) != schema:
            raise CheckpointError(str(one), f"must have the schema {schema}", manifest["schema"])
    shards = [_read_shard(one, manifest) for one, manifest in zip(folders, manifests, strict=True)]
    return SavedTable(folders, manifests, shards, merge(shards))


def find_shards(folder: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the folders of a table's shards, or its own where it was in one store, and their manifests.

    Raises:
        CheckpointError: One is missing, of another format, or not of the same table as the others.
    """
    shards = save_folders.shard_manifests(folder)
    if (folder / save_folders.MANIFEST).exists() or not shards:
        return [folder], [_manifest_of(folder)]
    count = _shard_of(shards[0].parent, _manifest_of(shards[0].parent))[1]
    folders = [shard_folder(folder, index) for index in range(count)]
    manifests = [_manifest_of(one) for one in folders]
    for index, (one, manifest) in enumerate(zip(folders, manifests, strict=True)):
        shard = _shard_of(one, manifest)
        if shard != (index, count):
            raise CheckpointError(
                str(one), f"must hold shard {index} of {count}", f"{shard[0]} of {shard[1]}"
            )
    return folders, manifests


def _shard_of(folder: Path, manifest: dict[str, Any]) -> tuple[int, int]:
    """Return the index of a shard, and the number of shards."""
    at = str(folder / save_folders.MANIFEST)
    shard = save_folders.entry(manifest, "shard", dict, at)
    return save_folders.entry(shard, "index", int, at), save_folders.entry(shard, "count", int, at)


def _read_shard(folder: Path, manifest: dict[str, Any]) -> SavedShard:
    streams: dict[str, dict[str, np.ndarray]] = {}
    others = {}
    for name, digest in manifest["files"].items():
        kind, *rest = name.removesuffix(".npy").split(".")
        if kind == "stream":
            streams.setdefault(".".join(rest[:-1]), {})[rest[-1]] = _loaded(folder / name, digest)
        elif kind != "column":
            others[kind] = _loaded(folder / name, digest)
    slots, numbers = others.get("slots"), others.get("numbers")
    retention, next_id = others.get("retention"), manifest["next_id"]
    groups = others.get("groups"), others.get("group_counts"), others.get("consumed_groups")
    inserted = tuple(manifest["inserted"][:2])
    return SavedShard(slots, numbers, next_id, streams, retention, inserted, *groups)


def open_rows(found: SavedTable, division: ShardDivision | None = None, index: int = 0) -> None:
    """Check the files of a table's rows, and map them.

    Args:
        division: The division into this run's shards; None: all files are checked.
        index: Of the shard for which rows are loaded.
    Raises:
        CheckpointError: One is missing or changed.
    """
    before = 0
    for folder, manifest, shard in zip(found.folders, found.manifests, found.shards, strict=True):
        owner = None if division is None else division.owner[before : before + shard.num_slots]
        before += shard.num_slots
        checked = owner is None or bool((owner == index).any())
        names = [name for name in manifest["files"] if name.startswith("column.")]
        found.columns.append({n: _mapped(folder / n, manifest["files"][n], checked) for n in names})


def _loaded(path: Path, digest: str) -> np.ndarray:
    with save_folders.open_checked(path, digest) as file:
        found: np.ndarray = np.load(file)
        return found


def _mapped(path: Path, digest: str, checked: bool) -> np.ndarray:
    try:
        with save_folders.open_checked(path, digest) if checked else path.open("rb") as file:
            found: np.ndarray = np.load(save_folders.link_of(file), mmap_mode="r")
            return found
    except OSError as error:
        raise CheckpointError(str(path), "must be readable", None, str(error)) from error


def check_room(table: Table, records: np.ndarray) -> None:
    """Raise if a store cannot hold the trajectories of a checkpoint.

    Raises:
        StoreFullError: The table is too small.
    """
    rows = int(records[:, Slot.NUM_ROWS].sum())
    if len(records) > len(table.slots) or rows > table.spec.capacity_rows:
        raise StoreFullError(
            f"table {table.spec.name}",
            f"must hold the {len(records)} trajectories and {rows} rows of the checkpoint",
            f"{len(table.slots)} and {table.spec.capacity_rows}",
            "raise its capacity",
        )


def read_values(found: SavedTable, column: Column) -> np.ndarray:
    """Return a per-trajectory column of all trajectories of a table. [n, *shape].

    Raises:
        CheckpointError: A file is missing or changed.
    """
    name = file_of(column.name)
    both = zip(found.folders, found.manifests, strict=True)
    return np.concatenate([_loaded(folder / name, manifest["files"].get(name)) for folder, manifest in both])


def load_rows(
    table: Table, found: SavedTable, chosen: np.ndarray, next_id: int, division: ShardDivision | None = None
) -> None:
    """Replace slots and rows of a table with a capacity. Requires the lock.

    Args:
        table: The table, large enough for them.
        found: The table of the checkpoint, after `open_rows`.
        chosen: The trajectories to load, ascending. [n], int64.
        next_id: The counter that ids are made from.
        division: The division into this run's shards; None: the table is in one store.
    """
    assert found.whole.slots is not None
    records = found.whole.slots[chosen]
    placed = packed(records)
    table.slots[:, Slot.STATE] = 0
    table.slots[: len(placed)] = placed
    order = in_rows(records)
    extents = np.stack(
        [placed[order, Slot.FIRST_ROW], records[order, Slot.FIRST_ROW], records[order, Slot.NUM_ROWS]], axis=1
    )
    for column in table.spec.schema:
        files = [columns[file_of(column.name)] for columns in found.columns]
        data = table.columns[column.name]
        if column.rows == "1":
            data[: len(chosen)] = np.concatenate(files)[chosen]
        else:
            _copy_rows(data, files, extents)
    table.views["retention"][:] = 0
    if found.whole.retention is not None:
        table.views["retention"][: len(chosen)] = found.whole.retention[chosen]
    counts = table.spec.shard is None or table.spec.shard.index == 0  # for all nodes together
    table.control[[Control.INSERTED, Control.STEPS_INSERTED]] = found.whole.inserted if counts else (0, 0)
    table.control[Control.QUOTA] = 0
    table.restored(next_id)
    if table.groups is not None:
        saved, group_counts = found.whole.groups, found.whole.group_counts
        assert saved is not None
        assert group_counts is not None
        if division is not None and table.spec.shard is not None:
            saved, group_counts = groups_of(found.whole, division, table.spec.shard.index)
        consumed = np.empty(0, np.int64) if found.whole.consumed is None else found.whole.consumed
        table.groups.restore(saved, group_counts, consumed)


def _copy_rows(to: np.ndarray, files: Sequence[np.ndarray], extents: np.ndarray) -> None:
    """Copy extents from files, whose rows are numbered file after file.

    Args:
        files: Each holds whole extents.
        extents: Target row, row in the files, and number of rows, by row in the files. [n, 3], int64.
    """
    after = np.cumsum([len(file) for file in files])
    of_file = np.searchsorted(after, extents[:, 1], side="right")
    for index, file in enumerate(files):
        own = extents[of_file == index]
        if not len(own):
            continue
        starts = np.nonzero(np.diff(own[:, 1] - own[:, 0], prepend=own[0, 1] - own[0, 0] - 1))[0]
        ends = np.append(starts[1:], len(own))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):  # runs in both
            first, source = int(own[start, 0]), int(own[start, 1] - after[index] + len(file))
            count = int(own[start:end, 2].sum())
            to[first : first + count] = file[source : source + count]


# ---- files ---------------------------------------------------------------------------------------


def _manifest_of(folder: Path) -> dict[str, Any]:
    path = folder / save_folders.MANIFEST
    manifest = save_folders.read_json(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            str(folder), f"must have format {FORMAT}", manifest.get("format"), save_folders.ANOTHER
        )
    kinds = {"save": str, "schema": dict, "next_id": int, "inserted": list, "files": dict}
    for name, kind in kinds.items():
        save_folders.entry(manifest, name, kind, str(path))
    inserted = dict(zip(("trajectories", "steps"), manifest["inserted"], strict=False))
    for name in ("trajectories", "steps"):
        save_folders.entry(inserted, name, int, f"{path}: inserted")
    return manifest


def file_of(column: str) -> str:
    """Return the file of a column."""
    return f"column.{column}.npy"

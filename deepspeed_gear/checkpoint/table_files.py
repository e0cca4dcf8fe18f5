"""Table files: the contents of tables as checksummed files of a checkpoint.

Each table has a folder. It holds the rows and slots of the trajectories in stored order, unless the
table is a data set; and for each batch stream the masses or priorities of the latest selection, the
priority updates that wait for the next one, and the unused selections. So a loaded run continues
with the batches of the saved one, even with prefetched selections and within an epoch.

Rows are saved in segments: the trajectories that begin in one part of the store's rows. A segment
with the same trajectories as in the save before is linked to its files, so the cost of a save
follows what has changed.

If a table is spread over nodes, its folder has a folder per shard, shard-0 to shard-<S - 1>, each
like that of a table in one store. Shards are loaded into any number of nodes (`table_loader.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.checkpoint import checked_files, media_files, reshard, save_folders
from deepspeed_gear.checkpoint.segment_links import SegmentLinks
from deepspeed_gear.data.dataset_files import npy_header
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, SharedPrompt, SlotRetention
from deepspeed_gear.store.table import Table

FORMAT = 6
_BY_NAME = ("slots", "numbers", "retention", "moments", "shared_prompts")  # of a `SavedShard`
_MOST_SEGMENTS = 256  # of a table, over all its shards
_FEWEST_SEGMENTS = 8  # of a shard
_LEAST_SEGMENT_BYTES = 4 << 20
_SEGMENT = "rows-"
_BLOCK_BYTES = 1 << 18
_WRITERS = 4


def save_table(
    table: Table,
    streams: list[BatchStream],
    part: Path,
    batches: int,
    save_id: str,
    links: SegmentLinks,
) -> dict[str, str]:
    """Write the contents of a store and its batch streams. The caller holds the lock.

    Args:
        table: The table, or this node's shard of it.
        streams: Batch streams of the table.
        part: Folder of the table in this save, which exists.
        batches: Number of used global batches of the training stream.
        save_id: Id of the save.
        links: Links unchanged segments to their files, and records the files of this save.
    Returns:
        SHA-256 of the manifest, by its path within `part`.
    """
    spec = table.spec
    shard = table.spec.shard
    to = folder_of(table, part)
    name = str((to / save_folders.MANIFEST).relative_to(part))
    if shard is not None:
        to.mkdir()
    is_saved = np.isin(table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
    if isinstance(table.ledger, KeptLedger):  # it has retired groups that no process reads
        retired = table.ledger.retired()
        is_saved[retired[~SelectionPins(table).pinned(retired)]] = False
    for stream in streams:
        is_saved[stream.state.skipped_slots] = True
    slots = np.nonzero(is_saved)[0]
    rows: dict[str, Any] = {"segments": {}}
    digests: dict[str, str] = {}
    with nullcontext() if table.groups is None else table.groups.kept():
        if spec.dataset is None:
            rows, digests = _save_rows(table, slots, to, links)
            if shard is not None:  # priority updates and selections refer to slots of the store
                np.save(to / "numbers.npy", slots)
        for stream in streams:
            for key, array in stream.state.export(slots, batches).items():
                np.save(to / f"stream.{stream.spec.name}.{key}.npy", array)
        manifest = {
            "format": FORMAT,
            "schema": spec.schema.to_json(),
            "next_id": int(table.control[Control.NEXT_ID]),
            "inserted": table.control[[Control.INSERTED, Control.STEPS_INSERTED]].tolist(),
            **({} if spec.group is None else {"group": asdict(spec.group)}),
            **({} if spec.prompts is None else {"prompts": spec.prompts.fingerprint}),
            **({} if spec.prompts is None else {"prompt_choice": spec.prompts.choice}),
            **{
                stream.spec.name: stream.spec.describe()
                for stream in streams
                if stream.spec.name == TRAIN
            },
            "save": save_id,
            **({} if shard is None else {"shard": asdict(shard)}),
            "lineage": table.lineage,
            **rows,
        }
        manifests = {name: save_folders.complete(to, manifest, digests)}
    rewritten = {file_of(column.name) for column in spec.schema.trajectory_columns}
    links.record(to, {name: digest for name, digest in digests.items() if name not in rewritten})
    return manifests


def folder_of(table: Table, part: Path) -> Path:
    """Return the folder of a store: a table's folder, or its shard's within it."""
    return part if table.spec.shard is None else part / f"shard-{table.spec.shard.index}"


def _save_rows(
    table: Table, slots: np.ndarray, folder: Path, links: SegmentLinks
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write slots, groups, rows and media of a store.

    Returns:
        Their part of the manifest, and the SHA-256 of the files of columns and media.
    """
    records = table.slots[slots]
    retention = table.views["retention"][slots]
    skipped = ~np.isin(records[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
    records[skipped, Slot.STATE] = SlotState.FREE
    records[skipped, Slot.NUM_STEPS : Slot.NUM_ROWS + 1] = 0
    np.save(folder / "slots.npy", records)
    np.save(folder / "retention.npy", retention)
    if table.shared_prompts is not None:
        np.save(folder / "shared_prompts.npy", table.shared_prompts[slots, SharedPrompt.STEPS])
    if table.spec.normalized:
        np.save(folder / "moments.npy", table.extents.moments)
    if table.groups is not None:
        np.save(folder / "groups.npy", table.groups.export(slots))
        np.save(folder / "group_counts.npy", table.groups.counts)
        np.save(folder / "consumed_groups.npy", table.groups.consumed)
    for name, array in ({} if table.ledger is None else table.ledger.export()).items():
        np.save(folder / f"{name}.npy", array)
    schema = table.spec.schema
    known = _linkable(table, links.before)
    segments = dict[str, Any]()
    digests = dict[str, str]()
    files = list[tuple[Any, ...]]()
    for column in schema.trajectory_columns:
        files.append((file_of(column.name), column, [table.columns[column.name][slots]]))
    order = reshard.in_rows(records)
    order = order[records[order, Slot.NUM_ROWS] > 0]
    # The rows of a trajectory follow from these words: its id, how far it has grown, and which late
    # columns are filled. A segment of equal words has equal files.
    ordered = records[order]
    kept = retention[order][:, [SlotRetention.PRESENT, SlotRetention.OPEN]]
    words = np.column_stack([ordered[:, [Slot.ID, Slot.NUM_STEPS, Slot.NUM_ROWS]], kept])
    extents = ordered[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]]
    numbers, begins = np.unique(extents[:, 0] // _segment_rows(table), return_index=True)
    ends = np.append(begins[1:], len(order))  # without segments one end is left over
    for number, first, end in zip(numbers.tolist(), begins, ends, strict=False):
        segment = f"{number:06d}"
        own = extents[first:end]
        key = hashlib.sha256(words[first:end].astype("<i8").tobytes()).hexdigest()
        segments[segment] = {"rows": int(own[:, 1].sum()), "trajectories": key}
        names = [file_of(column.name, segment) for column in schema.step_columns]
        if known.get("segments", {}).get(segment) == segments[segment]:
            digests.update(links.link(folder, names))
        runs = _runs(own)
        for column, name in zip(schema.step_columns, names, strict=True):
            if name not in digests:
                files.append(
                    (name, column, [table.columns[column.name][start:stop] for start, stop in runs])
                )
    described: dict[str, Any] = {"segments": segments}
    if table.media is not None:
        page = Column("page", "uint8", (table.media.spec.page_bytes,))
        pages, media, parts = media_files.saved(table.media)
        np.save(folder / media_files.WORDS, pages)
        old = known.get(media_files.KIND, {})
        for segment, key in media["segments"].items():
            name = media_files.file_of(segment)
            if old.get("segments", {}).get(segment) == key:
                digests.update(links.link(folder, [name]))
            if name not in digests:
                files.append((name, page, parts[segment]))
        described[media_files.KIND] = media
    with ThreadPoolExecutor(_WRITERS) as pool:  # hashing, copying and the disk at once
        written = pool.map(lambda file: _write_array(folder / file[0], *file[1:]), files)
        digests.update(zip((file[0] for file in files), written, strict=True))
    return described, digests


def _segment_rows(table: Table) -> int:
    """Return the size of a segment: the number of store rows in which its trajectories begin."""
    spec = table.spec
    most = max(_FEWEST_SEGMENTS, _MOST_SEGMENTS // spec.own_shard.count)
    return max(
        -(-spec.capacity_rows // most), _LEAST_SEGMENT_BYTES // max(1, spec.schema.row_bytes), 1
    )


def _linkable(table: Table, before: Path | None) -> dict[str, Any]:
    """Return the manifest of an earlier save whose ids name the same trajectories, or {}."""
    if before is None:
        return {}
    with contextlib.suppress(CheckpointError):
        manifest = checked_files.read_versioned(before / save_folders.MANIFEST, FORMAT)
        if manifest.get("lineage") == table.lineage:  # else an id may name another trajectory
            return manifest
    return {}


def _runs(extents: np.ndarray) -> list[list[int]]:
    """Merge extents (first row, number of rows) without gaps into runs (first row, end).

    For [[0, 2], [2, 3], [9, 1]] the runs are [[0, 5], [9, 10]].
    """
    starts = extents[:, 0]
    ends = extents.sum(1)
    begins = np.append(True, starts[1:] != ends[:-1])
    runs: list[list[int]] = np.stack([starts[begins], ends[np.roll(begins, -1)]], 1).tolist()
    return runs


def _write_array(path: Path, column: Column, parts: list[np.ndarray]) -> str:
    """Write parts as one NumPy file, and return its SHA-256.

    Each block is hashed right after it was copied, while it is in the cache.
    """
    digest = hashlib.sha256()
    header = npy_header(column.numpy_dtype, (sum(map(len, parts)), *column.shape))
    with path.open("wb", buffering=0) as file:
        for part in (np.frombuffer(header, np.uint8), *parts):
            payload = memoryview(part.reshape(-1).view(np.uint8).data)
            for at in range(0, len(payload), _BLOCK_BYTES):
                block = rest = payload[at : at + _BLOCK_BYTES]
                while rest:  # a raw file may take less than it is given
                    rest = rest[file.write(rest) or 0 :]
                digest.update(block)  # after the copy, which reads memory faster than SHA-256 does
        # Start writing to the disk without waiting; `save_folders.complete` fsyncs all files.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint.

    Attributes:
        folders: Folders of its shards, or its own if it was in one store.
        manifests: Manifest of each folder.
        shards: Contents of each folder, without rows.
        whole: Contents of all shards together, without rows.
        columns: Of each folder the files of its columns by name, segment after segment, which
            `open_rows` has mapped: they stay readable when another save replaces the files.
    """

    folders: list[Path]
    manifests: list[dict[str, Any]]
    shards: list[reshard.SavedShard]
    whole: reshard.SavedShard
    columns: list[dict[str, list[np.ndarray]]] = field(default_factory=list)


def read_table(
    folder: Path, schema: Schema | None = None, save_id: str | None = None
) -> SavedTable:
    """Read a table of a checkpoint, without its rows, and check the files.

    Args:
        folder: Folder of the table.
        schema: Schema that it must have; None: any.
        save_id: Id of the save that it must be of; None: any.
    Raises:
        CheckpointError: A file is missing or damaged, or of another schema or save.
    """
    folders, manifests = find_shards(folder, save_id)
    shards = []
    for one, manifest in zip(folders, manifests, strict=True):
        if schema is not None and Schema.from_json(manifest["schema"]) != schema:
            raise CheckpointError(
                str(one),
                f"must have the schema {schema}",
                manifest["schema"],
                "load it with the schema that it was saved with",
            )
        streams: dict[str, reshard.Content] = {}
        others: dict[str, np.ndarray] = {}
        for name, digest in manifest["files"].items():
            kind, *rest = name.removesuffix(".npy").split(".")
            if kind == "stream":  # stream.<name>.<array>.npy
                arrays = streams.setdefault(".".join(rest[:-1]), {})
                arrays[rest[-1]] = checked_files.load_array(one / name, digest)
            elif kind not in ("column", media_files.KIND) and not kind.startswith(_SEGMENT):
                others[kind] = checked_files.load_array(one / name, digest)
        groups = [
            others[name] for name in ("groups", "group_counts", "consumed_groups") if name in others
        ]
        shard = reshard.SavedShard(
            next_id=manifest["next_id"],
            streams=streams,
            inserted=tuple(manifest["inserted"][:2]),
            groups=reshard.SavedGroups(*groups) if len(groups) == 3 else None,
            prompts={kind: array for kind, array in others.items() if kind.startswith("prompt_")}
            or None,
            **{name: others.get(name) for name in _BY_NAME},
        )
        shards.append(shard)
    return SavedTable(folders, manifests, shards, reshard.merge(shards))


def find_shards(
    folder: Path, save_id: str | None = None
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the folders of a table's shards, or its own if it was in one store; with manifests.

    Raises:
        CheckpointError: A shard is missing, or the shards are not of one table and of the save
            `save_id`; None: any save.
    """
    paths = save_folders.manifests_in(folder)
    if not paths or paths[0].parent == folder:
        folders = [folder]
    else:
        count = _manifest_of(paths[0].parent, save_id, of_shard=True)["shard"]["count"]
        folders = [folder / f"shard-{index}" for index in range(count)]
    manifests = [_manifest_of(one, save_id, of_shard=one != folder) for one in folders]
    for index, (one, manifest) in enumerate(zip(folders, manifests, strict=True)):
        shard = manifest["shard"] if one != folder else {"index": 0, "count": 1}
        if (shard["index"], shard["count"]) != (index, len(folders)):
            rule = f"must hold shard {index} of {len(folders)}"
            raise CheckpointError(
                str(one),
                rule,
                f"{shard['index']} of {shard['count']}",
                "a folder was renamed or exchanged; restore it, or take another checkpoint",
            )
    return folders, manifests


def _manifest_of(folder: Path, save_id: str | None, of_shard: bool) -> dict[str, Any]:
    """Read and check the manifest of a table, or of a shard."""
    path = folder / save_folders.MANIFEST
    manifest = checked_files.read_versioned(path, FORMAT)
    kinds = {
        "save": str,
        "schema": dict,
        "next_id": int,
        "inserted": list,
        "files": dict,
        "segments": dict,
    }
    for name, kind in {**kinds, "shard": dict}.items() if of_shard else kinds.items():
        checked_files.entry(manifest, name, kind, str(path))
    inserted = dict(zip(("trajectories", "steps"), manifest["inserted"], strict=False))
    for name in ("trajectories", "steps"):
        checked_files.entry(inserted, name, int, f"{path}: inserted")
    for name in manifest["segments"]:
        one = checked_files.entry(manifest["segments"], name, dict, f"{path}: segments")
        checked_files.entry(one, "rows", int, f"{path}: segments.{name}")
    for name in ("index", "count") if of_shard else ():
        checked_files.entry(manifest["shard"], name, int, f"{path}: shard")
    if save_id is not None and manifest["save"] != save_id:
        raise CheckpointError(
            str(folder),
            f"must belong to the save {save_id}",
            manifest["save"],
            "the folder mixes two saves; take another checkpoint",
        )
    return manifest


def open_rows(
    saved: SavedTable, division: reshard.ShardDivision | None = None, index: int = 0
) -> None:
    """Check and map the files of a table's rows, into `saved.columns`.

    With a division only the folders that have rows of the new shard `index` are read; the other
    folders get zeros of the same shape, so that row numbers stay.
    """
    before = 0  # trajectories of the folders before
    for folder, manifest, shard in zip(saved.folders, saved.manifests, saved.shards, strict=True):
        owner = None if division is None else division.owner[before : before + shard.num_slots]
        before += shard.num_slots
        is_read = owner is None or bool((owner == index).any())
        at = str(folder / save_folders.MANIFEST)
        files = manifest["files"]
        segments = {name: int(one["rows"]) for name, one in sorted(manifest["segments"].items())}
        num_rows = 0 if shard.slots is None else int(shard.slots[:, Slot.NUM_ROWS].sum())
        if min(segments.values(), default=0) < 0 or sum(segments.values()) != num_rows:
            raise CheckpointError(
                at,
                f"must name segments of {num_rows} rows together",
                segments,
                checked_files.ANOTHER,
            )
        columns: dict[str, list[np.ndarray]] = {}
        for column in () if shard.slots is None else Schema.from_json(manifest["schema"]):
            sizes = {file_of(column.name): shard.num_slots}
            if column.rows != "1":
                sizes = {file_of(column.name, segment): rows for segment, rows in segments.items()}
            columns[column.name] = [
                checked_files.map_array(folder / name, checked_files.entry(files, name, str, at))
                if is_read
                else np.broadcast_to(np.zeros((), column.numpy_dtype), (rows, *column.shape))
                for name, rows in sizes.items()
            ]
        saved.columns.append(columns)


def file_of(column: str, segment: str | None = None) -> str:
    """Return the file name of a column with one value per trajectory, or of a segment's rows."""
    return f"column.{column}.npy" if segment is None else f"{_SEGMENT}{segment}.{column}.npy"

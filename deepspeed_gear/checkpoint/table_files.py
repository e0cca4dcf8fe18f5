"""Table files: the content of tables, as checksummed files of a checkpoint.

A folder per table: the rows and slots of its trajectories in stored order, unless they are a data
set's, and of each stream the masses or priorities of its latest selection, the changes that wait
for the next one, and the unused selections. So a loaded run continues with the same batches as the
saved one, also with prefetched selections and within an epoch.

Rows are saved in segments: the trajectories that begin in one part of the store's rows. A segment
whose trajectories are those of the latest save is linked to its files, so a save costs what has
changed.

The folder of a table that is spread over nodes has a folder per shard, shard-0 to shard-<S - 1>,
each like that of a table in one store. Shards are loaded into any number of nodes (`reshard.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed_gear.checkpoint import media_files, reshard, save_folders
from deepspeed_gear.checkpoint.segment_links import SegmentLinks
from deepspeed_gear.context import Context
from deepspeed_gear.distributed.sharded_selection import ShardedSelector
from deepspeed_gear.errors import CheckpointError, StoreFullError
from deepspeed_gear.ops.constants import UNKNOWN
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.eviction import Evictor, quiet
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.prompt_ledger import PromptSpec
from deepspeed_gear.store.records import Control, Head, SharedPrompt, SlotRetention
from deepspeed_gear.store.table import Table

T = TypeVar("T")
FORMAT = 6
_BY_NAME = (
    "slots",
    "numbers",
    "retention",
    "moments",
    "shared_prompts",
)  # arrays of a `SavedShard`
# of a table, over all its shards; of a shard
_MOST_SEGMENTS = 256
_FEWEST_SEGMENTS = 8
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
    """Write the content of a store, a table or its shard, and of its streams; requires the lock.

    Unchanged segments are linked by `links`, which records those of this save. `batches` are the
    used global batches of the training stream. Returns the SHA-256 of the manifest, by its path in
    `part`.
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
    """Return the folder of a store in a table's folder: its own where the table is spread over
    nodes.
    """
    return part if table.spec.shard is None else part / f"shard-{table.spec.shard.index}"


def _save_rows(
    table: Table, slots: np.ndarray, folder: Path, links: SegmentLinks
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write slots, groups, rows and media; return their part of the manifest, and the SHA-256 of
    files.
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
    # What a trajectory's rows follow from: its id, how far it has grown, and which late columns are
    # filled.
    ordered = records[order]
    kept = retention[order][:, [SlotRetention.PRESENT, SlotRetention.OPEN]]
    words = np.column_stack([ordered[:, [Slot.ID, Slot.NUM_STEPS, Slot.NUM_ROWS]], kept])
    extents = ordered[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]]
    numbers, begins = np.unique(extents[:, 0] // _segment_rows(table), return_index=True)
    ends = np.append(begins[1:], len(order))  # one more than segments where there are none
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
                files.append((name, page, parts(segment)))
        described[media_files.KIND] = media
    with ThreadPoolExecutor(_WRITERS) as pool:  # hashing, copying and the disk at once
        written = pool.map(lambda file: _write_array(folder / file[0], *file[1:]), files)
        digests.update(zip((file[0] for file in files), written, strict=True))
    return described, digests


def _segment_rows(table: Table) -> int:
    """Return the rows of a store in which the trajectories of one segment begin."""
    spec = table.spec
    most = max(_FEWEST_SEGMENTS, _MOST_SEGMENTS // spec.own_shard.count)
    return max(
        -(-spec.capacity_rows // most), _LEAST_SEGMENT_BYTES // max(1, spec.schema.row_bytes), 1
    )


def _linkable(table: Table, before: Path | None) -> dict[str, Any]:
    """Return the manifest of an earlier save of the same trajectories; {} if there is none."""
    if before is None:
        return {}
    with contextlib.suppress(CheckpointError):
        manifest = save_folders.read_versioned(before / save_folders.MANIFEST, FORMAT)
        if manifest.get("lineage") == table.lineage:  # else an id may be that of another trajectory
            return manifest
    return {}


def _runs(extents: np.ndarray) -> list[list[int]]:
    """Return first and end of rows without gaps: for extents [[0, 2], [2, 3], [9, 1]], [[0, 5], [9,
    10]].
    """
    starts = extents[:, 0]
    ends = extents.sum(1)
    begins = np.append(True, starts[1:] != ends[:-1])
    found: list[list[int]] = np.stack([starts[begins], ends[np.roll(begins, -1)]], 1).tolist()
    return found


def _write_array(path: Path, column: Column, parts: list[np.ndarray]) -> str:
    """Write parts as one NumPy file, hashed block by block while they are cached; return its
    SHA-256.
    """
    digest = hashlib.sha256()
    header = io.BytesIO()
    described = np.lib.format.dtype_to_descr(column.numpy_dtype)
    rows = sum(len(part) for part in parts)
    form = {"descr": described, "fortran_order": False, "shape": (rows, *column.shape)}
    np.lib.format.write_array_header_1_0(header, form)
    with path.open("wb", buffering=0) as file:
        for part in (np.frombuffer(header.getvalue(), np.uint8), *parts):
            payload = memoryview(part.reshape(-1).view(np.uint8).data)
            for at in range(0, len(payload), _BLOCK_BYTES):
                block = rest = payload[at : at + _BLOCK_BYTES]
                while rest:  # a raw file may take less than it is given
                    rest = rest[file.write(rest) or 0 :]
                digest.update(block)  # after the copy, which reads memory faster than SHA-256 does
        # the disk begins; `complete` fsyncs all
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint: its folders, and all contents except rows."""

    folders: list[Path]  # of its shards; of the table itself where it was in one store
    manifests: list[dict[str, Any]]
    shards: list[reshard.SavedShard]
    whole: reshard.SavedShard
    # Of each folder its columns by name, segment after segment, mapped by `open_rows`: a save that
    # replaces the files meanwhile changes nothing.
    columns: list[dict[str, list[np.ndarray]]] = field(default_factory=list)


def read_table(
    folder: Path, schema: Schema | None = None, save_id: str | None = None
) -> SavedTable:
    """Read a table of a checkpoint except its rows, and check its files; None: of any schema or
    save.
    """
    folders, manifests = find_shards(folder, save_id)
    shards = []
    for one, manifest in zip(folders, manifests, strict=True):
        if schema is not None and Schema.from_json(manifest["schema"]) != schema:
            raise CheckpointError(str(one), f"must have the schema {schema}", manifest["schema"])
        streams: dict[str, reshard.Content] = {}
        others: dict[str, np.ndarray] = {}
        for name, digest in manifest["files"].items():
            kind, *rest = name.removesuffix(".npy").split(".")
            if kind == "stream":  # stream.<name>.<array>.npy
                streams.setdefault(".".join(rest[:-1]), {})[rest[-1]] = _loaded(one / name, digest)
            elif kind not in ("column", media_files.KIND) and not kind.startswith(_SEGMENT):
                others[kind] = _loaded(one / name, digest)
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
    """Return the folders of a table's shards, or its own where it was in one store, and their
    manifests.

    These must be of one table and save; None: any save.
    """
    found = save_folders.manifests_in(folder)
    if not found or found[0].parent == folder:
        folders = [folder]
    else:
        count = _manifest_of(found[0].parent, save_id, of_shard=True)["shard"]["count"]
        folders = [folder / f"shard-{index}" for index in range(count)]
    manifests = [_manifest_of(one, save_id, of_shard=one != folder) for one in folders]
    for index, (one, manifest) in enumerate(zip(folders, manifests, strict=True)):
        shard = manifest["shard"] if one != folder else {"index": 0, "count": 1}
        if (shard["index"], shard["count"]) != (index, len(folders)):
            rule = f"must hold shard {index} of {len(folders)}"
            raise CheckpointError(str(one), rule, f"{shard['index']} of {shard['count']}")
    return folders, manifests


def _manifest_of(folder: Path, save_id: str | None, of_shard: bool) -> dict[str, Any]:
    """Read and check the manifest of a table, or of a shard."""
    path = folder / save_folders.MANIFEST
    manifest = save_folders.read_versioned(path, FORMAT)
    kinds = {
        "save": str,
        "schema": dict,
        "next_id": int,
        "inserted": list,
        "files": dict,
        "segments": dict,
    }
    for name, kind in {**kinds, "shard": dict}.items() if of_shard else kinds.items():
        save_folders.entry(manifest, name, kind, str(path))
    inserted = dict(zip(("trajectories", "steps"), manifest["inserted"], strict=False))
    for name in ("trajectories", "steps"):
        save_folders.entry(inserted, name, int, f"{path}: inserted")
    for name in manifest["segments"]:
        one = save_folders.entry(manifest["segments"], name, dict, f"{path}: segments")
        save_folders.entry(one, "rows", int, f"{path}: segments.{name}")
    for name in ("index", "count") if of_shard else ():
        save_folders.entry(manifest["shard"], name, int, f"{path}: shard")
    if save_id is not None and manifest["save"] != save_id:
        raise CheckpointError(str(folder), f"must be of the save {save_id}", manifest["save"])
    return manifest


def open_rows(
    found: SavedTable, division: reshard.ShardDivision | None = None, index: int = 0
) -> None:
    """Check and map the files of a table's rows; of a division, those with rows of this run's
    shard.
    """
    before = 0
    for folder, manifest, shard in zip(found.folders, found.manifests, found.shards, strict=True):
        owner = None if division is None else division.owner[before : before + shard.num_slots]
        before += shard.num_slots
        is_read = owner is None or bool((owner == index).any())
        at = str(folder / save_folders.MANIFEST)
        files = manifest["files"]
        segments = {name: int(one["rows"]) for name, one in sorted(manifest["segments"].items())}
        num_rows = 0 if shard.slots is None else int(shard.slots[:, Slot.NUM_ROWS].sum())
        if min(segments.values(), default=0) < 0 or sum(segments.values()) != num_rows:
            raise CheckpointError(at, f"must name segments of {num_rows} rows together", segments)
        columns: dict[str, list[np.ndarray]] = {}
        for column in () if shard.slots is None else Schema.from_json(manifest["schema"]):
            sizes = {file_of(column.name): shard.num_slots}
            if column.rows != "1":
                sizes = {file_of(column.name, segment): rows for segment, rows in segments.items()}
            columns[column.name] = [
                _mapped(folder / name, save_folders.entry(files, name, str, at))
                if is_read
                else np.broadcast_to(np.zeros((), column.numpy_dtype), (rows, *column.shape))
                for name, rows in sizes.items()
            ]
        found.columns.append(columns)


def file_of(column: str, segment: str | None = None) -> str:
    """Return the file of a column of one value per trajectory, or of a segment of its rows."""
    return f"column.{column}.npy" if segment is None else f"{_SEGMENT}{segment}.{column}.npy"


def _loaded(path: Path, digest: str) -> np.ndarray:
    with save_folders.open_checked(path, digest) as file:
        return np.asarray(np.load(file))


def _mapped(path: Path, digest: str) -> np.ndarray:
    is_readable = CheckpointError.on(str(path), "must be readable", OSError)
    with is_readable, save_folders.open_checked(path, digest) as file:
        return np.asanyarray(np.load(save_folders.link_of(file), mmap_mode="r"))


def load_rows(
    table: Table,
    found: SavedTable,
    division: reshard.ShardDivision,
    media: media_files.SavedMedia | None = None,
) -> np.ndarray:
    """Replace slots, rows and media of a table with room for them, after `open_rows`; requires the
    lock.

    Returns the slots of the trajectories, besides retired groups of a kept store.
    """
    whole = found.whole
    shard = table.spec.own_shard
    chosen = division.chosen(shard.index)
    assert whole.slots is not None
    records = whole.slots[chosen]
    if isinstance(table.ledger, KeptLedger) and whole.prompts is not None:
        table.ledger.begin()
        slots, placed = table.ledger.place(records, whole.prompts)
    else:
        slots = np.arange(len(chosen))
        placed = reshard.packed(records)
        table.slots[:, Slot.STATE] = 0
    order = reshard.in_rows(records)
    in_files = records[order][:, [Slot.FIRST_ROW, Slot.NUM_ROWS]]
    extents = np.column_stack([placed[order, Slot.FIRST_ROW], in_files])
    for column in table.spec.schema:
        files = list(chain.from_iterable(columns[column.name] for columns in found.columns))
        data = table.columns[column.name]
        if column.rows == "1":
            data[slots] = np.concatenate(files)[chosen]
        else:
            _copy_rows(data, files, extents)
    if media is not None:
        media.restore(partial(Evictor(table, Context()).release, may_evict=False))
    table.views["retention"][table.slots[:, Slot.STATE] != SlotState.EVICTED] = 0
    if whole.retention is not None:
        table.views["retention"][slots] = whole.retention[chosen]
    table.slots[slots] = placed
    if whole.shared_prompts is not None:
        table.share_prompts(slots, whole.shared_prompts[chosen])
    # The first shard counts for all nodes together.
    inserted = whole.inserted if shard.index == 0 else (0, 0)
    table.control[[Control.INSERTED, Control.STEPS_INSERTED]] = inserted
    table.control[Control.QUOTA] = 0
    if table.spec.normalized:
        is_kept = len(found.shards) == shard.count
        moments = (found.shards[shard.index] if is_kept else whole).moments
        assert moments is not None
        table.extents.moments[:] = (
            moments if is_kept or shard.index == 0 else 0
        )  # the first shard has all
    table.restored(reshard.next_id_of(whole.next_id, shard.index, shard.count))
    if table.groups is not None:
        groups = (
            whole.groups if shard.count == 1 else reshard.groups_of(whole, division, shard.index)
        )
        assert groups is not None
        words = np.zeros((len(table.slots), groups.records.shape[1]), np.int64)
        words[slots] = groups.records
        table.groups.restore(words, groups.counts, groups.consumed)
    if table.ledger is not None and whole.prompts is not None:
        is_drawn = whole.slots[:, Slot.STATE] == SlotState.EVICTED
        numbers = division.numbers
        table.ledger.restore(
            whole.prompts, [] if numbers is None else np.unique(numbers[is_drawn]).tolist()
        )
    return slots


def _check_prompts(spec: PromptSpec, found: SavedTable) -> None:
    """Raise CheckpointError unless a saved ledger is of the data set of prompts, and fits into this
    one.
    """
    at = str(found.folders[0])
    saved = found.whole.prompts
    given = found.manifests[0].get("prompts")
    if saved is None or given != spec.fingerprint:
        rule = f"must hold the ledger of the prompts of {spec.data} ({spec.fingerprint})"
        raise CheckpointError(at, rule, given, "use the data set that it was saved with")
    if len(saved["prompt_entries"]) > spec.num_entries:
        rule = (
            f"must have at most {spec.num_entries} prompts under way: (max_lag + 1) * "
            f"groups "
            f"of a batch"
        )
        remedy = "load with the prompts.max_lag and the size of a batch of its run"
        raise CheckpointError(at, rule, len(saved["prompt_entries"]), remedy)
    if (most := saved["prompt_kept"].shape[1]) > spec.keep_bytes:
        remedy = "load with the prompts.keep_bytes of its run"
        raise CheckpointError(
            at, f"must have at most {spec.keep_bytes} bytes kept of a lease", most, remedy
        )


def _copy_rows(to: np.ndarray, files: Sequence[np.ndarray], extents: np.ndarray) -> None:
    """Copy extents from files, each of which holds whole ones; rows are numbered file after file.

    An extent is target row, row in the files, and number of rows, by row in the files. [n, 3],
    int64.
    """
    after = np.cumsum([len(file) for file in files])
    of_file = np.searchsorted(after, extents[:, 1], side="right")
    for index, file in enumerate(files):
        own = extents[of_file == index]
        if not len(own):
            continue
        follows = (own[1:, :2] == own[:-1, :2] + own[:-1, 2:]).all(axis=1)
        starts = np.flatnonzero(np.append(True, ~follows))
        ends = np.append(starts[1:], len(own))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):  # runs in both
            first = int(own[start, 0])
            source = int(own[start, 1] - after[index] + len(file))
            count = int(own[start:end, 2].sum())
            to[first : first + count] = file[source : source + count]


class TableLoader:
    """The steps of a load. Main thread; only the constructor and `announce` are collective."""

    def __init__(
        self,
        plan: Resolved,
        tables: Mapping[str, Table],
        streams: Mapping[str, Mapping[str, BatchStream]],
    ) -> None:
        self._plan = plan
        self._names = list(tables)
        self._streams = streams
        self._tables = tables if plan.leads_shard else {}
        self._spread = sorted(name for name in tables if name in plan.placement.spread)
        self._found: dict[str, SavedTable] = {}
        self._media: dict[str, media_files.SavedMedia] = {}
        # Of a table in one store all into its one shard.
        self._divisions: dict[str, reshard.ShardDivision] = {}
        self._placed: dict[str, np.ndarray] = {}  # slots of the loaded trajectories
        #: Slots and rows of each node's stores, by table.
        self._room: list[dict[str, tuple[int, int]]] = []
        if self._spread:
            mine = {name: (len(t.slots), t.spec.capacity_rows) for name, t in self._tables.items()}
            self._room = self._of_nodes(mine)

    def _of_nodes(self, mine: T) -> list[T]:
        """Return what the leader of each node's shards gives, in the order of shards.
        Collective.
        """
        placement = self._plan.placement
        nodes = self._plan.topology.nodes
        of_ranks = self._plan.control_plane.all_gather(mine if self._plan.leads_shard else None)
        by_node = {nodes[rank]: one for rank, one in enumerate(of_ranks) if one is not None}
        return [by_node[node] for node in placement.order]

    def read(self, folder: Path, state: save_folders.State) -> None:
        """Read and check everything except the rows; nothing changes."""
        save = save_folders.save_of(state)

        def read() -> None:
            folders = {name: save_folders.find(folder, name, save) for name in self._names}
            for one in folders.values():  # so that every rank reports what is missing
                find_shards(one, save["id"])
            for name, table in self._tables.items():
                self._read(name, table, folders[name], save["id"], state["data"].get(name, ""))

        save_folders.while_renamed(folder, read)

    def _read(self, name: str, table: Table, folder: Path, save_id: str, data: str) -> None:
        """Read and check a table; `data` is the fingerprint of its data set when it was saved, if
        it has one.

        Trajectories that the data set has got since then come last on every node, and get their
        first masses from `StreamState.restore`.
        """
        dataset = table.spec.dataset
        schema = table.spec.schema if dataset is None else None  # it may have got a column
        found = self._found[name] = read_table(folder, schema, save_id)
        slots = found.whole.slots
        groups = table.groups
        if groups is not None and slots is not None and found.whole.groups is None:
            rule = "must hold the groups of its trajectories"
            remedy = "it is of a table without groups"
            raise CheckpointError(str(found.folders[0]), rule, None, remedy)
        if table.ledger is not None:
            _check_prompts(table.ledger.spec, found)
        elif found.whole.shared_prompts is not None and found.whole.shared_prompts.any():
            rule = (
                "must be loaded into a table with prompts: trajectories share those of their groups"
            )
            raise CheckpointError(str(found.folders[0]), rule, None, f"give tables.{name}.prompts")
        division = self._divisions[name] = self._divide(name, table, found)
        chosen = division.chosen(table.spec.own_shard.index)
        if dataset is not None and found.whole.num_slots != dataset.versions[data]:
            rule = f"must have the {dataset.versions[data]} trajectories of the data set"
            raise CheckpointError(str(found.folders[0]), rule, found.whole.num_slots)
        rows = 0 if slots is None else int(slots[chosen, Slot.NUM_ROWS].sum())
        if slots is not None and (
            len(chosen) > len(table.slots) or rows > table.spec.capacity_rows
        ):
            rule = f"must hold the {len(chosen)} trajectories and {rows} rows of the checkpoint"
            room = f"{len(table.slots)} and {table.spec.capacity_rows}"
            raise StoreFullError(f"table {table.spec.name}", rule, room, "raise its capacity")
        open_rows(found, division if name in self._spread else None, table.spec.own_shard.index)
        if table.media is not None and slots is not None:
            column = table.media.spec.column
            files = list(chain.from_iterable(columns[column] for columns in found.columns))
            named = media_files.named_by(files, slots[chosen])
            self._media[name] = media_files.SavedMedia(
                table.media, found.folders, found.manifests, named
            )

    def _divide(self, name: str, table: Table, found: SavedTable) -> reshard.ShardDivision:
        whole = found.whole
        if name not in self._spread:
            return reshard.ShardDivision.of(np.zeros(whole.num_slots, np.int64))
        if whole.slots is None:
            bounds = self._plan.placement.bounds[
                name
            ]  # first id of each shard, and the number of ids
            owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            return reshard.ShardDivision.of(owner[: whole.num_slots])
        numbers = None
        room = [sizes[name] for sizes in self._room]
        if table.groups is not None and whole.groups is not None:
            file = file_of(table.groups.spec.column)
            both = zip(found.folders, found.manifests, strict=True)
            of_shards = [
                _loaded(folder / file, manifest["files"].get(file)) for folder, manifest in both
            ]
            numbers = np.concatenate(of_shards).astype(np.int64)
            if table.ledger is not None:  # the store that issues a number holds its group
                return reshard.ShardDivision.of(numbers % len(room), numbers)
        train = self._streams.get(name, {}).get(TRAIN)
        by_rows = (
            train is not None
            and train.spec.priorities is not None
            and train.spec.rule.unit == "step"
        )
        return reshard.divide(name, whole, room, by_rows, numbers)

    def replace(self) -> None:
        for name, table in self._tables.items():
            found = self._found[name]
            division = self._divisions[name]
            slots = np.arange(len(division.chosen(table.spec.own_shard.index)))
            with quiet(table, table.lock.timeout_s, Control.PENDING):
                if found.whole.slots is not None:
                    slots = load_rows(table, found, division, self._media.get(name))
                self._placed[name] = slots
                for stream in self._streams.get(name, {}).values():
                    stream.state.restore(slots, self._content(name, stream))
                if found.whole.slots is not None:
                    table.extents.end_all()
                if table.ledger is not None:
                    table.ledger.update()

    def _content(self, name: str, stream: BatchStream) -> reshard.Content:
        whole = self._found[name].whole
        division = self._divisions[name]
        if name not in self._spread:
            return dict(whole.streams[stream.spec.name])
        index = stream.table.spec.own_shard.index
        items: np.ndarray | slice | None = None
        if stream.spec.rule.unit == "step":
            if whole.slots is not None:
                items = reshard.items_of(whole.slots, division.chosen(index))
            else:
                rows = [sizes[name][1] for sizes in self._room]
                first = sum(rows[:index])
                items = slice(first, first + rows[index])
        return reshard.part_of(whole, stream.spec.name, division, index, items)

    def deliver(self) -> None:
        """Send the unused selections to the nodes that use them. Called on all nodes."""
        for name in self._spread if self._tables else []:
            for stream in self._streams.get(name, {}).values():
                selector = stream.selector
                if isinstance(selector, ShardedSelector):
                    selector.restart()
                    if stream.spec.name == TRAIN:
                        self._deliver(name, stream, selector)

    def _deliver(self, name: str, stream: BatchStream, selector: ShardedSelector) -> None:
        whole = self._found[name].whole.streams[TRAIN]
        part = self._content(name, stream)
        if not stream.state.keeps_selections(part):
            return
        owners = reshard.owners_of(whole, self._divisions[name])
        for at in np.argsort(part["heads"][:, Head.NUMBER]).tolist():
            number, count, after = part["heads"][
                at, [Head.NUMBER, Head.COUNT, Head.SAMPLES]
            ].tolist()
            own = np.nonzero(part["ring"][at, :count, Resolution.ID] != UNKNOWN)[0]
            resolutions = part["ring"][at, own]
            resolutions[:, Resolution.SLOT] = self._placed[name][resolutions[:, Resolution.SLOT]]
            resolutions[:, Resolution.FIRST_ROW] = stream.table.slots[
                resolutions[:, Resolution.SLOT], Slot.FIRST_ROW
            ]
            entry = number % stream.spec.depth
            tensor = torch.from_numpy(resolutions)
            selector.deliver(number, entry, after - count, owners[at, :count], own, tensor)
        with stream.table.lock:
            stream.state.keep_selections(part)

    def announce(self) -> None:
        """Share which node holds each loaded trajectory, for all ranks. Collective."""
        placement = self._plan.placement
        mine = {}
        for name, table in self._tables.items():
            if name in self._spread and table.spec.dataset is None:
                ids = table.slots[self._placed[name], Slot.ID]
                mine[name] = ids, self._found[name].whole.next_id
        found = self._of_nodes(mine)
        for name, (_, next_id) in found[0].items():
            ids = [one[name][0] for one in found]
            every = np.concatenate(ids)
            shards = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
            order = np.argsort(every)
            placement.loaded[name] = every[order], shards[order], next_id


_PREFIX = "rollout."
_SUFFIX = ".npz"


def write_rollout(
    folder: Path, save_id: str, columns: Mapping[str, torch.Tensor], kept: save_folders.State | None
) -> dict[str, str] | None:
    """Write columns beside the tables, and remove those of earlier saves than the one that is kept,
    if it is known. Returns the file's name and checksum for the state; None: there are no columns.
    """
    known = ((kept or {}).get("rollout") or {}).get("columns") or {}
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        if kept is not None and path.name != known.get("file"):
            path.unlink(missing_ok=True)
    if not columns:
        return None
    path = folder / f"{_PREFIX}{save_id}{_SUFFIX}"
    arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": save_folders.sha256(path)}


def read_rollout(folder: Path, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read the columns of the rollout batch that a state was saved in."""
    rollout = state.get("rollout")
    if not rollout or not rollout.get("columns"):
        return {}
    at = "the rollout of the gear state"
    columns = save_folders.entry(rollout, "columns", dict, at)
    name = save_folders.entry(columns, "file", str, at)
    if Path(name).name != name:
        raise CheckpointError(at, "must name a file of its folder", name)
    with (
        save_folders.open_checked(
            folder / name, save_folders.entry(columns, "sha256", str, at)
        ) as file,
        np.load(file, allow_pickle=False) as found,
    ):
        return {column: torch.from_numpy(found[column]) for column in found.files}

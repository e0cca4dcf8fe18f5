"""TableLoader: loads the tables of a checkpoint into the stores of this run.

A table may be loaded into another number of nodes than it was saved on: `reshard.py` decides which
shard gets which trajectories, and this module reads, checks and places them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from deepspeed_gear.checkpoint import checked_files, media_files, reshard, save_folders
from deepspeed_gear.checkpoint.table_files import (
    SavedTable,
    file_of,
    find_shards,
    open_rows,
    read_table,
)
from deepspeed_gear.errors import CheckpointError, StoreFullError
from deepspeed_gear.ops.constants import UNKNOWN
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import NodeDraws, ShardDraws
from deepspeed_gear.store.eviction import Evictor, quiet
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import Control, Head
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context

T = TypeVar("T")


class TableLoader:
    """The steps of a load: `read`, `replace`, `deliver`, `announce`, in this order.

    Main thread. Only the constructor and `announce` are collective.
    """

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
        # A table in one store has a division with one shard.
        self._divisions: dict[str, reshard.ShardDivision] = {}
        self._placed: dict[str, np.ndarray] = {}  # slots of the loaded trajectories
        # By shard and table, the slots and rows that its node's store has.
        self._room: list[dict[str, tuple[int, int]]] = []
        if self._spread:
            mine = {name: (len(t.slots), t.spec.capacity_rows) for name, t in self._tables.items()}
            self._room = self._of_nodes(mine)

    def _of_nodes(self, mine: T) -> list[T]:
        """Gather a value from the leader of each node's shards, in their order. Collective."""
        placement = self._plan.placement
        nodes = self._plan.topology.nodes
        of_ranks = self._plan.control_plane.all_gather(mine if self._plan.leads_shard else None)
        by_node = {nodes[rank]: one for rank, one in enumerate(of_ranks) if one is not None}
        return [by_node[node] for node in placement.order]

    def read(self, folder: Path, state: save_folders.State) -> None:
        """Read and check everything except the rows; nothing changes.

        Raises:
            CheckpointError: A file is missing or damaged, or of another schema, data set or run.
            StoreFullError: A table has too little room.
        """
        save = save_folders.save_of(state)

        def read() -> None:
            folders = {name: save_folders.find(folder, name, save) for name in self._names}
            for one in folders.values():  # on ranks without a store, too: all raise alike
                find_shards(one, save["id"])
            for name, table in self._tables.items():
                self._read(name, table, folders[name], save["id"], state["data"].get(name, ""))

        save_folders.while_renamed(folder, read)

    def _read(self, name: str, table: Table, folder: Path, save_id: str, data: str) -> None:
        """Read and check a table.

        `data` is the fingerprint that the table's data set had when it was saved, if it has one.
        Trajectories that the data set has got since then come last on every node, and
        `StreamState.restore` gives them their first masses.
        """
        dataset = table.spec.dataset
        schema = table.spec.schema if dataset is None else None  # it may have got a column
        saved = read_table(folder, schema, save_id)
        self._found[name] = saved
        whole = saved.whole
        slots = whole.slots
        at = str(saved.folders[0])
        if table.groups is not None and slots is not None and whole.groups is None:
            rule = "must hold the groups of its trajectories"
            raise CheckpointError(at, rule, None, "it is of a table without groups")
        if table.ledger is not None:
            _check_prompts(table.ledger.spec, saved)
        elif whole.shared_prompts is not None and whole.shared_prompts.any():
            rule = (
                "must be loaded into a table with prompts: trajectories share those of their groups"
            )
            raise CheckpointError(at, rule, None, f"give tables.{name}.prompts")
        division = self._divide(name, table, saved)
        self._divisions[name] = division
        chosen = division.chosen(table.spec.own_shard.index)
        if dataset is not None and whole.num_slots != dataset.versions[data]:
            rule = f"must have the {dataset.versions[data]} trajectories of the data set"
            raise CheckpointError(
                at, rule, whole.num_slots, "give the data set that it was saved with"
            )
        rows = 0 if slots is None else int(slots[chosen, Slot.NUM_ROWS].sum())
        if slots is not None and (
            len(chosen) > len(table.slots) or rows > table.spec.capacity_rows
        ):
            rule = f"must hold the {len(chosen)} trajectories and {rows} rows of the checkpoint"
            room = f"{len(table.slots)} and {table.spec.capacity_rows}"
            raise StoreFullError(f"table {table.spec.name}", rule, room, "raise its capacity")
        open_rows(saved, division if name in self._spread else None, table.spec.own_shard.index)
        if table.media is not None and slots is not None:
            parts = [np.zeros(0, np.int64)]
            # Items that an epoch skips have slots without a trajectory; these name nothing.
            used = chosen[slots[chosen, Slot.STATE] != SlotState.FREE]
            for column in table.media.spec.names:
                files = list(chain.from_iterable(columns[column] for columns in saved.columns))
                if table.schema[column].rows == "1":
                    parts.append(np.concatenate(files)[used])
                else:
                    parts.append(media_files.named_by(files, slots[chosen]))
            named = np.unique(np.concatenate(parts))
            self._media[name] = media_files.SavedMedia(
                table.media, saved.folders, saved.manifests, named[named != 0]
            )

    def _divide(self, name: str, table: Table, saved: SavedTable) -> reshard.ShardDivision:
        """Divide a saved table into the shards of this run; the same on every node."""
        whole = saved.whole
        if name not in self._spread:
            return reshard.ShardDivision.of(np.zeros(whole.num_slots, np.int64))
        if whole.slots is None:
            # A data set: shard i holds the ids bounds[i] to bounds[i + 1] - 1.
            bounds = self._plan.placement.bounds[name]
            owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            return reshard.ShardDivision.of(owner[: whole.num_slots])
        numbers = None
        room = [sizes[name] for sizes in self._room]
        if table.groups is not None and whole.groups is not None:
            file = file_of(table.groups.spec.column)
            numbers_of_shards = [
                checked_files.load_array(folder / file, manifest["files"].get(file))
                for folder, manifest in zip(saved.folders, saved.manifests, strict=True)
            ]
            numbers = np.concatenate(numbers_of_shards).astype(np.int64)
            if table.ledger is not None:  # the store that leases a number holds its group
                return reshard.ShardDivision.of(numbers % len(room), numbers)
        train = self._streams.get(name, {}).get(TRAIN)
        by_rows = (
            train is not None
            and train.spec.priorities is not None
            and train.spec.rule.unit == "step"
        )
        return reshard.divide(name, whole, room, by_rows, numbers)

    def replace(self) -> None:
        """Replace the contents of this node's stores; streams continue at the saved position.

        The lock of each table is held, and no process has rows reserved meanwhile.
        """
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
        """Return a stream's saved content for this node's shard."""
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
        """Send the unused selections to the nodes that use them. Called on all ranks."""
        for name in self._spread if self._tables else []:
            for stream in self._streams.get(name, {}).values():
                if stream.selector.is_spread:
                    stream.selector.rounds.restart()
                    if stream.spec.name == TRAIN:
                        self._deliver(name, stream)

    def _deliver(self, name: str, stream: BatchStream) -> None:
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
            draws = NodeDraws(number, number % stream.spec.depth, count, is_saved=True)
            drawn = ShardDraws(owners[at, :count], own, torch.from_numpy(resolutions))
            draws.add(0, after - count, drawn)
            stream.selector.deliver(draws)
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


def load_rows(
    table: Table,
    saved: SavedTable,
    division: reshard.ShardDivision,
    media: media_files.SavedMedia | None = None,
) -> np.ndarray:
    """Replace slots, rows and media of a table, which has room for them. Requires the lock.

    Called after `open_rows`.

    Args:
        table: The table, or this node's shard of it.
        saved: The saved table.
        division: Which shard gets which trajectories.
        media: Their media items; None: the table has no media.
    Returns:
        The slots of the loaded trajectories, in stored order. [n], int64.
    """
    whole = saved.whole
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
        files = list(chain.from_iterable(columns[column.name] for columns in saved.columns))
        data = table.columns[column.name]
        if column.rows == "1":
            data[slots] = np.concatenate(files)[chosen]
        else:
            _copy_rows(data, files, extents)
    if isinstance(table.ledger, KeptLedger):
        table.ledger.note_sizes(slots)
    if media is not None:
        media.restore(partial(Evictor(table, Context()).release, may_evict=False))
    table.views["retention"][table.slots[:, Slot.STATE] != SlotState.EVICTED] = 0
    if whole.retention is not None:
        table.views["retention"][slots] = whole.retention[chosen]
    table.slots[slots] = placed
    if whole.shared_prompts is not None:
        table.restore_shared_prompts(slots, whole.shared_prompts[chosen])
    # The first shard counts for all nodes together.
    inserted = whole.inserted if shard.index == 0 else (0, 0)
    table.control[[Control.INSERTED, Control.STEPS_INSERTED]] = inserted
    table.control[Control.QUOTA] = 0
    if table.spec.normalized:
        # With the same number of shards each has its own moments, else the first has the sum.
        is_same = len(saved.shards) == shard.count
        moments = (saved.shards[shard.index] if is_same else whole).moments
        assert moments is not None
        table.extents.moments[:] = moments if is_same or shard.index == 0 else 0
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


def _check_prompts(spec: PromptSpec, saved: SavedTable) -> None:
    """Raise a CheckpointError unless a saved ledger is of the same prompts and fits this table."""
    at = str(saved.folders[0])
    ledger = saved.whole.prompts
    given = saved.manifests[0].get("prompts")
    if ledger is None or given != spec.fingerprint:
        rule = f"must hold the ledger of the prompts of {spec.data} ({spec.fingerprint})"
        raise CheckpointError(at, rule, given, "use the data set that it was saved with")
    chosen = saved.manifests[0].get("prompt_choice", {})
    for option in sorted({*chosen, *spec.choice}):
        if chosen.get(option) != spec.choice.get(option):
            rule = f"must be of a run with the prompts.{option} of this one"
            rule += f" ({spec.choice.get(option, 'the default')})"
            remedy = (
                f"load with the prompts.{option} of its run, which decides its prompts' numbers"
            )
            raise CheckpointError(at, rule, chosen.get(option, "the default"), remedy)
    num_entries = len(ledger["prompt_entries"])
    if num_entries > spec.num_entries:
        rule = (
            f"must have at most {spec.num_entries} prompts under way: (max_lag + 1) * groups of a "
            f"batch"
        )
        remedy = "load with the prompts.max_lag and the size of a batch of its run"
        raise CheckpointError(at, rule, num_entries, remedy)
    kept_bytes = ledger["prompt_kept"].shape[1]
    if kept_bytes > spec.keep_bytes:
        rule = f"must have at most {spec.keep_bytes} bytes kept of a lease"
        remedy = "load with the prompts.keep_bytes of its run"
        raise CheckpointError(at, rule, kept_bytes, remedy)


def _copy_rows(to: np.ndarray, files: Sequence[np.ndarray], extents: np.ndarray) -> None:
    """Copy extents from files to rows of a store.

    Args:
        to: A column of the store.
        files: Files of the column, each with whole extents; rows are numbered file after file.
        extents: Target row, row in the files, and number of rows, ascending by row in the files.
            [n, 3], int64.
    """
    file_ends = np.cumsum([len(file) for file in files])
    file_numbers = np.searchsorted(file_ends, extents[:, 1], side="right")
    for index, file in enumerate(files):
        own = extents[file_numbers == index]
        if not len(own):
            continue
        # Extents that follow each other in the file and in the store are copied at once: of
        # [[0, 0, 2], [2, 2, 3], [9, 5, 1]] the first two are a run of 5 rows.
        follows = (own[1:, :2] == own[:-1, :2] + own[:-1, 2:]).all(axis=1)
        starts = np.flatnonzero(np.append(True, ~follows))
        ends = np.append(starts[1:], len(own))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            first = int(own[start, 0])
            source = int(own[start, 1] - file_ends[index] + len(file))
            count = int(own[start:end, 2].sum())
            to[first : first + count] = file[source : source + count]

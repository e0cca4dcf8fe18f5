"""Load a checkpoint's tables into the stores of this run, on any number of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from deepspeed_gear.checkpoint import reshard, save_folders, table_files
from deepspeed_gear.checkpoint.replay_view import ReplayView
from deepspeed_gear.checkpoint.reshard import Content, ShardDivision
from deepspeed_gear.checkpoint.table_files import SavedTable
from deepspeed_gear.distributed.sharded.sharded_selector import ShardedSelector
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.constants import UNKNOWN
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.eviction import quiet
from deepspeed_gear.store.records import Control, Head
from deepspeed_gear.store.table import Table

Sizes = Mapping[str, tuple[int, int]]  # slots and rows of a node's stores, by table


class TableLoader:
    """The steps of a load. Main thread; only the constructor and `announce` are collective.

    Args:
        tables: The tables to load.
    """

    def __init__(self, parts: ReplayView, tables: Mapping[str, Table]) -> None:
        self._parts, self._names = parts, list(tables)
        self._tables = tables if parts.plan.leads_shard else {}
        placement, topology = parts.plan.placement, parts.plan.topology
        self._spread = sorted(name for name in tables if name in placement.spread)
        self._found: dict[str, SavedTable] = {}
        self._divisions: dict[str, ShardDivision] = {}
        self._room: list[Sizes] = []
        if self._spread:
            mine = {name: (len(t.slots), t.spec.capacity_rows) for name, t in self._tables.items()}
            of_ranks = parts.plan.exchange.gather(mine if parts.plan.leads_shard else None)
            by_node = {topology.nodes[rank]: one for rank, one in enumerate(of_ranks) if one is not None}
            self._room = [by_node[node] for node in placement.order]

    # ---- reading -----------------------------------------------------------------------------------

    def read(self, folder: Path, state: save_folders.State) -> None:
        """Read and check everything except the rows; nothing changes.

        Raises:
            CheckpointError: A file is missing or changed, of another save than the state, or of another
                schema.
            StoreFullError: A table is too small.
        """
        save = save_folders.save_of(state)
        folders = self._find(folder, save)
        while True:
            try:
                self._read(folders, str(save["id"]))
                return
            except CheckpointError:
                before, folders = folders, self._find(folder, save)
                if folders == before:
                    raise
                # A save of another process has renamed them meanwhile, once: after that it removes them.

    def _find(self, folder: Path, save: save_folders.State) -> dict[str, Path]:
        return {name: save_folders.find(folder, name, save) for name in self._names}

    def _read(self, folders: Mapping[str, Path], save_id: str) -> None:
        for one in folders.values():  # so that every rank reports what is missing
            for shard, manifest in zip(*table_files.find_shards(one), strict=True):
                if manifest["save"] != save_id:
                    raise CheckpointError(str(shard), f"must be of the save {save_id}", manifest["save"])
        for name, table in self._tables.items():
            found = self._found[name] = table_files.read_table(folders[name], table.spec.schema)
            if any(manifest["save"] != save_id for manifest in found.manifests):
                raise CheckpointError(str(folders[name]), f"must be of the save {save_id}", "another one")
            if name in self._spread:
                self._divisions[name] = self._divide(name, table, found)
            self._check(name, table, found)

    def _divide(self, name: str, table: Table, found: SavedTable) -> ShardDivision:
        whole = found.whole
        if whole.slots is None:
            return reshard.divide_ids(self._parts.plan.placement.bounds[name])
        train = self._parts.streams.get(name, {}).get(TRAIN)
        by_rows = train is not None and train.spec.priorities is not None and train.spec.rule.unit == "step"
        room = [sizes[name] for sizes in self._room]
        if table.groups is not None and whole.groups is not None:
            numbers = table_files.read_values(found, table.schema[table.groups.spec.column])
            return reshard.divide_groups(name, whole.slots, numbers.astype(np.int64), whole.groups, room)
        return reshard.divide_rows(table.spec.name, whole.slots, by_rows, room)

    def _check(self, name: str, table: Table, found: SavedTable) -> None:
        slots = found.whole.slots
        if table.groups is not None and slots is not None and found.whole.groups is None:
            rule, remedy = "must hold the groups of its trajectories", "it is of a table without groups"
            raise CheckpointError(str(found.folders[0]), rule, None, remedy)
        if slots is not None:
            table_files.check_room(table, slots[self._chosen(name)])
        elif len(self._chosen(name)) != len(table.slots):
            rule = f"must have the {len(table.slots)} trajectories of the data set"
            raise CheckpointError(str(found.folders[0]), rule, len(self._chosen(name)))
        table_files.open_rows(found, self._divisions.get(name), self._index)

    @property
    def _index(self) -> int:
        order, node = self._parts.plan.placement.order, self._parts.plan.topology.node
        return order.index(node)

    def _chosen(self, name: str) -> np.ndarray:
        """Return the trajectories to load into this node's store. [n], int64."""
        if name in self._divisions:
            return self._divisions[name].chosen(self._index)
        return np.arange(self._found[name].whole.num_slots)

    # ---- replacing ---------------------------------------------------------------------------------

    def replace(self) -> None:
        """Replace the contents of this node's tables."""
        for name, table in self._tables.items():
            found, chosen = self._found[name], self._chosen(name)
            next_id = found.whole.next_id
            if name in self._divisions:
                next_id = reshard.next_id_of(next_id, self._index, len(self._room))
            with quiet(table, table.lock.timeout_s, Control.PENDING):
                if found.whole.slots is not None:
                    table_files.load_rows(table, found, chosen, next_id, self._divisions.get(name))
                for stream in self._parts.streams.get(name, {}).values():
                    stream.state.restore(np.arange(len(chosen)), self._content(name, stream))
                if found.whole.slots is not None:
                    table.extents.end_all()

    def _content(self, name: str, stream: BatchStream) -> Content:
        whole, stream_name = self._found[name].whole, stream.spec.name
        if name not in self._divisions:
            return dict(whole.streams[stream_name])
        items: np.ndarray | slice | None = None
        if stream.spec.rule.unit == "step":
            if whole.slots is not None:
                items = reshard.items_of(whole.slots, self._chosen(name))
            else:
                rows = [sizes[name][1] for sizes in self._room]
                first = sum(rows[: self._index])
                items = slice(first, first + rows[self._index])
        return reshard.part_of(whole, stream_name, self._divisions[name], self._index, items)

    # ---- over nodes --------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Send the unused selections to the nodes that use them. Called on all nodes."""
        for name in self._spread if self._tables else []:
            for stream in self._parts.streams.get(name, {}).values():
                selector = stream.selector
                if isinstance(selector, ShardedSelector):
                    selector.restart()
                    if stream.spec.name == TRAIN:
                        self._restore_selections(name, stream, selector)

    def _restore_selections(self, name: str, stream: BatchStream, selector: ShardedSelector) -> None:
        whole, part = self._found[name].whole.streams[TRAIN], self._content(name, stream)
        if not stream.state.keeps_selections(part):
            return
        owners = reshard.owners_of(whole, self._divisions[name])
        for at in np.argsort(part["heads"][:, Head.KEY]).tolist():
            head = part["heads"][at]
            key, count = int(head[Head.KEY]), int(head[Head.COUNT])
            own = np.nonzero(part["ring"][at, :count, Resolution.ID] != UNKNOWN)[0]
            records = part["ring"][at, own]
            records[:, Resolution.FIRST_ROW] = stream.table.slots[records[:, Resolution.SLOT], Slot.FIRST_ROW]
            first = int(head[Head.SAMPLES]) - count
            entry = key % stream.spec.depth
            selector.deliver(key, entry, first, owners[at, :count], own, torch.from_numpy(records))
        with stream.table.lock:
            stream.state.keep_selections(part)

    def announce(self) -> None:
        """Exchange which node holds each loaded trajectory, for all ranks. Collective."""
        placement, topology = self._parts.plan.placement, self._parts.plan.topology
        mine = {}
        for name, table in self._tables.items():
            if name in self._spread and table.spec.dataset is None:
                ids = table.slots[: len(self._chosen(name)), Slot.ID].copy()
                mine[name] = ids, self._found[name].whole.next_id
        of_ranks = self._parts.plan.exchange.gather(mine if self._parts.plan.leads_shard else None)
        by_node = {topology.nodes[rank]: one for rank, one in enumerate(of_ranks) if one is not None}
        found = [by_node[node] for node in placement.order]
        for name in found[0]:
            ids = [one[name][0] for one in found]
            every, shards = np.concatenate(ids), np.repeat(np.arange(len(ids)), [len(one) for one in ids])
            order = np.argsort(every)
            placement.loaded[name] = every[order], shards[order], found[0][name][1]

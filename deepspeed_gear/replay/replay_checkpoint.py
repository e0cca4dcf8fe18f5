"""Save and load checkpoints of a Replay: its position and the content of its tables."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed_gear.checkpoint import position, rollout_file, save_folders, table_files
from deepspeed_gear.checkpoint.save_folders import State
from deepspeed_gear.checkpoint.segment_links import SegmentLinks, Written
from deepspeed_gear.checkpoint.table_loader import TableLoader
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.replay.batch_loader import BatchLoader, Evaluation
from deepspeed_gear.replay.packed.rollout_loader import RolloutLoader
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.selection import PASS_SHIFT
from deepspeed_gear.store.table import Table


class ReplayCheckpoint:
    """Saves and loads the position of a Replay, and its tables. Methods are collective."""

    def __init__(
        self, parts: ReplayParts, loader: BatchLoader | RolloutLoader, passes: Evaluation
    ) -> None:
        self._parts = parts
        self._loader = loader
        self._passes = passes
        self._latest: tuple[Path, State] | None = None  # the save made last, in any folder
        self._written: dict[str, Written] = {}  # that save's segments of this process's tables

    def state(
        self, save: State | None = None, columns: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the position, equal on all ranks: `Replay.state_dict`.

        Args:
            save: Id and manifests of the save that holds the tables; None: no save.
            columns: File of the columns of the rollout batch whose training is under way.
        """
        plan = self._parts.plan
        at = self._loader.position
        passes = self._passes.begun
        where = at.at
        rollout = at.rollout
        if rollout is not None:
            rollout = {**rollout, "columns": columns, "names": sorted(at.columns)}
        if plan.topology.place.pipe_world > 2:  # inner stages read no batches
            known = (where, passes) if plan.topology.place.reads else None
            where, passes = next(
                one for one in plan.control_plane.all_gather(known) if one is not None
            )
        return position.state_of(plan, passes, where, save, rollout)

    def save(self, folder: Path, kept: State | None) -> dict[str, Any]:
        """Write the tables that are not data sets, then the position; return the position.

        One node writes replicated tables, each node its shard of the others. A table's folder gets
        its name once all files are complete on the disk.

        Args:
            folder: Folder of saves.
            kept: State of the latest save here that this Replay has loaded or made.
        """
        parts = self._parts
        plan = parts.plan
        control_plane = plan.control_plane
        spread = plan.placement.spread
        loader = self._loader
        control_plane.attempt("the priority updates", parts.late_updates.drain)
        known = loader.position.at if plan.topology.place.reads else None
        # All additions and updates that the save contains come before this.
        used = position.batches(
            next(one for one in control_plane.all_gather(known) if one is not None)
        )
        if spread:
            self._pause()
        tables = self._changing()
        columns = None
        recorded: dict[str, Written] = {}

        def write(save_id: str) -> dict[str, dict[str, str]]:
            nonlocal columns
            if plan.leads_first_shard:
                columns = rollout_file.write_rollout(folder, save_id, loader.position.columns, kept)
            written = {}
            for name, table in tables.items():
                streams = list(parts.streams.get(name, {}).values())
                if plan.leads_first_shard or (plan.leads_shard and name in spread):
                    save_folders.check_shared(folder, save_id)
                    part = save_folders.partial_of(folder, name)
                    links = self._links(name, table)
                    with table.lock:
                        written[name] = table_files.save_table(
                            table, streams, part, used, save_id, links
                        )
                    recorded[name] = links.written
            return written

        def state(save: State) -> dict[str, Any]:
            of_ranks = control_plane.all_gather(columns)
            return self.state(save, next((one for one in of_ranks if one is not None), None))

        names = list(tables)
        is_first = plan.leads_first_shard
        made = save_folders.write_save(control_plane, folder, names, kept, is_first, write, state)
        self._latest = (folder, made)
        self._written = recorded
        return made

    def _links(self, name: str, table: Table) -> SegmentLinks:
        """Return the links to the unchanged segments of a table in the save that was made last."""
        before = None
        if self._latest is not None:
            at, latest = self._latest
            with contextlib.suppress(CheckpointError):  # it was removed
                before = save_folders.find(at, name, latest["save"])
        if before is not None:
            before = table_files.folder_of(table, before)
        links = SegmentLinks(before, self._written.get(name, {}))
        links.check()
        return links

    def load(self, state: State, folder: Path | None) -> None:
        """Continue at a state, with its save's tables; None: tables stay. Errors change nothing."""
        parts = self._parts
        plan = parts.plan
        control_plane = plan.control_plane
        loader = self._loader
        control_plane.attempt("the priority updates", parts.late_updates.drain)

        def check() -> None:
            position.check(state, plan, may_grow=True)
            if folder is None and any(table.ledger is not None for table in parts.tables.values()):
                rule = "must be loaded with its tables, which have the ledger of prompts"
                raise CheckpointError("the gear state", rule, None, "use save and load")
            loader.check(state.get("rollout"))

        def read_columns() -> Mapping[str, torch.Tensor]:
            rollout = state.get("rollout")
            if not rollout or not rollout.get("names"):
                return {}
            if folder is None:
                rule = (
                    "must be loaded from the folder of its save, which has the columns of its "
                    "rollout batch"
                )
                remedy = "use save and load, or take states between two rollout batches"
                raise CheckpointError("the gear state", rule, ", ".join(rollout["names"]), remedy)
            return rollout_file.read_rollout(folder, state)

        # Until all ranks have read and checked what they load, nothing changes.
        control_plane.attempt("loading the state", check)
        save_folders.compare(control_plane.all_gather(state))
        loading = None
        if folder is not None:
            loading = TableLoader(plan, self._changing(), parts.streams)
            control_plane.attempt("loading the tables", partial(loading.read, folder, state))
        columns = control_plane.attempt("loading the rollout batch", read_columns)

        # All ranks stop at the same selection; then each node's leader seeks the streams.
        if parts.barrier is not None:
            parts.barrier.drain()
        self._pause()
        if parts.barrier is not None:
            parts.barrier.restart()
        at = position.of(state, plan.config.sampled_tables)
        passes = {name: int(count) for name, count in state["passes"].items()}
        if plan.topology.leads_node:
            for stream in parts.all_streams:
                name = stream.spec.name
                table = stream.table
                start = (passes.get(name, 0) << PASS_SHIFT, 0, 0, 0, 0)
                with table.lock:
                    words = at[table.spec.name].values() if name == TRAIN else start
                    stream.state.seek(*words, fresh=loading is not None)
        control_plane.barrier()
        if loading is None:  # else after the tables: by their old content no prompt may be leased
            parts.rates.set_quotas(parts.train)
        parts.leave_inner_stage()
        loader.seek(position.LoaderPosition(at, state.get("rollout"), columns))
        if loading is not None:  # the contents of the tables, for which no selection is made now
            control_plane.attempt("loading the tables", loading.replace)
            if plan.placement.spread:
                control_plane.attempt("loading the unused selections", loading.deliver)
                loading.announce()
            parts.rates.set_quotas(parts.train)
            parts.leave_inner_stage()
        self._passes.begun.clear()
        self._passes.begun.update(passes)

    def _changing(self) -> dict[str, Table]:
        """Return the tables whose content or priorities are not in the data set."""
        parts = self._parts
        kept = {
            stream.table.spec.name for stream in parts.train if stream.spec.priorities is not None
        }
        return {
            name: table
            for name, table in parts.tables.items()
            if table.spec.dataset is None or name in kept
        }

    def _pause(self) -> None:
        """Stop prefetching on all nodes after the same selection.

        `NodeLinks.leave` ends waits of other nodes for this one.
        """
        self._parts.stop_prefetching()
        self._parts.links.leave()
        self._parts.plan.control_plane.barrier()
        for stream in self._parts.all_streams:
            if stream.state.failure is not None:
                stream.state.failure.forget()  # of the abandoned selection

"""DeviceReplay: a replay with tables in one device's memory; its `check` of refused inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.priority_reduction import (
    float32_on_device,
    masks_of,
    reduce_steps,
    refuse_masks,
)
from deepspeed_gear.batching.transform import transform_words
from deepspeed_gear.checkpoint import position
from deepspeed_gear.config import GearConfig, PriorityOptions
from deepspeed_gear.config.sampler_options import EpochSampler
from deepspeed_gear.device import added_columns, device_checkpoint
from deepspeed_gear.device.device_loader import DeviceBatch, DeviceEvaluation, DeviceLoader
from deepspeed_gear.device.device_table import (
    DeviceTable,
    TableMixture,
    make_table,
    ops_for_device,
    usable_device,
)
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    SchemaError,
    ShapeError,
    StoreError,
    undo_on_error,
)
from deepspeed_gear.ops.records import RingState
from deepspeed_gear.plan.resolved_plan import Resolved, resolve_plan
from deepspeed_gear.replay.log_warnings import ClampWarning
from deepspeed_gear.replay.metrics import Progress
from deepspeed_gear.replay.replay_base import ReplayBase
from deepspeed_gear.sampling.batch_sizes import TRAIN, BatchInfo
from deepspeed_gear.schema import Schema


class DeviceReplay(ReplayBase):
    """The replay system of a config whose tables have `"placement": "device"`.

    There is one table, or a mixture of several with constant shares. Table, tree, cursors and
    counters are in the memory of this rank's device. `sample_`, `add_` and `update_priorities_`
    change fixed tensors, never wait for the device, and read all state from its memory: they can be
    captured in a CUDA graph together with the training step, and traced by `torch.compile`. The
    contents are lost with the process unless `save` is called.

    A data set is copied to the device of each rank. Added trajectories are on the devices of this
    rank's replica; its tensor and sequence ranks add the same ones. Each replica samples from its
    own table, with its own probabilities, priorities and weights, without communication: for one
    exact distribution over all replicas use a table in host memory (`"placement": "host"`).

    Construction, `save`, `load` and `close` are collective. Not thread-safe.

    Args:
        config: The `gear` section, or the path of a JSON file.
        device: The device of the table; "cpu" runs the same program on the host.
        process_group: Ranks of the run; None: all ranks.
        schemas: Schemas of tables that have none in the config.
        info: Batch sizes where an engine decides them.
        place: This rank's place in the grid; None: each rank is a replica.
        engine_dtype: The dtype of fields with `"as": "engine"`.
    Raises:
        ConfigError, DataError, BuildError: On every rank; all resources are released.
    Cost: `table.num_bytes` of the device's memory.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | GearConfig | str | Path,
        device: torch.device | str = "cuda",
        process_group: Any = None,
        schemas: Mapping[str, Schema] | None = None,
        *,
        info: BatchInfo | None = None,
        place: RankCoordinates | None = None,
        engine_dtype: torch.dtype = torch.float32,
    ) -> None:
        arguments.one_of("engine_dtype", engine_dtype, torch.dtype, "a torch.dtype")
        plan = resolve_plan(config, process_group, schemas, info, place, on_device=True)
        self.tables: dict[str, RingTable] = {}
        with undo_on_error(plan.control_plane.close), undo_on_error(self._close_tables):
            to = plan.control_plane.attempt("the device", lambda: usable_device(device))
            super().__init__(plan, to, engine_dtype)
            plan.control_plane.attempt(
                "the table on the device", lambda: self._build(plan, engine_dtype)
            )
            self._loader = DeviceLoader(plan, self._mixture, self._burn_in, owner=self)
        self._clamp_warnings = self._new_clamp_warnings()
        # Global batches selected by this replay, less the position of the latest load.
        self._num_before_load = 0

    def _build(self, plan: Resolved, engine_dtype: torch.dtype) -> None:
        info = plan.info
        sampler = plan.config.item_sampler
        self._burn_in = BurnIn.of(plan.config.burn_in, plan.fields, plan.needs.fields)
        ops = ops_for_device(plan.config.backend, plan.ops, self.device)
        tables = []
        for name in plan.config.sampled_tables:
            resolved = plan.tables[name]
            if resolved.dataset is not None and sampler.kind == "top_k" and info.data_world > 1:
                rule = (
                    f'must not be "top_k" for a data set on the devices of {info.data_world} '
                    "replicas: each takes the highest priorities of its own copy, so all would "
                    "train on the same samples"
                )
                remedy = f'give gear.tables.{name} "placement": "host", where they draw together'
                raise ConfigError("gear.sampler.kind", rule, sampler.kind, remedy)
            train = resolved.streams[TRAIN]
            self.tables[name] = make_table(plan, name, train, ops, self.device)
            tables.append(DeviceTable(plan, name, self.tables[name], train, engine_dtype))
        num_samples = info.micro * info.accumulation
        self._mixture = TableMixture(tables, plan.mixture, num_samples, info.accumulation)
        self.table = tables[0].table
        self.schema = tables[0].table.schema
        splits = dict(plan.tables[tables[0].name].streams) if tables[0].has_data else {}
        splits.pop(TRAIN, None)
        self._passes = DeviceEvaluation(plan, tables[0], splits, self._burn_in)

    def _changing(self, name: str | None) -> DeviceTable:
        """Return the table of a name, which must hold no data set; None: the only such table."""
        self._check_open()
        tables = {each.name: each for each in self._mixture.tables}
        changing = [each.name for each in self._mixture.tables if not each.has_data]
        table = tables[self._table_name(name, tables, changing or list(tables)[:1])]
        if table.has_data:
            raise StoreError(
                "a table of a data set",
                "must not be changed",
                remedy="change a table with a capacity; a data set is fixed",
            )
        return table

    def new_batch(self) -> DeviceBatch:
        """Return tensors that `sample_` can fill; they belong to the caller."""
        return self._loader.new_batch()

    def sample_(self, out: DeviceBatch) -> None:
        """Fill a batch with this rank's next micro batch. Waits for nothing; can be captured.

        A captured graph must contain the calls of whole global batches: a multiple of the
        accumulation steps. All micro batches of a global batch are gathered with its first one, so
        trajectories added in between change none of them.

        Args:
            out: From `new_batch`.
        Raises:
            StoreError: Nothing was added to this replica's table yet, or the replay is closed.
        """
        self._check_filled()
        if not isinstance(out, DeviceBatch):
            raise DataError(
                "out",
                "must be from new_batch",
                type(out).__name__,
                "call new_batch once and give its result",
            )
        self._loader.fill_(out)

    def sample(self) -> Batch:
        """Return this rank's next micro batch.

        Its tensors are overwritten after max(2, accumulation) more calls.
        """
        self._check_filled()
        batch = self._loader.next()
        if self._transform is None:
            return batch
        numbers = torch.split(batch.sample_number, self._mixture.sizes[batch.micro_index])
        parts = zip(self._mixture.tables, numbers, strict=True)
        words = [transform_words(each.seed, each.random_key, part) for each, part in parts]
        return self._transform(batch.again(), torch.cat(words))

    def add_(
        self,
        columns: Mapping[str, Tensor],
        lengths: Tensor | None = None,
        *,
        table: str | None = None,
    ) -> None:
        """Add trajectories; the oldest are evicted if needed. Waits for nothing; can be captured.

        Args:
            columns: Column -> tensor on the device, of the column's dtype: [E, T, *shape];
                [E, T + 1, *shape] for a column of T+1 rows; [E, *shape] for one value per
                trajectory. T is at most `max_length`. Trajectories that fail a condition of
                `sampler.where` are not stored.
            lengths: Number of steps of each trajectory; 0 adds nothing; None: T for all. Lengths
                outside [0, T], and trajectories with an end flag before their last step, are
                refused on the device: nothing is added, and `statistics` counts them. [E], int64.
            table: Name of the table, here and in the other calls; None: the only one that holds no
                data set.
        Raises:
            SchemaError, ShapeError, DataError: A column is missing or does not fit; or, in host
                memory, an end flag is set before a last step.
            StoreError: The table holds a data set, or takes steps of environments.
        """
        into = self._changing(table)
        if into.table.num_envs:
            rule = "must get single steps: its rows are divided among the environments of num_envs"
            raise StoreError(
                "the table on the device", rule, None, "use add_steps_, or leave num_envs out"
            )
        count, steps = added_columns.check_trajectories(into.table, columns, lengths)
        if lengths is None:
            lengths = torch.full((count,), steps, dtype=torch.int64, device=self.device)
        elif steps < into.table.most_steps:
            lengths = torch.where(lengths <= steps, lengths, -1)
        lengths = added_columns.without_inner_ends(into.table, columns, lengths, steps)
        into.table.add_(columns, into.filter.lengths(columns, lengths), steps)
        into.mark_filled()

    def add_transitions_(
        self,
        columns: Mapping[str, Tensor],
        following: Mapping[str, Tensor],
        *,
        table: str | None = None,
    ) -> None:
        """Add one transition of each environment, as trajectories of one step.

        Args:
            columns: All columns, without a time axis. [E, *shape].
            following: Rows of the columns of T+1 rows after the step. [E, *shape].
            table: As `add_`.
        Raises:
            SchemaError, ShapeError, DataError: As `add_`.
            ConfigError: `n_step.n` is more than 1, the steps of these trajectories.
        """
        trajectories = added_columns.as_trajectories(
            self._changing(table).table, columns, following
        )
        n = 1 if self.config.n_step is None else self.config.n_step.n
        if n > 1:
            rule = (
                "must be 1 where transitions are added one by one: a return ends with its "
                "trajectory"
            )
            remedy = (
                "add pieces of that many steps or more with add_, or steps with num_envs and "
                "add_steps_"
            )
            raise ConfigError("gear.n_step.n", rule, n, remedy)
        self.add_(trajectories, table=table)

    def add_steps_(
        self,
        columns: Mapping[str, Tensor],
        following: Mapping[str, Tensor] | None = None,
        *,
        mask: Tensor | None = None,
        autoreset: str = "same_step",
        table: str | None = None,
    ) -> None:
        """Add a step of every environment, which continues its open trajectory. Waits for nothing.

        The next batch may contain all steps so far; windows and n-step returns end at the newest
        step, as in a table in host memory whose writer publishes each step. A trajectory ends with
        `terminated` or `truncated`, or, marked as truncated, where the next step would exceed
        `max_length`. The oldest trajectories are evicted; an open one only if `mask` left its
        environment out until it is the oldest. Can be captured in a CUDA graph.

        Args:
            columns: The state before the step, the action, and its results; and columns of one
                value per trajectory, of which the first step's value is stored. `terminated` is
                required and `truncated` optional, even where the schema has no such columns.
                [num_envs, *shape] each, on the device.
            following: Columns of T+1 rows after the step: at an end the last observation of the
                episode (gymnasium: `infos["final_obs"]`), not the first of the next one.
            mask: Environments that have a step; None: all. [num_envs], bool.
            autoreset: "same_step" or "disabled": every call is a step. "next_step": the call after
                an end resets its environment and adds no step.
            table: As `add_`.
        Raises:
            SchemaError, ShapeError, DataError: A column is missing or does not fit.
            ConfigError: There is no such autoreset mode.
            StoreError: The table has no `num_envs`, or holds a data set.
        """
        into = self._open_steps(table)
        following = {} if following is None else following
        added_columns.check_step(into.table, columns, following, mask, autoreset)
        into.table.add_steps_(columns, following, mask, autoreset)
        into.mark_filled()

    def end_steps_(self, mask: Tensor | None = None, *, table: str | None = None) -> None:
        """End open trajectories where the program resets environments.

        Their last steps are marked as truncated.

        Args:
            mask: Environments that are reset; None: all. [num_envs], bool.
            table: As `add_`.
        Raises:
            StoreError: The table has no `num_envs`, or holds a data set.
            SchemaError, ShapeError, DataError: `mask` is not a tensor of bools on the device.
        """
        into = self._open_steps(table)
        if mask is not None:
            added_columns.check_mask(into.table, mask)
        into.table.end_steps_(mask)

    def _open_steps(self, name: str | None) -> DeviceTable:
        """Return the table of a name, which must take steps of environments."""
        into = self._changing(name)
        if not into.table.num_envs:
            rule = "must have num_envs, so that steps of environments can be added"
            raise StoreError(
                "the table on the device", rule, None, f"set gear.tables.{into.name}.num_envs"
            )
        return into

    def fill_(
        self, ids: Tensor, columns: Mapping[str, Tensor], *, table: str | None = None
    ) -> None:
        """Write columns of trajectories; those no longer stored are left out.

        Args:
            ids: Ids as in `batch.trajectory_id` of this replica. [n], int64.
            columns: Column -> [n, max_length (+ 1), *shape], or [n, *shape] for one value per
                trajectory. Rewards and end flags are refused: other quantities derive from them.
            table: As `add_`.
        Raises:
            SchemaError, ShapeError, DataError: A column is unknown, or does not fit.
            StoreError: The table holds a data set.
        """
        changing = self._changing(table)
        into = changing.table
        self._check_ids(ids)
        added_columns.check_late(into, ids, columns)
        for name in changing.filter.columns & columns.keys():
            raise SchemaError(
                f"column {name}",
                "must not be filled: gear.sampler.where reads it when added",
                remedy="give the column with add_ or add_steps_",
            )
        into.fill_(ids, columns)

    def remove_(self, ids: Tensor, *, table: str | None = None) -> None:
        """Remove trajectories before the next batch; those no longer stored are left out.

        Their rows are used again when they would have been evicted; later steps of an open
        trajectory begin another one. Waits for nothing; can be captured.

        Args:
            ids: Ids as in `batch.trajectory_id` of this replica. [n], int64.
            table: As `add_`.
        Raises:
            ShapeError, DataError: `ids` is not such a tensor on the device.
            StoreError: The table holds a data set.
        """
        changing = self._changing(table)
        self._check_ids(ids)
        if ids.device != self.device:
            raise DataError(
                "ids",
                f"must be on {self.device}",
                str(ids.device),
                f"move them with .to({str(self.device)!r})",
            )
        changing.table.remove_(ids)

    @staticmethod
    def _check_ids(ids: object) -> None:
        form = (torch.int64, 1)  # dtype and number of axes
        if not isinstance(ids, Tensor) or ids.is_nested or (ids.dtype, ids.dim()) != form:
            given = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise ShapeError(
                "ids",
                "must be a tensor [n], int64",
                given,
                "give ids as a one-dimensional int64 tensor",
            )

    def update_priorities_(
        self, batch: Batch, priorities: Tensor, mask: Tensor | None = None
    ) -> None:
        """Set the priorities of a batch's items, for the next selection. Waits for nothing.

        If an item has several values, the one with the highest sample number wins. Negative,
        infinite and NaN values change nothing; `statistics` counts them, and `check` raises. With
        accumulation the values of all micro batches are applied together, after the last one's.

        Args:
            batch: From `sample` or `sample_`.
            priorities: [B], or [B, T] to be reduced by `sampler.reduce`. Any floating dtype.
            mask: Which steps count, as in `Replay.update_priorities`. [B, T], bool.
        Raises:
            ConfigError: The sampler has no priorities.
            ShapeError: A shape does not fit the batch.
            DataError: The batch is not of this replay's training stream, or a dtype does not fit.
        """
        self._check_open()
        sampler = self.config.item_sampler
        if not isinstance(sampler, PriorityOptions):
            raise ConfigError(
                "gear.sampler.kind",
                'must be "prioritized" or "top_k"',
                sampler.kind,
                "choose such a sampler, or do not report priorities",
            )
        values = arguments.dense("priorities", priorities)  # no implicit copies to a device
        if values.is_complex():
            raise DataError(
                "priorities",
                "must hold real numbers",
                str(values.dtype),
                "give the magnitude, for example priorities.abs()",
            )
        if mask is not None and arguments.dense("mask", mask).dtype != torch.bool:
            raise DataError("mask", "must be bool", str(mask.dtype), "convert it with mask.bool()")
        if values.dim() == 2 and self.batch_info.sequence_world > 1:
            rule = "must have shape [B] where ranks share the time axis"
            raise ShapeError("priorities", rule, list(values.shape), "reduce them over these ranks")
        if not isinstance(batch, DeviceBatch):
            rule = "must be from this replay's sample or new_batch, and no clone or part"
            raise DataError(
                "batch", rule, type(batch).__name__, "report the priorities of the whole batch"
            )
        if batch.owner is not self:
            rule = "must be of this replay's training stream"
            raise DataError("batch", rule, None, "nothing was changed")
        if values.dim() == 2:
            counts, *others = masks_of(batch, values, mask)
            if others:  # comparing them would wait for the device
                refuse_masks()
            values = reduce_steps(values, counts, sampler.reduce, sampler.eta, is_checked=False)
        if values.shape != (batch.num_samples,):
            rule = f"must have shape [{batch.num_samples}], or [{batch.num_samples}, T]"
            raise ShapeError(
                "priorities",
                rule,
                list(priorities.shape),
                "give one priority for each sample, or for each step of it",
            )
        self._loader.update_(batch, float32_on_device(values.to(self.device)))

    update_priorities = update_priorities_

    @property
    def num_steps(self) -> int:
        """Number of stored steps of all tables. Waits for the device."""
        return sum(int(table.state[RingState.STEPS]) for table in self.tables.values())

    @property
    def num_trajectories(self) -> int:
        """Number of stored trajectories of all tables. Waits for the device."""
        return sum(table.num_trajectories() for table in self.tables.values())

    def __len__(self) -> int:
        return self.num_trajectories

    def statistics(self) -> dict[str, Any]:
        """Return sizes, and counts of priority updates. Waits for the device.

        For a mixture, sums over the tables, and each table's entries by name under "tables".
        """
        every = {name: table.statistics() for name, table in self.tables.items()}
        first = next(iter(every.values()))
        if len(every) == 1:
            return first
        sums = {key: sum(counts.get(key, 0) for counts in every.values()) for key in first}
        return {**sums, "global_batches": first["global_batches"], "tables": every}

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics for DeepSpeed's monitor. Waits for the device."""
        statistics = self.statistics()
        return {name: float(statistics[name]) for name in ("steps", "trajectories", "refused")}

    def total_progress(self) -> Progress:
        elapsed_s = time.perf_counter() - self._begin_s
        return Progress(self._num_selected() * self.batch_info.global_batch, elapsed_s, None, None)

    def check(self) -> None:
        """Check that the device has accepted all inputs and had items to sample. Waits for it.

        The first rank of a node logs a warning if many priorities were clamped since the last call.

        Raises:
            DataError: The device has refused a trajectory or a priority, or had nothing to sample.
        """
        refused = sum(int(table.state[RingState.REFUSED]) for table in self.tables.values())
        if refused:
            rule = (
                "must be in range: lengths in [0, T], end flags at last steps only, priorities "
                "finite and at least 0, beta in [0, 1]"
            )
            raise DataError(
                "input of the device",
                rule,
                f"{refused} outside it",
                "correct the inputs; the refused rows and priorities changed nothing",
            )
        counts = [int(table.state[RingState.EMPTY]) for table in self.tables.values()]
        empty = next(filter(None, counts), 0)
        if empty:
            rule = "must have an item with a mass whenever a batch is drawn"
            remedy = (
                "add trajectories that have an anchor before sample_, and report priorities above "
                "0; batch.valid and batch.is_weight mark the samples that exist"
            )
            sampler = self.config.item_sampler
            if isinstance(sampler, EpochSampler) and sampler.tail == "drop":
                rule = (
                    'must hold a global batch whenever one is drawn, where sampler.tail is "drop"'
                )
                remedy = (
                    "add as many items before sample_, lower gear.batch_size, or use sampler.tail "
                    '= "wrap"; batch.valid and batch.is_weight mark the samples that exist'
                )
            given = f"{empty} global batches without samples"
            raise DataError("the table on the device", rule, given, remedy)
        for warning in self._clamp_warnings:
            warning.check()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, without trajectories and priorities. Collective.

        Equal on all ranks, and JSON-able. Waits for the device. `export_table` and `save` also have
        the contents.

        Raises:
            StoreError: Only some micro batches of a global batch were used.
        """
        self._settle()
        return device_checkpoint.position_of(self._plan, self.tables)

    def export_table(self) -> dict[str, Any]:
        """Return a copy of the table and the position, in host memory. Waits for the device.

        Raises:
            StoreError: Only some micro batches of a global batch were used.
        """
        self._settle()
        saved = partial(device_checkpoint.saved_names, self._plan)
        content = {name: table.copied(saved(name, table)) for name, table in self.tables.items()}
        return {**device_checkpoint.position_of(self._plan, self.tables), "content": content}

    def import_table(self, exported: Mapping[str, Any]) -> None:
        """Continue from an exported table, in the same tensors: captured graphs stay valid.

        Raises:
            CheckpointError: It has another format, config, size or data set; nothing has changed.
        """
        self._check_open()
        arguments.mapping("exported", exported, "pass the result of export_table")
        content = arguments.mapping("the exported content", exported.get("content"))
        for name, tensors in content.items():
            arguments.tensors(f"the exported content of {name}", tensors)
        selected = self._num_selected()
        position.check(exported, self._plan)
        device_checkpoint.restore(self._plan, self.tables, content)
        self._go_on(selected)

    def _save(self, folder: Path, kept: Mapping[str, Any] | None) -> dict[str, Any]:
        self._settle()
        return device_checkpoint.save(self._plan, self.tables, folder, kept)

    def _load(self, state: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any] | None:
        selected = self._num_selected()
        loaded = None
        if folder is None:
            device_checkpoint.seek(self._plan, self.tables, state)
        else:
            loaded = device_checkpoint.load(self._plan, self.tables, folder, state)
        self._go_on(selected)
        return loaded

    def _num_selected(self) -> int:
        """Return the number of global batches selected since this replay was made."""
        return self._num_before_load + int(self.table.state[RingState.BATCH])

    def _go_on(self, selected: int) -> None:
        """Continue after the tables have changed; `selected` is `_num_selected` before."""
        self._num_before_load = selected - int(self.table.state[RingState.BATCH])
        for each in self._mixture.tables:
            each.mark_filled(each.table.num_trajectories() > 0)
        self._loader.begin_anew()
        self._clamp_warnings = self._new_clamp_warnings()  # earlier updates do not count

    def _new_clamp_warnings(self) -> list[ClampWarning]:
        """Return the clamp warning of each table; none unless this rank leads its node."""
        if not self._mixture.is_prioritized or not self.topology.leads_node:
            return []
        return [
            ClampWarning(each.name, each.table.items.most_bits, each.table.priority_counts)
            for each in self._mixture.tables
        ]

    def _settle(self) -> None:
        """Apply all waiting priority updates; raise a StoreError within a global batch."""
        self._check_open()
        if self._loader.next_index != 0:
            rule = "must be taken between two global batches"
            at = f"micro batch {self._loader.next_index} of {self.batch_info.accumulation}"
            raise StoreError("the state", rule, at, "use the remaining micro batches first")
        self._loader.apply_updates()

    def clear(self, *, table: str | None = None) -> None:
        """Remove all trajectories of this replica's table.

        Raises:
            StoreError: The table holds a data set.
        """
        cleared = self._changing(table)
        self._loader.begin_anew()
        cleared.table.clear()
        cleared.mark_filled(False)

    def _check_filled(self) -> None:
        self._check_open()
        for each in self._mixture.tables:
            if not each.is_filled:
                what = f"the table {each.name} on the device"
                raise StoreError(what, "must hold a trajectory", None, "add_ comes first")

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._folder_locks.release()
            self._close_tables()
            self._plan.control_plane.close()

    def _close_tables(self) -> None:
        for table in self.tables.values():
            table.close()

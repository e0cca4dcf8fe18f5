"""Tables on a device: draws, exponents of PER weights, priority updates, and mixtures of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.gather import Buffers, Gatherer, GatherOptions
from deepspeed_gear.config import SamplerOptions
from deepspeed_gear.config.sampler_options import SHARES_TOLERANCE, PrioritizedSampler
from deepspeed_gear.config.schedules import function_of
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.device.added_columns import AddFilter
from deepspeed_gear.device.ring_table import ItemRule, RingTable, RingTableSpec
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import FAN_OUT, ONE_Q62
from deepspeed_gear.ops.records import MassUnit, Normalize, Resolution, RingState, Slot
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.plan.table_sizes import capacity_of, environment_sizes
from deepspeed_gear.sampling.mass_rules import NORMALIZE_CODES
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.samplers.base import NativeDraw
from deepspeed_gear.sampling.stream_spec import StreamSpec

_BETA = "gear.sampler.beta"
_PROBED = (0, 1, 1000, 10**9)  # global batches at which a function is checked


class WeightExponents:
    """The schedule of beta on the device: 8 bytes per global batch while it is linear.

    A function needs no memory.
    """

    def __init__(self, sampler: SamplerOptions, device: torch.device) -> None:
        beta: Any = sampler.beta if isinstance(sampler, PrioritizedSampler) else None
        self._function: Callable[[Tensor], Any] | None = function_of(beta, _BETA)
        values = np.zeros(0, np.int64)
        if self._function is not None:
            for batch in _PROBED:
                at = torch.tensor(float(batch), dtype=torch.float64, device=device)
                try:
                    value = self._function(at)
                except (TypeError, ValueError, RuntimeError) as error:
                    value = error
                is_tensor = isinstance(value, Tensor)
                if not is_tensor or value.shape != () or value.device.type != device.type:
                    rule = "must take a tensor [], float64, and return one, for a table on devices"
                    shown = list(value.shape) if is_tensor else f"{type(value).__name__}: {value}"
                    remedy = "use the functions of torch, or a linear schedule"
                    raise ConfigError(_BETA, rule, shown, remedy)
                if not 0 <= float(value) <= 1:
                    at_batch = f"{_BETA} at global batch {batch}"
                    raise ConfigError(
                        at_batch,
                        "must be in [0, 1]",
                        float(value),
                        "correct the schedule's function",
                    )
        elif isinstance(beta, dict):  # until it is constant, as `value_at`
            first, last, steps = beta["linear"]
            parts = np.minimum(np.arange(steps + 1) / steps, 1.0)
            values = ((first + (last - first) * parts) * float(ONE_Q62)).astype(np.int64)
        elif beta is not None:
            values = np.array([int(float(beta) * ONE_Q62)], np.int64)
        self._values = torch.from_numpy(values).to(device)

    def next_(self, state: Tensor) -> Tensor:
        """Return the exponents for `ring_select_`, [n], Q62; those outside [0, 1] are counted."""
        if self._function is None:
            return self._values
        value = self._function(state[RingState.BATCH].double()).double()
        beta = value.nan_to_num(0.0).clamp(0.0, 1.0)
        state[RingState.REFUSED] += (beta != value).long()
        exponent: Tensor = (beta * ONE_Q62).long().reshape(1)
        return exponent


class DeviceTable:
    """A table with the stream that samples from it; methods mutate fixed tensors and never wait."""

    def __init__(
        self,
        plan: Resolved,
        name: str,
        table: RingTable,
        spec: StreamSpec,
        engine_dtype: torch.dtype,
    ) -> None:
        config = plan.config
        needs = plan.needs
        options = plan.tables[name].options
        self.name = name
        self.table = table
        self.betas = WeightExponents(config.item_sampler, table.device)
        self.seed = spec.seed
        self.random_key = spec.random_key
        #: Whether it holds a data set, which does not change.
        self.has_data = options.data is not None
        # Whether it has ever held a trajectory. A plain attribute: torch.compile puts no guard on
        # an attribute that the trace itself sets.
        self.is_filled = self.has_data
        #: Which added trajectories are stored.
        self.filter = AddFilter(
            () if self.has_data else spec.rule.where, table.schema, table.device
        )
        gathered = GatherOptions(
            fields=needs.fields,
            statistics=plan.statistics(needs.fields),
            n_step=config.n_step if needs.n_step else None,
            num_samples=plan.info.micro,
            engine_dtype=engine_dtype,
            # For a kernel it would be its blocks.
            threads=config.threads if table.device.type == "cpu" else 1,
        )
        self.gatherer = Gatherer(gathered, table, depth=0)
        self.has_step_items = spec.rule.unit == "step" and spec.priorities is None
        # Draws after which a trajectory is removed; 0: never.
        self._most = options.max_times_sampled
        # Of the samplers for devices, only top-k takes each item at most once.
        self._takes_highest = spec.sampler.each_once
        by_slot = table.items.has_priorities and not table.items.by_row
        self._unit = MassUnit.TRAJECTORY if by_slot else table.items.unit
        drops_tail = spec.sampler.drops_tail
        if table.items.by_epoch:
            # Every rank has the whole of a data set, so its replicas share the epochs.
            how = [int(self.has_data), int(drops_tail)]
        else:
            normalize = Normalize.NONE
            if spec.priorities is not None:
                normalize = NORMALIZE_CODES[spec.priorities.normalize]
            how = [int(spec.sampling.native is NativeDraw.STRATIFIED), normalize]
        # The i-th sample since the beginning has the number i * data_world + data_rank.
        numbers = (plan.info.data_world, plan.topology.place.data_rank)
        #: As the ops of `select_` take it.
        self._draw = [spec.seed, spec.random_key, *numbers, *how]
        self._replicas_of_epoch = plan.info.data_world if self.has_data else 1
        # Most items of an epoch whose tail is dropped; None: any number gives batches.
        self._most_items: int | None = None
        if drops_tail and self.has_data:
            self._most_items = int(table.sums[-FAN_OUT:].sum())
        elif drops_tail:
            steps, trajectories = capacity_of(name, options, table.schema, 1)
            self._most_items = trajectories if self._unit == MassUnit.TRAJECTORY else steps

    def mark_filled(self, is_filled: bool = True) -> None:
        """Note whether the table holds trajectories."""
        self.is_filled = self.has_data or is_filled

    def check_fills(self, count: int) -> None:
        """Raise ConfigError if no epoch could fill the samples of a global batch.

        Args:
            count: The samples that this replica draws from the table.
        """
        needed = count * self._replicas_of_epoch
        if self._most_items is not None and self._most_items < needed:
            rule = f'must hold a global batch ({needed} items) where sampler.tail is "drop"'
            remedy = 'lower gear.batch_size, or use sampler.tail = "wrap"'
            raise ConfigError(f"gear.tables.{self.name}", rule, self._most_items, remedy)

    def select_(self, resolutions: Tensor, weights: Tensor, epochs: Tensor) -> None:
        """Draw the next global batch.

        Args:
            resolutions: Receives the resolutions. [B, 8], int64.
            weights: Receives the PER weights. [B], float32; [0] without priorities.
            epochs: Receives the epoch of each sample. [B], int64; [0] without epochs.
        """
        table = self.table
        ops = self.table.ops
        most = self._most
        how = (table.items.anchors, table.shape, self._draw, self._unit)
        given = (table.state, resolutions, weights, table.slots, table.sums)
        if table.items.by_epoch:
            ops.ring_epoch_(table.state, resolutions, epochs, table.slots, table.sums, *how)
        elif self._takes_highest:
            ops.ring_top_k_(*given, table.priorities, table.row_slots, *how, most > 0)
        elif most:
            ops.ring_select_limited_(
                *given, table.minima, self.betas.next_(table.state), *how, most
            )
        else:
            ops.ring_select_(
                *given, table.minima, table.row_slots, self.betas.next_(table.state), *how
            )
        if most:
            slots = resolutions[:, Resolution.SLOT]
            ids = resolutions[:, Resolution.ID]
            times = table.slots[:, Slot.TIMES_SAMPLED][slots.clamp(min=0)]
            table.remove_(torch.where(times >= most, ids, Resolution.NO_SAMPLE))

    def update_(self, resolutions: Tensor, values: Tensor) -> None:
        """Set the priorities of samples; the last one wins for equal items.

        Args:
            resolutions: Resolutions of the samples. [B, 8], int64.
            values: Priorities. [B], float32.
        """
        table = self.table
        items = self.table.items
        known = (table.state, table.sums, table.minima, table.priorities, table.slots)
        unit = MassUnit.STEP if items.by_row else MassUnit.TRAJECTORY
        rest = (items.anchors, table.shape, unit, items.alpha, items.most_bits)
        table.ops.ring_update_(*known, resolutions, values, *rest)


class TableMixture:
    """The tables that a global batch is drawn from, in fixed shares; often a single one.

    Every method mutates fixed tensors and waits for nothing.

    Args:
        mixture: The shares; None: there is one table.
        num_samples: Samples that this rank draws for a global batch.
        num_parts: Micro batches of a global batch; each has every num_parts-th sample.
    """

    def __init__(
        self,
        tables: Sequence[DeviceTable],
        mixture: Mixture | None,
        num_samples: int,
        num_parts: int,
    ) -> None:
        self.tables = tuple(tables)
        self.shares = [1.0] if mixture is None else mixture.shares(0)
        self._counts = [round(share * num_samples) for share in self.shares]
        for each, share, count in zip(tables, self.shares, self._counts, strict=True):
            if count == 0 or abs(share - count / num_samples) > SHARES_TOLERANCE:
                rule = (
                    f"must be a whole number of {num_samples} samples where tables lie on devices"
                )
                least = max(count, 1)
                remedy = (
                    f"a captured step has fixed numbers: use {least / num_samples} ({least} "
                    "samples), another batch size, or leave the table out"
                )
                raise ConfigError(f"gear.sampler.shares.{each.name}", rule, share, remedy)
            each.check_fills(count)
        # Samples of each table in each micro batch: of tables with 3 and 5 samples in 2 parts,
        # micro batch 0 has the samples 0, 2 | 4, 6 and micro batch 1 has 1 | 3, 5, 7.
        owners = np.repeat(np.arange(len(tables)), self._counts)
        by_part = (owners[part::num_parts] for part in range(num_parts))
        self.sizes = [np.bincount(own, minlength=len(tables)).tolist() for own in by_part]
        self.is_prioritized = tables[0].table.items.has_priorities
        self.by_epoch = tables[0].table.items.by_epoch
        self.buffers = tables[0].gatherer.buffers
        self.has_step_items = tables[0].has_step_items
        self.device = tables[0].table.device
        #: Table of each sample of each micro batch; None: there is one. [B], int64.
        self.sources: list[Tensor | None] = [
            torch.repeat_interleave(torch.tensor(sizes)).to(self.device)
            if len(tables) > 1
            else None
            for sizes in self.sizes
        ]

    def _split(self, values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the samples of each table; for a single table the tensor itself."""
        if len(self.tables) == 1:
            return [values]
        return [values[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]

    def select_(self, resolutions: Tensor, weights: Tensor, epochs: Tensor) -> None:
        """Draw the next global batch, table by table; arguments as `DeviceTable.select_`."""
        given = (resolutions, weights, epochs)
        parts = [self._split(values, self._counts) for values in given]
        for each, own_resolutions, own_weights, own_epochs in zip(self.tables, *parts, strict=True):
            each.select_(own_resolutions, own_weights, own_epochs)

    def update_(self, resolutions: Tensor, values: Tensor, parts: Sequence[int]) -> None:
        """Set the priorities of some micro batches' samples, ordered by sample number."""
        sizes = [sum([self.sizes[part][i] for part in parts]) for i in range(len(self.tables))]
        of_tables = (self._split(resolutions, sizes), self._split(values, sizes))
        for each, of_table, own in zip(self.tables, *of_tables, strict=True):
            if len(own):
                each.update_(of_table, own)

    def fill(self, buffers: Buffers, resolutions: Tensor, part: int) -> None:
        """Gather the samples of a micro batch into a batch of `buffers`."""
        first = 0
        for each, own in zip(self.tables, self._split(resolutions, self.sizes[part]), strict=True):
            if len(self.tables) == 1:
                each.gatherer.fill(buffers, own)
            elif len(own):
                each.gatherer.fill(buffers.part(first, first + len(own)), own)
            first += len(own)

    def totals(self) -> list[Tensor]:
        """Return the total mass of each table's latest selection. [] each, int64."""
        return [each.table.state[RingState.TOTAL] for each in self.tables]

    def probability(self, masses: Tensor, source: Tensor) -> Tensor:
        """Return each sample's probability in one draw, times its table's share. [B], float64."""
        if self.has_step_items:
            masses = torch.ones_like(masses)
        totals = torch.stack(self.totals()).clamp(min=1).double()[source]
        shares = torch.stack([torch.full_like(totals[0], share) for share in self.shares])[source]
        return masses / totals * shares


def dataset_masses(plan: Resolved, name: str, spec: StreamSpec) -> np.ndarray:
    """Return the masses that a stream assigns to the trajectories of a data set. [n], int64."""
    dataset = plan.datasets[name]
    ids = np.arange(len(dataset)) + dataset.first_id
    return spec.rule.masses(
        ids, dataset.lengths, lambda of: as_numbers(dataset.columns[of], dataset.schema[of])
    )


def usable_device(given: torch.device | str) -> torch.device:
    """Return a torch device with its index."""
    device = arguments.device("device", given)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        rule = f"must be one of the {torch.cuda.device_count()} GPUs that torch lists"
        remedy = 'DeviceReplay(config, "cpu") runs the same program on the host'
        raise ConfigError("device", rule, str(given), remedy)
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def ops_for_device(backend: str, ops: Ops, device: torch.device) -> Ops:
    """Return the ops for tables on a device; ConfigError: `gear.backend` or the device has none.

    Args:
        backend: The option `gear.backend`.
        ops: Ops for host memory.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            "device", "must be a CPU or CUDA device", str(device), 'write "cpu" or "cuda:0"'
        )
    if device.type == "cuda" and backend not in ("auto", "cuda"):
        rule = 'must be "auto" or "cuda" for a table in the memory of a GPU'
        raise ConfigError("gear.backend", rule, backend, "leave it out")
    return ops if device.type == "cpu" else load_backend("cuda")


def make_table(
    plan: Resolved, name: str, spec: StreamSpec, ops: Ops, device: torch.device
) -> RingTable:
    """Return this rank's table: with the whole data set, or empty and with the whole capacity."""
    options = plan.tables[name].options
    schema = plan.schemas[name]
    dataset = plan.datasets.get(name)
    items = ItemRule.of(spec)
    final = int(schema.has_final_row)
    envs = options.num_envs
    longest = options.max_length or 0
    if dataset is not None:
        if len(dataset) != dataset.num_trajectories_of_whole:
            at = f"gear.tables.{name}.data"
            raise ConfigError(
                at,
                "must be the whole data set on every node for a table on devices",
                remedy="give the data set itself, not a part of it that gear split made",
            )
        rows = dataset.num_rows
        slots = len(dataset)
        longest = int(dataset.lengths.max())
    elif envs is not None:
        partial = [str(field.derived) for field in plan.fields if field.needs_episode]
        if partial:
            why = "an episode longer than max_length is stored as several trajectories"
            rule = f'must not be "{partial[0]}" where steps are added one by one: {why}'
            raise ConfigError(
                "gear.fields.*.derived", rule, None, "leave num_envs out, and use add_"
            )
        rows, slots = (size * envs for size in environment_sizes(name, options, schema))
    else:
        steps, slots = capacity_of(name, options, schema, 1)
        if options.capacity_trajectories is None:
            slots = max(slots, -(-steps // longest))
        rows = steps + slots * final + longest + final  # rows that a wrap of the ring may skip
    needs_returns = any(field.derived == "return_to_go" for field in plan.fields)
    on_host = f"gear.tables.{name}" if options.rows == "host" else None
    ring = RingTableSpec(schema, rows, slots, longest, items, needs_returns, envs or 0, on_host)
    table = RingTable(ring, ops, device)
    if dataset is None:
        return table
    admitted = None
    if items.by_row:
        owners = np.repeat(np.arange(len(dataset)), dataset.lengths + final)
        steps_of = np.arange(dataset.num_rows) - dataset.first_rows[owners]
        admitted = spec.rule.anchors.admits(steps_of, dataset.lengths[owners])
    table.load_(dataset, dataset_masses(plan, name, spec), admitted)
    return table

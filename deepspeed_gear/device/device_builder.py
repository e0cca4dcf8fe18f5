"""Parts of a DeviceReplay: its device, ops, table and streams."""

from __future__ import annotations

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import GearConfig
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.device.ring_table import DatasetItems, RingTable, RingTableSpec
from deepspeed_gear.distributed import config_resolution
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import MOST_MASS_BITS, ONE_Q62
from deepspeed_gear.sampling.stream_spec import SampledTable, StreamSpec, stream_specs


def masses_of(plan: ReplayPlan, name: str, spec: StreamSpec) -> np.ndarray:
    """Return the masses that a stream gives the trajectories of a table's data set. [n], int64."""
    dataset = plan.datasets[name]

    def column(of: str) -> np.ndarray:
        return as_numbers(dataset.columns[of], dataset.schema[of])

    return spec.rule.masses(np.arange(len(dataset)) + dataset.first_id, dataset.lengths, column)


def specs_of(plan: ReplayPlan, name: str) -> dict[str, StreamSpec]:
    """Return the training stream, and one for each split of a data set."""
    dataset = plan.datasets.get(name)
    num_items = config_resolution.num_items_of(plan.config, name, plan.schemas[name], dataset)
    table = SampledTable(name, plan.splits[name], dataset, num_items)
    specs = stream_specs(plan.config, table, plan.fields, plan.info)
    return {spec.name: spec for spec in specs}


def device_of(given: torch.device | str) -> torch.device:
    """Return a torch device with its index.

    Raises:
        ConfigError: There is none of this name, or torch does not list it.
    """
    device = arguments.device("device", given)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        remedy = 'DeviceReplay(config, "cpu") runs the same program on the host'
        raise ConfigError(
            "device",
            f"must be one of the {torch.cuda.device_count()} GPUs that torch lists",
            str(given),
            remedy,
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def ops_of(config: GearConfig, ops: Ops, device: torch.device) -> Ops:
    if device.type == "cpu":
        return ops
    if device.type != "cuda":
        raise ConfigError("device", "must be a CPU or CUDA device", str(device))
    if config.backend not in ("auto", "cuda"):
        rule = 'must be "auto" or "cuda" for a table in the memory of a GPU'
        raise ConfigError("gear.backend", rule, config.backend)
    return load_backend("cuda")


def table_of(plan: ReplayPlan, name: str, spec: StreamSpec, ops: Ops, device: torch.device) -> RingTable:
    """Return this rank's table: with the whole data set, or empty and with the whole capacity."""
    options, rule = plan.config.resolved_tables[name], spec.rule
    needs_returns = any(field.derived == "return_to_go" for field in plan.fields)
    priorities = spec.priorities
    by_row = priorities is not None and rule.unit == "step"
    has_minima = priorities is not None and priorities.normalize == "table"
    on_host = f"gear.tables.{name}" if options.rows == "host" else None
    dataset = plan.datasets.get(name)
    if dataset is None:
        schema = plan.schemas[name]
        assert options.max_length is not None
        envs = options.num_envs
        if envs is not None:
            partial = [str(field.derived) for field in plan.fields if field.needs_episode]
            if partial:
                why = (
                    f'must not be "{partial[0]}" where steps are added one by one: an episode longer than '
                    "max_length is stored as several trajectories"
                )
                raise ConfigError("gear.fields.*.derived", why, None, "leave num_envs out, and use add_")
            rows, slots = config_resolution.environment_sizes(name, options, schema)
            sizes = rows * envs, slots * envs, options.max_length
            kept = by_row, priorities is not None, has_minima, False
            ring = RingTableSpec(schema, *sizes, *kept, num_envs=envs, rows_on_host=on_host)
            return RingTable(ring, ops, device)
        steps, slots = config_resolution.capacity_of(name, options, schema, 1)
        if options.capacity_trajectories is None:
            slots = max(slots, -(-steps // options.max_length))
        final = int(schema.has_final_row)
        rows = steps + slots * final + options.max_length + final  # rows that a wrap of the ring may skip
        sizes = rows, slots, options.max_length
        kept = by_row, priorities is not None, has_minima, needs_returns
        ring = RingTableSpec(schema, *sizes, *kept, rows_on_host=on_host)
        return RingTable(ring, ops, device)
    if len(dataset) != dataset.num_trajectories_of_whole:
        raise ConfigError(f"gear.tables.{name}.data", "must be whole on every node for a table on devices")
    masses = masses_of(plan, name, spec)
    admitted = None
    if by_row:
        final = int(dataset.schema.has_final_row)
        owners = np.repeat(np.arange(len(dataset)), dataset.lengths + final)
        steps_of = np.arange(dataset.num_rows) - dataset.first_rows[owners]
        admitted = rule.anchors.admits(steps_of, dataset.lengths[owners])
    initial = None if priorities is None else (priorities.initial or 1.0)
    alpha = 0 if priorities is None else int(priorities.alpha(0) * ONE_Q62)
    most_bits = MOST_MASS_BITS if priorities is None else priorities.most_bits
    sizes = dataset.num_rows, len(dataset), int(dataset.lengths.max())
    kept = by_row, priorities is not None, has_minima, needs_returns
    ring = RingTableSpec(dataset.schema, *sizes, *kept, rows_on_host=on_host)
    items = DatasetItems(masses, admitted, initial, alpha, most_bits)
    return RingTable.of_dataset(dataset, ring, items, ops, device)

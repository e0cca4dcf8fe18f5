"""`gear split`: divide a data set into contiguous parts of about equal bytes, one per node.

The parts are OUT/part-0 and so on. Each is read like any data set; copy part i to node i.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_gear.cli import Options
from deepspeed_gear.errors import ConfigError, show_bytes

OPTIONS: Options = {
    "DATASET": "folder of a whole data set",
    "OUT": "folder to make",
    "--nodes N": ("parts to make", {"type": int, "required": True}),
    "--overwrite": "replace the parts in OUT",
}


def run(args: argparse.Namespace) -> int:
    """Write the parts, and print the ids and sizes of each."""
    from deepspeed_gear.data.dataset import Dataset
    from deepspeed_gear.data.dataset_parts import write_parts
    from deepspeed_gear.distributed.shard_placement import non_empty, shards_of

    dataset = Dataset.open(args.dataset)
    if not 1 <= args.nodes <= len(dataset):
        raise ConfigError(
            "--nodes",
            f"must be in [1, {len(dataset)}], the trajectories",
            args.nodes,
            "choose fewer nodes",
        )
    bounds = non_empty(shards_of(dataset.lengths * dataset.schema.row_bytes, args.nodes))
    for part in write_parts(dataset, Path(args.out), bounds, args.overwrite):
        ids = f"ids {part.first_id:,} to {part.first_id + len(part) - 1:,}"
        steps = f"{part.num_steps:,} steps, {show_bytes(part.num_bytes)}"
        print(f"{part.path}: {len(part):,} trajectories ({ids}), {steps}")
    return 0

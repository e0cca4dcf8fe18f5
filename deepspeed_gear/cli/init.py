"""`gear init`: write a config and a training script that fit a data set."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch

from deepspeed_gear.cli import Options
from deepspeed_gear.cli.ssh_hosts import read_hostfile
from deepspeed_gear.config import check_against, parse
from deepspeed_gear.config.field_names import BATCH_NAMES
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.splits import TRAIN, split_of
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

CONFIG_FILE = "gear_config.json"
SCRIPT_FILE = "train.py"
_WINDOW = 8
_HELD_OUT = "eval"  # the split that is made where the data set has none
_SHARES = (0.1, 0.25, 0.5)  # its share is the smallest of these that holds out a trajectory
_MOST_CPU_RANKS = 4  # more ranks do not train so small a model faster
_BATCH = 128  # least number of samples over all ranks
# Batches prepared ahead, where ranks would wait for each other, or a device for its batch.
_PREFETCH = 2

_TEMPLATE = "train.py.template"


@dataclass(frozen=True)
class _Head:
    """The part of the model's output that predicts one action column."""

    field: str  # the action's name in the batch
    size: int  # elements of one action
    classes: int  # values that an element can have; 0 for continuous actions

    @property
    def num_outputs(self) -> int:
        return self.size * max(1, self.classes)

    def lines(self, predicted: str, operator: str) -> list[str]:
        """Return the code that sets `error`, [B, T], to this head's error, or adds it."""
        target = f"flat(batch[{json.dumps(self.field)}])"
        if not self.classes:
            return [f"error {operator} ({predicted} - {target}).square().mean(-1)"]
        return [
            f"logits = {predicted}.unflatten(-1, ({self.size}, {self.classes})).movedim(-1, 1)",
            f'each = nn.functional.cross_entropy(logits, {target}.long(), reduction="none")',
            f"error {operator} each.mean(-1)",
        ]


OPTIONS: Options = {
    "DATA": ("folder of the data set, written by gear ingest", {"type": Path}),
    "--out DIR": ("folder of the two files (default: here)", {"type": Path, "default": Path()}),
    "--force": "overwrite them if they exist",
    "--hostfile F": "print a launch line for the hosts of this file (default: this machine)",
}


def run(args: argparse.Namespace) -> int:
    """Write the config and the script, and print the command that starts the training."""
    slots = {} if args.hostfile is None else read_hostfile(args.hostfile)
    dataset = Dataset.open(args.data)
    # DeepSpeed does not send the shell's variables to hosts, and these may have other devices.
    if args.hostfile is not None:
        launch = ["deepspeed", "--hostfile", args.hostfile]
        num_ranks = sum(slots.values())
    else:
        num_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
        settings = [] if num_gpus else ["DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1"]
        num_ranks = num_gpus or min(_MOST_CPU_RANKS, len(os.sched_getaffinity(0)))
        launch = [*settings, "deepspeed", "--num_gpus", str(num_ranks)]
    config = make_config(dataset, num_ranks)
    script = make_script(dataset, shlex.join([*launch, SCRIPT_FILE]))
    files = {
        args.out / CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        args.out / SCRIPT_FILE: script,
    }
    for path in files:
        if path.exists() and not args.force:
            raise DataError(
                str(path),
                "must not exist",
                None,
                "overwrite it with --force, or choose another --out",
            )
    with DataError.on(
        str(args.out), "must be a writable folder", OSError, remedy="choose another --out"
    ):
        args.out.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    split, held_out = held_out_split(dataset)
    if split != dataset.split:
        share = f"{split[_HELD_OUT]:.0%} of the trajectories are held out"
        print(
            f"note: {share}, for which each start computes statistics: gear ingest --split stores "
            "them"
        )
    elif held_out is None:
        print("note: no trajectory can be held out, and nothing is evaluated")
    if args.hostfile is not None:
        print(
            "note: DeepSpeed does not send this shell's variables to the hosts: those without a "
            "GPU need DS_ACCELERATOR=cpu and OMP_NUM_THREADS=1 in a file .deepspeed_env, here or "
            "in your home"
        )
    print(f"train with: {shlex.join([*launch, str(args.out / SCRIPT_FILE)])}")
    return 0


def held_out_split(dataset: Dataset) -> tuple[dict[str, float], str | None]:
    """Return the split of the config, and the part to evaluate on; None if all are empty."""
    ids = np.arange(dataset.num_trajectories_of_whole)
    candidates = [dataset.split]
    if not dataset.split and dataset.part is None:  # a part has no statistics of another split
        candidates = [{_HELD_OUT: share} for share in _SHARES]
    for split in candidates:
        filled = set(split_of(ids, split).tolist())
        names = [name for index, name in enumerate(sorted(split), 1) if index in filled]
        if names and TRAIN in filled:
            return split, _HELD_OUT if _HELD_OUT in names else names[0]
    return dataset.split, None


def make_config(dataset: Dataset, num_ranks: int = 1) -> dict[str, Any]:
    """Return a ds_config whose `gear` section fits a data set.

    The global batch is a multiple of `num_ranks`.
    """
    fields: dict[str, dict[str, Any]] = {}
    window = {"offset": 0, "length": _length(dataset)}

    def add(column: Column, options: dict[str, Any]) -> None:
        name = _field(column)
        renamed = {} if name == column.name else {"column": column.name}
        fields[name] = {**renamed, **window, **options}

    special: dict[str, dict[str, Any]] = {"bool": {}, "uint8": {"scale": 1 / 255}}
    for column in _columns(dataset, "observation"):  # an input of about unit size
        add(column, {**special.get(column.dtype, {"normalize": "mean_std"}), "as": "engine"})
    for column in _columns(dataset, "action"):
        dtype = "engine" if column.is_floating else "float32"
        add(column, {} if _num_classes(dataset, column) else {"as": dtype})
    for flag in map(dataset.schema.role, ("reward", "terminated", "truncated")):
        if flag is not None:
            add(flag, {})
    data: dict[str, Any] = {"path": str(dataset.path.resolve())}
    if split := held_out_split(dataset)[0]:
        data["split"] = split
    gear = {
        "seed": 0,
        "data": data,
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": fields,
    }
    if num_ranks > 1 or torch.cuda.is_available():
        gear["prefetch"] = _PREFETCH
    check_against(parse(gear), {"main": dataset.schema})
    return {
        "train_batch_size": -(-_BATCH // num_ranks) * num_ranks,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "weight_decay": 1e-4, "torch_adam": True},
        },
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "gear": gear,
    }


def make_script(dataset: Dataset, launch: str) -> str:
    """Return a behaviour cloning script for a data set.

    Args:
        launch: Command that starts it, for its docstring.
    """
    observations = _columns(dataset, "observation")
    heads = [
        _Head(_field(c), c.num_elements, _num_classes(dataset, c))
        for c in _columns(dataset, "action")
    ]
    names = [json.dumps(_field(c)) for c in observations]
    predict = heads[0].lines("engine(inputs)", "=")
    if len(heads) > 1:
        sizes = ", ".join(str(head.num_outputs) for head in heads)
        predict = [f"parts = engine(inputs).split([{sizes}], dim=-1)"]
        for i, head in enumerate(heads):
            predict += head.lines(f"parts[{i}]", "=" if i == 0 else "+=")
    held_out = held_out_split(dataset)[1]
    template = Template(
        resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    )
    return template.substitute(
        data=dataset.path.name,
        launch=launch,
        held_out="None" if held_out is None else json.dumps(held_out),
        config=CONFIG_FILE,
        length=_length(dataset),
        num_inputs=sum(c.num_elements for c in observations),
        num_outputs=sum(head.num_outputs for head in heads),
        observations=f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})",
        first_action=json.dumps(heads[0].field),
        predict="\n".join(f"    {line}" for line in predict),
    )


def _columns(dataset: Dataset, role: str) -> list[Column]:
    """Return the step columns of a role, without next observations, which a policy cannot see."""
    columns = [
        c for c in dataset.schema.step_columns if c.role == role and not c.name.startswith("next_")
    ]
    if not columns:
        known = ", ".join(f"{c.name} ({c.role})" for c in dataset.schema)
        raise DataError(
            str(dataset.path), f"must have a column of role {role}", None, f"it has {known}"
        )
    return columns


def _length(dataset: Dataset) -> int:
    return min(_WINDOW, int(dataset.lengths.max()))


def _field(column: Column) -> str:
    return f"{column.name}_field" if column.name in BATCH_NAMES else column.name


def _num_classes(dataset: Dataset, column: Column) -> int:
    """Return the number of values of a discrete action.

    It is 0 for continuous actions, and for integers below 0.
    """
    if column.is_floating:
        return 0
    values = dataset.columns[column.name]
    return 0 if int(np.min(values)) < 0 else max(2, int(np.max(values)) + 1)

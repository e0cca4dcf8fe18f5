"""`gear init DATA`: a config and a training script that fit a data set."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from deepspeed_gear.config import check_against, parse
from deepspeed_gear.config.cross_checks import BATCH_NAMES
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

CONFIG_FILE = "gear_config.json"
SCRIPT_FILE = "train.py"
_WINDOW = 8

_SCRIPT = Template('''\
"""Behaviour cloning on $data: `deepspeed --num_gpus 1 $script`."""

import argparse
from pathlib import Path

import torch
from torch import nn

import deepspeed_gear

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
args = parser.parse_args()

OBSERVATIONS = $observations


def flat(values: torch.Tensor) -> torch.Tensor:
    """Turn [B, T, ...] into [B, T, elements]."""
    return values.reshape(*values.shape[:2], -1)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear($num_inputs, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, $num_outputs)
)
engine, *_ = deepspeed_gear.initialize(
    model=model, model_parameters=model.parameters(), config=str(Path(__file__).with_name("$config"))
)

for step in range(args.steps):
    batch = engine.gear_sample()  # windows of $length steps
    inputs = torch.cat([flat(batch[name]) for name in OBSERVATIONS], dim=-1)  # [B, T, $num_inputs]
$predict
    mask = batch.mask[$first_action]  # [B, T], False where a window leaves its trajectory
    loss = (error * mask).sum() / mask.sum()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0 and (step % 50 == 0 or step == args.steps - 1):
        print(f"step {step} loss {loss.item():.4f}", flush=True)
''')


@dataclass(frozen=True)
class _Head:
    """The part of the model's output that predicts one action column.

    Args:
        field: The action's name in the batch.
        size: Elements of one action.
        classes: Values that an element can have; 0 for continuous actions.
    """

    field: str
    size: int
    classes: int

    @property
    def num_outputs(self) -> int:
        return self.size * max(1, self.classes)

    def lines(self, predicted: str, operator: str) -> list[str]:
        """Return the code that puts or adds each step's error to `error`, [B, T]."""
        target = f"flat(batch[{json.dumps(self.field)}])"
        if not self.classes:
            return [f"error {operator} ({predicted} - {target}).square().mean(-1)"]
        return [
            f"logits = {predicted}.unflatten(-1, ({self.size}, {self.classes})).movedim(-1, 1)",
            f'each = nn.functional.cross_entropy(logits, {target}.long(), reduction="none")',
            f"error {operator} each.mean(-1)",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gear init`."""
    parser.add_argument(
        "data", metavar="DATA", type=Path, help="folder of the data set, written by gear ingest"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path(), help="folder of the two files (default: here)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite them if they exist")


def run(args: argparse.Namespace) -> int:
    """Write the config and the script.

    Raises:
        DataError: The data set cannot be used, or a file exists and may not be overwritten.
    """
    dataset = Dataset.open(args.data)
    config, script = make_config(dataset), make_script(dataset)
    files = {args.out / CONFIG_FILE: json.dumps(config, indent=2) + "\n", args.out / SCRIPT_FILE: script}
    for path in files:
        if path.exists() and not args.force:
            raise DataError(
                str(path), "must not exist", None, "overwrite it with --force, or choose another --out"
            )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    except OSError as error:
        raise DataError(
            str(args.out), "must be a writable folder", error.strerror, "choose another --out"
        ) from error
    print(f"train with: deepspeed --num_gpus 1 {args.out / SCRIPT_FILE}")
    return 0


def make_config(dataset: Dataset) -> dict[str, Any]:
    """Return a ds_config whose `gear` section fits a data set.

    Raises:
        DataError: The data set has no observations or no actions.
    """
    fields: dict[str, dict[str, Any]] = {}
    window = {"offset": 0, "length": _length(dataset)}
    for column in _columns(dataset, "observation"):
        fields[_field(column)] = {**_renamed(column), **window, **_observation(column)}
    for column in _columns(dataset, "action"):
        continuous = (
            {} if _num_classes(dataset, column) else {"as": "engine" if column.is_floating else "float32"}
        )
        fields[_field(column)] = {**_renamed(column), **window, **continuous}
    for role in ("reward", "terminated", "truncated"):
        flag = dataset.schema.role(role)
        if flag is not None:
            fields[_field(flag)] = {**_renamed(flag), **window}
    data: dict[str, Any] = {"path": str(dataset.path.resolve())}
    if dataset.split:
        data["split"] = dataset.split
    gear = {"seed": 0, "data": data, "sampler": {"kind": "uniform", "unit": "step"}, "fields": fields}
    check_against(parse(gear), {"main": dataset.schema})
    return {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "gear": gear,
    }


def make_script(dataset: Dataset) -> str:
    """Return a behaviour cloning script for a data set.

    Raises:
        DataError: The data set has no observations or no actions.
    """
    observations = _columns(dataset, "observation")
    heads = [_Head(_field(c), c.num_elements, _num_classes(dataset, c)) for c in _columns(dataset, "action")]
    names = [json.dumps(_field(c)) for c in observations]
    return _SCRIPT.substitute(
        data=dataset.path.name,
        script=SCRIPT_FILE,
        config=CONFIG_FILE,
        length=_length(dataset),
        num_inputs=sum(c.num_elements for c in observations),
        num_outputs=sum(head.num_outputs for head in heads),
        observations=f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})",
        first_action=json.dumps(heads[0].field),
        predict="\n".join(f"    {line}" for line in _predict(heads)),
    )


def _predict(heads: list[_Head]) -> list[str]:
    if len(heads) == 1:
        return heads[0].lines("engine(inputs)", "=")
    lines = [f"parts = engine(inputs).split([{', '.join(str(head.num_outputs) for head in heads)}], dim=-1)"]
    for i, head in enumerate(heads):
        lines += head.lines(f"parts[{i}]", "=" if i == 0 else "+=")
    return lines


def _columns(dataset: Dataset, role: str) -> list[Column]:
    """Return the step columns of a role; the observations after a step are no inputs of a policy."""
    found = [c for c in dataset.schema.step_columns if c.role == role and not c.name.startswith("next_")]
    if not found:
        known = ", ".join(f"{c.name} ({c.role})" for c in dataset.schema)
        raise DataError(str(dataset.path), f"must have a column of role {role}", None, f"it has {known}")
    return found


def _length(dataset: Dataset) -> int:
    return min(_WINDOW, int(dataset.lengths.max()))


def _field(column: Column) -> str:
    return f"{column.name}_field" if column.name in BATCH_NAMES else column.name


def _renamed(column: Column) -> Mapping[str, str]:
    return {} if _field(column) == column.name else {"column": column.name}


def _observation(column: Column) -> dict[str, Any]:
    """Return the conversion that makes an observation an input of about unit size."""
    if column.dtype == "bool":
        return {"as": "engine"}
    if column.dtype == "uint8":
        return {"scale": 1 / 255, "as": "engine"}
    return {"normalize": "mean_std", "as": "engine"}


def _num_classes(dataset: Dataset, column: Column) -> int:
    """Return how many values a discrete action has, 0 for continuous ones and for integers below 0."""
    if column.is_floating:
        return 0
    values = dataset.columns[column.name]
    return 0 if int(np.min(values)) < 0 else max(2, int(np.max(values)) + 1)

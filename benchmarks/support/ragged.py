"""A small data set with every kind of column, for the benchmarks that compare batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear import Column, DatasetWriter, Schema

NUM_TRAJECTORIES = 61
MOST_STEPS = 40
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform trajectory": {"kind": "uniform", "unit": "trajectory"},
    "uniform step": {"kind": "uniform", "unit": "step"},
    "length": {"kind": "length"},
    "epoch trajectory": {"kind": "epoch", "unit": "trajectory", "anchors": {"every": 3}},
    "epoch step": {"kind": "epoch", "unit": "step"},
    "stratified step": {"kind": "uniform", "unit": "step", "stratified": True},
    "weighted trajectory": {"kind": "weighted", "weight": "weight"},
    "weighted step": {"kind": "weighted", "weight": "weight", "unit": "step"},
    "prioritized step": {
        "kind": "prioritized",
        "unit": "step",
        "normalize": "table",
        "anchors": {"every": 2},
    },
    "top-k trajectory": {"kind": "top_k"},
    "epoch step, tail dropped": {
        "kind": "epoch",
        "unit": "step",
        "tail": "drop",
        "anchors": {"every": 2},
    },
    "fifo trajectory": {"kind": "fifo", "anchors": {"every": 2}},
    "lifo trajectory": {"kind": "lifo"},
    "recent step": {"kind": "recent", "unit": "step", "newest": 300},
    "mixture": {"kind": "mixture", "shares": {"first": 0.3, "second": 0.7}, "of": {"unit": "step"}},
    "mixture of epochs": {
        "kind": "mixture",
        "shares": {"first": {"linear": [0.0, 1.0, 40]}, "second": {"linear": [1.0, 0.0, 40]}},
        "of": {"kind": "epoch", "unit": "step"},
    },
    "uniform step where": {
        "kind": "uniform",
        "unit": "step",
        "where": {"task": {"in": [1, 2]}, "gain": {"min": 0.0}},
    },
    "epoch step where": {
        "kind": "epoch",
        "unit": "step",
        "anchors": "fits",
        "where": {"task": {"in": [0, 2]}},
    },
}
_FIELDS: dict[str, dict[str, Any]] = {
    "observation": {"offset": -4, "length": 6, "normalize": "mean_std"},
    "next_observation": {"column": "observation", "offset": "n_step"},
    "action": {"offset": -7, "length": 8, "pad": "edge", "align": "right"},
    "pixels": {"offset": -1, "length": 2, "scale": 1 / 255, "as": "float16"},
    "return_to_go": {"offset": -4, "length": 6, "scale": 0.01},
    "timestep": {"offset": -4, "length": 6},
    "task": {},
}


def write(folder: Path) -> Path:
    """Write trajectories of 1 to 40 steps with a held-out split. Returns the data set's path."""
    random = np.random.default_rng(0)
    schema = Schema(
        [
            Column("observation", "float32", (5,), "observation", "T+1"),
            Column("action", "float32", (2,), "action"),
            Column("pixels", "uint8", (3, 3), "other"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column("truncated", "bool", (), "truncated"),
            Column("task", "int64", (), "other", "1"),
            Column("gain", "float32", (), "other", "1"),
            Column("weight", "float32", (), "other", "1"),
        ]
    )
    path = folder / "ragged"
    with DatasetWriter(path, schema, split={"eval": 0.1}) as writer:
        for number in range(NUM_TRAJECTORIES):
            steps = 1 + (number * 17) % MOST_STEPS
            ends = number % 3
            writer.add(
                {
                    "observation": random.normal(3, 2, (steps + 1, 5)).astype(np.float32),
                    "action": random.normal(size=(steps, 2)).astype(np.float32),
                    "pixels": random.integers(0, 256, (steps, 3, 3), np.uint8),
                    "reward": random.normal(size=steps).astype(np.float32),
                    "terminated": (np.arange(steps) == steps - 1) & (ends == 0),
                    "truncated": (np.arange(steps) == steps - 1) & (ends == 1),
                    "task": np.int64(number % 4),
                    "gain": np.float32(random.normal(1)),
                    "weight": np.float32(number % 5 / 100),
                }
            )
    return path


def section(path: Path, sampler: str, seed: int, prefetch: int) -> dict[str, Any]:
    """Return the gear section, without batch sizes."""
    fields = dict(_FIELDS)
    if (
        SAMPLERS[sampler].get("anchors") == "fits"
    ):  # what follows the n-step return would exclude nearly everything
        fields.pop("next_observation")
    data = {"data": {"path": str(path), "load": "memory" if seed == 1 else "mmap"}}
    tables = SAMPLERS[sampler].get("shares")
    return {
        "seed": seed,
        "backend": "cpu",
        **(data if tables is None else {"tables": dict.fromkeys(tables, data)}),
        "sampler": SAMPLERS[sampler],
        "fields": fields,
        "n_step": {"n": 3, "gamma": 0.99},
        "prefetch": prefetch,
    }

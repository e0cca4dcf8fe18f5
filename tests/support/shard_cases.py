"""Cases of tables on the devices of several replicas, as programs/device_shards.py takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gear_support import config_of

TABLE = {"capacity_steps": 400, "capacity_trajectories": 60, "max_length": 12, "remove": "fifo"}
FIELDS = {
    "observation": {"offset": -3, "length": 5, "pad": "edge"},
    "action": {"offset": -1, "length": 3, "align": "left"},
    "next_observation": {"column": "observation", "offset": "n_step"},
    "return_to_go": {"scale": 0.5},
    "timestep": {},
    "task": {},
}
UNIFORM = {"kind": "uniform", "unit": "step"}
PRIORITIZED = {"kind": "prioritized", "alpha": 0.6, "beta": {"linear": [0.4, 1.0, 4]}}
SAMPLERS = [
    UNIFORM,
    {"kind": "uniform", "unit": "step", "stratified": True},
    {"kind": "uniform", "unit": "trajectory"},
    {**PRIORITIZED, "unit": "step"},
    {**PRIORITIZED, "unit": "trajectory", "normalize": "table"},
    {**PRIORITIZED, "unit": "step", "normalize": None, "initial": 0.5},
    {"kind": "top_k", "unit": "step"},
]


def added(replicas: int, empty: int | None = None) -> list[list[tuple[int, int]]]:
    """Number and length of the trajectories of each replica."""
    return [
        [] if r == empty else [(r * 20 + i, 1 + (5 * i + 3 * r) % 12) for i in range(6 + 3 * r)]
        for r in range(replicas)
    ]


def shard_case(
    sampler: dict[str, Any], replicas: int, tensor: int, sizes: tuple[int, int], data: Path | None = None
) -> dict[str, Any]:
    section = config_of(sampler=sampler, fields=FIELDS, n_step={"n": 3, "gamma": 0.9})
    section["tables"] = {"main": {**(TABLE if data is None else {"data": str(data)}), "placement": "device"}}
    section["batch_size"], section["gradient_accumulation_steps"] = sizes
    mine = added(replicas, 1 if replicas > 2 else None) if data is None else None
    return {"section": section, "tensor": tensor, "added": mine}

"""Tables in the memory of the replicas' devices, from which all draw together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gear_support import Ranks, config_of, lengths_of, run_ranks, write_dataset

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
]


def added(replicas: int, empty: int | None = None) -> list[list[tuple[int, int]]]:
    """Number and length of the trajectories of each replica."""
    return [
        [] if r == empty else [(r * 20 + i, 1 + (5 * i + 3 * r) % 12) for i in range(6 + 3 * r)]
        for r in range(replicas)
    ]


def case(
    sampler: dict[str, Any], replicas: int, tensor: int, sizes: tuple[int, int], data: Path | None = None
) -> dict[str, Any]:
    section = config_of(sampler=sampler, fields=FIELDS, n_step={"n": 3, "gamma": 0.9})
    section["tables"] = {"main": {**(TABLE if data is None else {"data": str(data)}), "placement": "device"}}
    section["batch_size"], section["gradient_accumulation_steps"] = sizes
    mine = added(replicas, 1 if replicas > 2 else None) if data is None else None
    return {"section": section, "tensor": tensor, "added": mine}


@pytest.mark.parametrize(("ranks", "tensor", "sizes"), [(2, 1, (24, 1)), (3, 1, (36, 2)), (4, 2, (24, 2))])
def test_replicas_draw_what_one_process_draws(
    tmp_path: Path, ranks: int, tensor: int, sizes: tuple[int, int]
) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(30, most=12))
    samplers = SAMPLERS if tensor == 1 else SAMPLERS[2:4]
    cases = [case(sampler, ranks // tensor, tensor, sizes) for sampler in samplers]
    with_priorities = [sampler for sampler in samplers if sampler["kind"] == "prioritized"]
    cases += [case(sampler, ranks // tensor, tensor, sizes, data) for sampler in with_priorities]
    for output in run_ranks("device_shards.py", ranks, json.dumps(cases), str(tmp_path / "saved")):
        assert output.endswith("done\n")


def test_what_goes_wrong_has_a_name_on_every_rank() -> None:
    section = case(PRIORITIZED | {"unit": "step"}, 2, 1, (8, 1))["section"]
    section = {**section, "fields": {"code": {}}, "timeout_s": 4.0, "n_step": None}
    (status, output), _ = Ranks("device_faults.py", 2, json.dumps(section)).wait()
    assert status == 0, output
    assert output.endswith("done\n")

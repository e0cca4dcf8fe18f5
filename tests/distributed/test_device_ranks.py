"""Tables in the memory of each rank's device, with several replicas: of a CPU, or two of one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gear_support import config_of, lengths_of, write_dataset
from process_support import run_ranks

TABLE = {"capacity_steps": 100, "max_length": 4, "remove": "fifo", "placement": "device"}
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(900)])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_replicas_draw_from_their_own_tables(device: str, tmp_path: Path) -> None:
    """And an engine trains from them, and goes on from a checkpoint."""
    data = write_dataset(tmp_path / "set", lengths_of(30))
    fields = {"observation": {"offset": -3, "length": 4}, "task": {}}
    options = {"fields": fields, "batch_size": 24, "gradient_accumulation_steps": 2}
    prioritized = {"kind": "prioritized", "unit": "step"}
    added = {**config_of(**options, sampler=prioritized), "tables": {"main": TABLE}}
    shared = config_of(data, sampler={"kind": "uniform", "unit": "step"}, **options)
    task = {"shared": shared, "added": added, "out": str(tmp_path)}
    if device == "cpu":
        own = {"observation": {"offset": -1, "length": 4}, "action": {}, "reward": {}, "code": {}}
        task["engine"] = {**config_of(fields=own, sampler=prioritized), "tables": {"main": TABLE}}
    place = {} if device == "cpu" else {"GEAR_TEST_DEVICE": device, "LOCAL_RANK": "0"}
    run_ranks("device_ranks.py", 2, json.dumps(task), timeout_s=400, **place)

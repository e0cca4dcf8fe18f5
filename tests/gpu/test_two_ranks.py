"""Two ranks on one GPU, over gloo: each has its table in the memory of the card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gear_support import config_of, lengths_of, write_dataset
from process_support import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ENVIRONMENT = {"GEAR_TEST_DEVICE": "cuda", "LOCAL_RANK": "0"}
TABLE = {"capacity_steps": 100, "max_length": 4, "remove": "fifo", "placement": "device"}


def test_replicas_draw_from_their_own_tables(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(30))
    fields = {"observation": {"offset": -3, "length": 4}, "task": {}}
    options = {"fields": fields, "batch_size": 24, "gradient_accumulation_steps": 2}
    shared = config_of(data, sampler={"kind": "uniform", "unit": "step"}, **options)
    added = {**config_of(**options), "tables": {"main": TABLE}}
    added["sampler"] = {"kind": "prioritized", "unit": "step"}
    arguments = json.dumps(shared), json.dumps(added), str(tmp_path / "saved")
    for output in run_ranks("device_ranks.py", 2, *arguments, timeout_s=400, **ENVIRONMENT):
        assert output.endswith("done\n")

"""Tables in the memory of each rank's device, with several replicas."""

from __future__ import annotations

import json
from pathlib import Path

from gear_support import config_of, lengths_of, write_dataset
from process_support import run_ranks

TABLE = {"capacity_steps": 100, "max_length": 4, "remove": "fifo", "placement": "device"}


def test_replicas_draw_from_their_own_tables(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(30))
    fields = {"observation": {"offset": -3, "length": 4}, "task": {}}
    sampler = {"kind": "uniform", "unit": "step"}
    options = {"fields": fields, "batch_size": 24, "gradient_accumulation_steps": 2}
    shared = config_of(data, sampler=sampler, **options)
    added = {**config_of(**options), "tables": {"main": TABLE}}
    added["sampler"] = {"kind": "prioritized", "unit": "step"}
    arguments = json.dumps(shared), json.dumps(added), str(tmp_path / "saved")
    for output in run_ranks("device_ranks.py", 2, *arguments):
        assert output.endswith("done\n")


def test_an_engine_trains_from_its_devices_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    fields = {"observation": {"offset": -1, "length": 4}, "action": {}, "reward": {}, "code": {}}
    sampler = {"kind": "prioritized", "unit": "step"}
    section = {**config_of(fields=fields, sampler=sampler), "tables": {"main": TABLE}}
    given = json.dumps({"section": section, "out": str(tmp_path / "checkpoints")})
    for output in run_ranks("engine_device.py", 2, given):
        assert output.endswith("done\n")

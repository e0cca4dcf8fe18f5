"""Priorities that devices compute late, on two ranks of a node."""

from __future__ import annotations

import json
from pathlib import Path

from gear_support import config_of, lengths_of, write_dataset
from process_support import run_ranks


def test_late_reports_give_the_batches_of_early_ones_and_errors_on_all(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(20))
    sampler = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}
    options = {"sampler": sampler, "fields": {"code": {}}, "batch_size": 16}
    sections = [
        config_of(data, **options, prefetch=prefetch, gradient_accumulation_steps=accumulation)
        for prefetch in (0, 2)
        for accumulation in (1, 2)
    ]
    for output in run_ranks("late_ranks.py", 2, json.dumps(sections)):
        assert output.endswith("done\n")

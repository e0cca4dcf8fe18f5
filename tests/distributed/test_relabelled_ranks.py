"""Goals by hindsight are the same for one, two and three ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gear_support import config_of
from process_support import run_ranks

FIELDS = {"goal": {"column": "code", "hindsight": "code"}, "observation": {}}


def test_goals_on_any_number_of_ranks(dataset: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 3):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        options = {"batch_size": 12, "prefetch": ranks - 1, "seed": 5}
        section = config_of(dataset, hindsight={}, fields=FIELDS, sampler={"unit": "step"}, **options)
        run_ranks("relabelled_ranks.py", ranks, str(folder), json.dumps(section))
        parts = [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(whole["sample_number"])
        found.append({name: values[order] for name, values in whole.items()})
    relabelled = found[0]["goal_step"] >= 0
    assert 0 < relabelled.sum() < len(relabelled) == 60
    assert (found[0]["goal"][relabelled] % 1000 == found[0]["goal_step"][relabelled]).all()
    for other in found[1:]:
        for name, values in found[0].items():
            assert (other[name] == values).all(), name

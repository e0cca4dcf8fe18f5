"""Every sampler over nodes: the global batches, bytes included, are those of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cluster_support import Cluster
from gear_support import lengths_of, write_dataset
from replay_cases import cases, run_case, together

STEPS = 8
EVERY = 1 if os.environ.get("GEAR_LONG_TESTS") == "1" else 3  # of the cases, on three nodes


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data")
    data = write_dataset(folder / "set", lengths_of(40), split={"eval": 0.3})
    return cases(data, write_dataset(folder / "other", lengths_of(25)))


@pytest.fixture(scope="module")
def alone(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: run_case(section, STEPS, 1) for name, section in sections.items()}


@pytest.mark.parametrize(("nodes", "ranks", "every"), [(2, 2, 1), (3, 1, EVERY)])
def test_every_sampler_gives_the_batches_of_one_process(
    nodes: int,
    ranks: int,
    every: int,
    cluster: Cluster,
    sections: dict[str, dict[str, Any]],
    alone: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    wanted = tmp_path / "task.json"
    tried = dict(list(sections.items())[::every])
    wanted.write_text(json.dumps({"cases": tried, "steps": STEPS, "out": str(tmp_path)}))
    cluster.run_ranks("replay_nodes.py", str(wanted), nodes=nodes, ranks=ranks, timeout_s=200.0)
    for name in tried:
        whole = alone[name]
        of_ranks = [
            json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(nodes * ranks)
        ]
        found = together(of_ranks)
        for step, (seen, expected) in enumerate(zip(found["train"], whole["train"], strict=True)):
            assert seen == expected, (name, step)
        known = {key: found["eval"].get(key) for key in whole["eval"] if key != "batches"}
        wrong = [key for key, digest in known.items() if digest != whole["eval"][key]]
        assert not wrong, (name, wrong)
        if whole["digest"] is not None:
            assert tuple(found["digest"]) == tuple(whole["digest"]), name

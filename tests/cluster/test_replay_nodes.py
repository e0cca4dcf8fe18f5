"""Every sampler over nodes: the global batches, bytes included, are those of one process."""

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
def sections(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return cases(dataset, write_dataset(tmp_path_factory.mktemp("data") / "other", lengths_of(25)))


def run_cases(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: run_case(section, STEPS, 1) for name, section in sections.items()}


@pytest.fixture(scope="module")
def alone(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return run_cases(sections)


@pytest.mark.parametrize(("nodes", "ranks", "every"), [(2, 2, 1), (3, 1, EVERY)])
def test_every_sampler_gives_the_batches_of_one_process(
    nodes: int,
    ranks: int,
    every: int,
    cluster: Cluster,
    sections: dict[str, dict[str, Any]],
    alone: dict[str, dict[str, Any]],
) -> None:
    tried = dict(list(sections.items())[::every])
    seen_by = cluster.call_ranks(run_cases, tried, nodes=nodes, ranks=ranks, timeout_s=200.0)
    for name in tried:
        whole = alone[name]
        found = together([rank[name] for rank in seen_by])
        for step, (seen, expected) in enumerate(zip(found["train"], whole["train"], strict=True)):
            assert seen == expected, (name, step)
        known = {key: found["eval"].get(key) for key in whole["eval"] if key != "batches"}
        wrong = [key for key, digest in known.items() if digest != whole["eval"][key]]
        assert not wrong, (name, wrong)
        if whole["digest"] is not None:
            assert tuple(found["digest"]) == tuple(whole["digest"]), name

"""Rates, queues and limits of draws hold for all nodes together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_support import Cluster
from rate_cases import BATCH, fill, rest, section_of, sections

from deepspeed_gear.store.life import Rate

Cases = dict[str, tuple[dict[str, Any], str, dict[str, Any]]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("rates")
    return {name: (one, str(folder / name), fill(one, folder / name)) for name, one in sections().items()}


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 1)])
def test_the_batches_are_those_of_one_node(
    nodes: int, ranks: int, cluster: Cluster, cases: Cases, tmp_path: Path
) -> None:
    """One node fills a table; others go on with it until nothing more may be drawn."""
    (tmp_path / "task.json").write_text(json.dumps({"cases": cases, "out": str(tmp_path)}))
    cluster.run("rates_nodes.py", str(tmp_path / "task.json"), nodes=nodes, ranks=ranks)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(nodes * ranks)]
    for name, (section, folder, state) in cases.items():
        wanted = rest(section, Path(folder), state)
        found = [
            {key: digest for part in parts for key, digest in part.items()}
            for parts in zip(*(seen[name] for seen in of_ranks), strict=True)
        ]
        assert found == wanted, name


# ---- writers of all nodes ------------------------------------------------------------------------


STEPS = {"min_size": 60, "samples_per_insert": 1.0, "error_buffer": 29.0}  # as little as may be
TRAJECTORIES = {"min_size": 5, "samples_per_insert": 2.0, "error_buffer": 7.0}
PHASES: dict[str, dict[str, Any]] = {
    "both": {"actors": [2, 2], "unit": "step", "rate": STEPS, "batches": 150, "lose": None},
    "one": {"actors": [0, 2], "unit": "trajectory", "rate": TRAJECTORIES, "batches": 80, "lose": None},
    "lost": {"actors": [2, 2], "unit": "step", "rate": STEPS, "batches": 80, "lose": 20},
    "queue": {"actors": [1, 1], "unit": "trajectory", "rate": {"queue": 14}, "batches": 80, "lose": None},
}


@pytest.fixture(scope="module")
def written(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes with a rank each, and their actors."""
    out, phases = tmp_path_factory.mktemp("writers"), {}
    for name, phase in PHASES.items():
        queue = name == "queue"
        section = section_of("fifo" if queue else "uniform", phase["unit"], remove="fifo", writers=2)
        section["tables"]["main"]["rate"] = {**phase["rate"], "timeout_s": 30.0}
        section["shared_memory"] = {"prefix": f"rates{name}"}
        phases[name] = {**phase, "section": section}
    (out / "task.json").write_text(json.dumps({"phases": phases, "out": str(out)}))
    cluster.run("writers_nodes.py", str(out / "task.json"), nodes=2)
    return out


def rate_of(name: str) -> Rate:
    options: Any = PHASES[name]["rate"]
    if name == "queue":
        return Rate.queue("trajectory", options["queue"])
    return Rate.ratio(PHASES[name]["unit"], *(options[key] for key in STEPS))


def additions(out: Path, name: str) -> np.ndarray:
    """When each addition began and ended, and its items. [n, 3]."""
    found = np.concatenate([np.fromfile(path).reshape(-1, 3) for path in sorted(out.glob(f"{name}.actor*"))])
    if PHASES[name]["unit"] == "trajectory":
        found[:, 2] = 1
    return found


def samples(out: Path, name: str) -> list[list[Any]]:
    """When each rank asked for a batch and had it, and the ids in its part. [ranks][batches]."""
    return [json.loads((out / f"rank{rank}.json").read_text())[name] for rank in range(2)]


@pytest.mark.parametrize("name", PHASES)
def test_the_rate_is_never_passed(name: str, written: Path) -> None:
    """At the end of each addition: what was added by then, and the samples that were asked for by then."""
    rate = rate_of(name)
    added = additions(written, name)
    asked = np.array([[sample[0] for sample in rank] for rank in samples(written, name)])
    added = added[np.argsort(added[:, 1])]
    inserted = np.cumsum(added[:, 2])
    sampled = BATCH * np.searchsorted(asked.min(0), added[:, 1])
    ahead = inserted * rate.samples_per_insert - sampled
    assert ahead[inserted > rate.min_size].max() <= rate.most
    assert ahead.max() > rate.most - 30 * rate.samples_per_insert, "or this test says nothing"


@pytest.mark.parametrize("name", ["both", "one", "queue"])
def test_nothing_is_sampled_too_early(name: str, written: Path) -> None:
    rate = rate_of(name)
    added = additions(written, name)
    had = np.array([[sample[1] for sample in rank] for rank in samples(written, name)])
    begun = added[np.argsort(added[:, 0])]
    inserted = np.append(0, np.cumsum(begun[:, 2]))[np.searchsorted(begun[:, 0], had.min(0))]
    sampled = BATCH * np.arange(1, len(inserted) + 1)
    assert (inserted * rate.samples_per_insert - sampled).min() >= rate.least
    assert inserted[0] >= rate.min_size


def test_a_queue_gives_each_once(written: Path) -> None:
    ids = [number for rank in samples(written, "queue") for _, _, part in rank for number in part]
    assert len(ids) == len(set(ids)) == PHASES["queue"]["batches"] * BATCH


def test_who_is_left_goes_on(written: Path) -> None:
    """Behind the death of the actors of one node those of the other bring what all ranks need."""
    died = samples(written, "lost")[1][PHASES["lost"]["lose"]][1]
    actors = [np.fromfile(written / f"lost.actor{index}").reshape(-1, 3) for index in (0, 1, 10, 11)]
    late = [int((of_actor[:, 1] > died).sum()) for of_actor in actors]
    assert late[0] + late[1] > 15

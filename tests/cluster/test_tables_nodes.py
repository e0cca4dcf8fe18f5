"""One distribution over shards of unequal mass, and tables that ranks of several nodes fill."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from cluster_support import Cluster
from gear_support import SCHEMA, lengths_of, trajectory
from scipy import stats

from deepspeed_gear import Column, DatasetWriter, Schema

NODES, BATCHES, BATCH, ADDED = 3, 400, 60, 12


@pytest.fixture(scope="module")
def found(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tables")
    data, lengths = folder / "set", lengths_of(60)
    metadata = Column("metadata", "json", rows="1", max_bytes=32)
    with DatasetWriter(data, Schema([*SCHEMA, metadata])) as writer:
        for number, steps in enumerate(lengths):
            writer.add({**trajectory(number, steps), "metadata": {"number": number}})
    task = {"data": str(data), "batches": BATCHES, "out": str(folder / "out.json")}
    (folder / "task.json").write_text(json.dumps(task))
    cluster.run_ranks("tables_nodes.py", str(folder / "task.json"), nodes=NODES, timeout_s=120.0)
    return dict(json.loads((folder / "out.json").read_text()))


def test_shards_of_unequal_mass_give_one_distribution(found: dict[str, Any]) -> None:
    """The shards' masses are about as 1 to 100 to 10,000."""
    drawn, ids = np.array(found["drawn"]), np.arange(60)
    priorities = 10.0 ** (ids * 4 // 60 - 2) * (1 + ids % 3)
    expected = priorities / priorities.sum() * drawn.sum()
    assert drawn.sum() == BATCHES * BATCH
    rare = expected < 5
    observed = np.append(drawn[~rare], drawn[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed, wanted).pvalue > 1e-4
    assert drawn[40:].sum() > 0.9 * drawn.sum()


def test_the_oldest_and_newest_items_of_all_nodes(found: dict[str, Any]) -> None:
    """Ids of the nodes take turns, so they tell the age over all of them."""
    for kind, order in (("fifo", 1), ("lifo", -1)):
        first = [row for row in found[kind] if row[0] < BATCH]
        ids = sorted(range(ADDED * NODES), reverse=order < 0)
        steps = {key: 5 + key // NODES for key in ids}
        items = [(key, step) for key in ids for step in range(steps[key])[::order]][:BATCH]
        assert [(key, step) for _, key, step in first] == items


def test_what_was_removed_is_drawn_no_more(found: dict[str, Any]) -> None:
    kinds = [row for row in found["uniform"] if row[0] >= BATCH]
    assert {key for _, key, _ in found["uniform"]} - {key for _, key, _ in kinds}
    assert not {key for _, key, _ in kinds if key % 7 == 0}
    assert len({key for _, key, _ in kinds}) > ADDED * NODES // 2

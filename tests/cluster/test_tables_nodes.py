"""One distribution over shards of unequal mass, and tables that ranks of several nodes fill.

Both have an opaque column, whose values are in the batches of every node.
"""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from cluster_support import Cluster
from gear_support import SCHEMA, lengths_of, trajectory
from scipy import stats

from deepspeed_gear import Column, DatasetWriter, Replay, Schema

NODES = 3
BATCHES = 400
BATCH = 60
ADDED = 12


@pytest.fixture(scope="module")
def found(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tables")
    data = folder / "set"
    lengths = lengths_of(60)
    metadata = Column("metadata", "json", rows="1", max_bytes=32)
    with DatasetWriter(data, Schema([*SCHEMA, metadata])) as writer:
        for number, steps in enumerate(lengths):
            writer.add({**trajectory(number, steps), "metadata": {"number": number}})
    return dict(cluster.call_ranks(draw, str(data), nodes=NODES, timeout_s=120.0)[0])


def test_shards_of_unequal_mass_give_one_distribution(found: dict[str, Any]) -> None:
    """The shards' masses are about as 1 to 100 to 10,000."""
    drawn = found["drawn"]
    ids = np.arange(60)
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


# ---- on each rank --------------------------------------------------------------------------------


def draw(data: str) -> dict[str, Any]:
    """Return what all ranks have drawn."""
    return {"drawn": unequal(data), **filled()}


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def unequal(data: str) -> np.ndarray:
    """Return how often each trajectory was drawn."""
    sampler = {"kind": "prioritized", "unit": "trajectory", "alpha": 1.0, "beta": 0.4}
    section = {"data": data, "sampler": sampler, "batch_size": BATCH, "seed": 11}
    with Replay({**section, "fields": {"task": {}, "metadata": {}}}) as replay:
        count = len(replay.datasets["main"])
        ids = np.arange(count)
        replay.sample()
        replay.set_priorities(
            ids.tolist(), (10.0 ** (ids * 4 // count - 2) * (1 + ids % 3)).tolist()
        )
        drawn = np.zeros(count, np.int64)
        for _ in range(BATCHES):
            batch = replay.sample()
            np.add.at(drawn, batch.trajectory_id.numpy(), 1)
            assert batch.opaque("metadata") == [
                {"number": key} for key in batch.trajectory_id.tolist()
            ]
    return np.sum(gathered(drawn), axis=0)


def filled() -> dict[str, Any]:
    """Let every rank add trajectories; return what is drawn and in which order."""
    rank = dist.get_rank()
    found = {}
    table = {"capacity_steps": 3000, "capacity_trajectories": 90, "max_length": 30}
    fields = {
        "code": {"length": 3},
        "task": {},
        "observation": {"offset": -1, "length": 2},
        "name": {},
    }
    schema = Schema([*SCHEMA, Column("name", "bytes", rows="1", max_bytes=20)])
    for kind in ("uniform", "fifo", "lifo"):
        sampler = {"kind": kind, "unit": "trajectory" if kind == "uniform" else "step"}
        section = {
            "tables": {"main": table},
            "sampler": sampler,
            "fields": fields,
            "batch_size": BATCH,
        }
        with Replay(section, schemas={"main": schema}) as replay:
            mine = {}
            for index in range(ADDED):
                name = 100 * rank + index
                values = {**trajectory(name, 5 + index), "name": b"\xff%d" % name}
                mine[replay.add(values)] = name
            names = {key: name for part in gathered(mine) for key, name in part.items()}
            assert len(names) == ADDED * dist.get_world_size()
            dist.barrier()
            seen: list[list[int]] = []
            for _ in range(6):
                batch = replay.sample()
                for key, code, mask in zip(
                    batch.trajectory_id.tolist(),
                    batch["code"].tolist(),
                    batch.mask["code"].tolist(),
                    strict=True,
                ):
                    assert code[0] // 1000 == names[key], (code, key)
                    assert mask[0]
                ids = batch.trajectory_id.tolist()
                assert batch.opaque("name") == [b"\xff%d" % names[key] for key in ids]
                seen += np.stack(
                    [batch.sample_number, batch.trajectory_id, batch.anchor], axis=1
                ).tolist()
                removed = [key for key in mine if key % 7 == 0]
                replay.remove(removed)
                mine = {key: name for key, name in mine.items() if key not in removed}
                dist.barrier()
        found[kind] = sorted(row for part in gathered(seen) for row in part)
    return found

"""Replay and Exchange under torch.distributed alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gear_support import config_of, shared_files
from process_support import run_ranks

from deepspeed_gear import Batch, Replay

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=["auto", "copies"])
def ran(
    request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Arrays]:
    """Run four ranks, also by a way to a device; return where they wrote, and what one process sees."""
    folder = tmp_path_factory.mktemp("plain")
    section = config_of(dataset, batch_size=12, prefetch=1, sampler={"unit": "step"}, seed=9)
    of_ranks = {**section, "transfer": {"way": request.param}}
    run_ranks("plain_group.py", 4, str(folder), json.dumps(of_ranks))
    assert shared_files(section["shared_memory"]["prefix"]) == []
    return folder, alone(section, 6)


def alone(section: dict[str, object], count: int) -> Arrays:
    rows: list[Arrays] = []

    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        batch["key"] = keys
        return batch

    with Replay(section) as replay:
        replay.transform = transform
        for _ in range(count):
            batch = replay.sample()
            named = {
                "sample_number": batch.sample_number,
                "trajectory_id": batch.trajectory_id,
                "anchor": batch.anchor,
            }
            fields = {**named, "code": batch["code"], "key": batch["key"]}
            rows.append({name: tensor.numpy().copy() for name, tensor in fields.items()})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(("name", "ranks"), [("all", [0, 1, 2, 3]), ("pair", [0, 1]), ("pair", [2, 3])])
def test_ranks_share_what_one_process_sees(ran: tuple[Path, Arrays], name: str, ranks: list[int]) -> None:
    """Ids, anchors, rows and the keys of a transform, for every number of ranks."""
    folder, wanted = ran
    parts = [dict(np.load(folder / f"{name}.{rank}.npz")) for rank in ranks]
    found = {key: np.concatenate([part[key] for part in parts], axis=1) for key in wanted}
    order = np.argsort(found["sample_number"], axis=1)
    for key, array in wanted.items():
        assert (np.take_along_axis(found[key], order, axis=1) == array).all(), key

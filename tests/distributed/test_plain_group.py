"""Replay and Exchange under torch.distributed alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_records import Arrays, alone, assert_same, in_order
from gear_support import config_of, shared_files
from process_support import run_ranks

from deepspeed_gear import Batch


@pytest.fixture(scope="module")
def ran(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """Run four ranks, by copies to a device; return where they wrote, and what one process sees."""
    folder = tmp_path_factory.mktemp("plain")
    section = config_of(dataset, batch_size=12, prefetch=1, sampler={"unit": "step"}, seed=9)
    run_ranks("plain_group.py", 4, str(folder), json.dumps({**section, "transfer": {"way": "copies"}}))
    assert shared_files(section["shared_memory"]["prefix"]) == []
    return folder, alone(section, 6, transform=with_keys)


def with_keys(batch: Batch, keys: torch.Tensor) -> Batch:
    batch["key"] = keys
    return batch


@pytest.mark.parametrize(("name", "ranks"), [("all", [0, 1, 2, 3]), ("pair", [0, 1]), ("pair", [2, 3])])
def test_ranks_share_what_one_process_sees(ran: tuple[Path, Arrays], name: str, ranks: list[int]) -> None:
    """Ids, anchors, rows and the keys of a transform, for every number of ranks."""
    folder, wanted = ran
    found = in_order([dict(np.load(folder / f"{name}.{rank}.npz")) for rank in ranks])
    assert_same(found, wanted, name)

"""Tables with a prompt ledger, and their rollout workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from group_support import section

from deepspeed_gear import Column, DatasetWriter, Lease, Replay, Schema

SIZE = 2  # members of a group
PROMPTS = Schema([Column("tokens", "int32", (), "token"), Column("index", "int64", (), "other", "1")])


def write_prompts(path: Path, count: int) -> Path:
    """Write a data set of prompts; prompt i has i % 3 + 1 tokens, which are i."""
    with DatasetWriter(path, PROMPTS) as writer:
        for index in range(count):
            writer.add({"tokens": np.full(index % 3 + 1, index, np.int32), "index": np.int64(index)})
    return path


def ledger_section(
    data: Path, prompts: Mapping[str, Any] | None = None, groups: int = 3, **options: Any
) -> dict[str, Any]:
    """Return a gear section with prompts; `options` as of `group_support.section`."""
    group = {"column": "prompt", "size": SIZE, **options.pop("group", {})}
    made = section(group, **{"max_times_sampled": 1, "writers": 4, "batch": {"groups": groups}, **options})
    made["tables"]["main"]["prompts"] = {"data": str(data), **(prompts or {})}
    return made


def responses(lease: Lease, weight: float = 1.0) -> list[dict[str, Any]]:
    """Return the group of a lease: tokens are the prompt's index, as many as the lease's version plus 1."""
    tokens = np.full(lease.version % 20 + 1, lease.prompt["index"], np.int32)
    return [{"tokens": tokens, "sample": np.int32(m), "weight": np.float32(weight)} for m in range(SIZE)]


def check_books(replay: Replay) -> dict[str, Any]:
    """Check that the books close, and that each number in the table has one entry; return the books."""
    table = replay.tables["main"]
    with table.lock:
        assert table.ledger is not None
        assert table.groups is not None
        table.groups.update()
        books, groups = table.ledger.books(), table.groups.statistics
    parts = [books[name] for name in ("trained", "training", "waiting", "incomplete", "leased", "returned")]
    assert books["issued"] == sum(parts) + sum(books["dropped"].values()), books
    assert min(parts) >= 0, books
    assert (books["waiting"], books["incomplete"]) == (groups["complete"], groups["incomplete"]), books
    return books

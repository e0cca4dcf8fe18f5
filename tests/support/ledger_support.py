"""Tables with a prompt ledger, and their rollout workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gear_support import prefix
from group_support import section
from rollout_support import micros

from deepspeed_gear import Column, DatasetWriter, Lease, Replay, Schema

SIZE = 2  # members of a group
PROMPTS = Schema(
    [Column("tokens", "int32", (), "token"), Column("index", "int64", (), "other", "1")]
)


def write_prompts(path: Path, count: int) -> Path:
    """Write a data set of prompts; prompt i has i % 3 + 1 tokens, which are i."""
    with DatasetWriter(path, PROMPTS) as writer:
        for index in range(count):
            writer.add(
                {"tokens": np.full(index % 3 + 1, index, np.int32), "index": np.int64(index)}
            )
    return path


def ledger_section(
    data: Path, prompts: Mapping[str, Any] | None = None, groups: int = 3, **options: Any
) -> dict[str, Any]:
    """Return a gear section with prompts; `options` as of `group_support.section`."""
    group = {"column": "prompt", "size": SIZE, **options.pop("group", {})}
    made = section(
        group, **{"max_times_sampled": 1, "writers": 4, "batch": {"groups": groups}, **options}
    )
    made["tables"]["main"]["prompts"] = {"data": str(data), **(prompts or {})}
    return made


def recipe_section(data: Path, **options: Any) -> dict[str, Any]:
    """Return a gear section with the recipe, whose groups of two have no condition and a late
    reward.
    """
    table = {
        "max_length": 64,
        "group": {"size": SIZE, "where": None},
        "prompts": {"data": str(data), "max_lag": 1},
        "schema": {"columns": {"reward": {"late": True}}},
    }
    memory = {"shared_memory": {"prefix": prefix()}}
    return {
        "recipe": "grpo",
        "tables": {"main": table},
        "rollout": {"groups": 1},
        **memory,
        **options,
    }


def recipe_responses(lease: Lease, reward: bool = True) -> list[dict[str, Any]]:
    """Return the group of a lease of `recipe_section`."""
    one: dict[str, Any] = {"tokens": np.arange(4, dtype=np.int32), "loss_mask": np.arange(4) > 1}
    one |= {"logp": np.zeros(4, np.float32)}
    return [{**one, "reward": np.float32(member)} if reward else one for member in range(SIZE)]


def responses(lease: Lease, weight: float = 1.0) -> list[dict[str, Any]]:
    """Return the group of a lease: tokens are the prompt's index, as many as the lease's version
    plus 1.
    """
    tokens = np.full(lease.version % 20 + 1, lease.prompt["index"], np.int32)
    return [
        {"tokens": tokens, "sample": np.int32(m), "weight": np.float32(weight)} for m in range(SIZE)
    ]


def train_prompts(replay: Replay) -> list[int]:
    """Train a rollout batch; return the numbers of its prompts."""
    rollout = replay.rollout()
    numbers: list[int] = rollout.values("prompt")[::SIZE].tolist()
    micros(rollout)
    return numbers


OPEN = ("waiting", "incomplete", "leased", "returned")


def check_books(replay: Replay) -> dict[str, Any]:
    """Check that the books close, and that each number in the table has one entry; return the
    books.
    """
    table = replay.tables["main"]
    with table.lock:
        assert table.ledger is not None
        assert table.groups is not None
        table.groups.update()
        books = table.ledger.account.report()
        groups = table.groups.statistics
    parts = [
        books[name]
        for name in ("trained", "training", "waiting", "incomplete", "leased", "returned")
    ]
    assert books["issued"] == sum(parts) + sum(books["dropped"].values()), books
    assert min(parts) >= 0, books
    assert (books["waiting"], books["incomplete"]) == (groups["complete"], groups["incomplete"]), (
        books
    )
    check_epochs([books])
    return books


def check_epochs(stores: list[dict[str, Any]]) -> None:
    """Check that the books of each epoch close, over all stores, and add up to those of
    the table.
    """
    sums = {name: sum(of_epochs(stores, name).values()) for name in ("issued", "drawn", *OPEN)}
    whole = {
        name: sum(books[name] for books in stores)
        for name in ("issued", "trained", "training", *OPEN)
    }
    assert sums["drawn"] == whole["trained"] + whole["training"], stores
    assert min(own["drawn"] for books in stores for own in books["epochs"].values()) >= 0, stores
    assert all(sums[name] == whole[name] for name in ("issued", *OPEN)), stores
    dropped = of_epochs(stores, "dropped")
    assert sum(dropped.values(), Counter()) == sum(
        (Counter(books["dropped"]) for books in stores), Counter()
    )
    counts = {name: of_epochs(stores, name) for name in ("issued", "drawn", *OPEN)}
    is_same = len({tuple(books["epochs"]) for books in stores}) == 1  # else "earlier" means others
    first = max(
        min(int(epoch) for epoch in books["epochs"] if epoch != "earlier") for books in stores
    )
    for epoch, issued in counts["issued"].items():
        if not is_same and (epoch == "earlier" or int(epoch) < first):
            continue
        parts = [counts[name][epoch] for name in ("drawn", *OPEN)]
        assert issued == sum(parts) + sum(dropped[epoch].values()), (epoch, stores)
        assert min(parts) >= 0, (epoch, stores)


def of_epochs(stores: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the sums of a count over stores, by epoch; of `dropped` Counters."""
    found: dict[str, Any] = {}
    for books in stores:
        for epoch, own in books["epochs"].items():
            count = Counter(own[name]) if name == "dropped" else own[name]
            found[epoch] = found.get(epoch, type(count)()) + count
    return found

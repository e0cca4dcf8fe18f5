"""Every kind of parallelism under DeepSpeed's launcher: who gets what, and the same samples everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from batch_records import Arrays
from gear_support import shared_files
from parallel_checks import (
    BATCH,
    CASES,
    MODES,
    STEPS,
    TOGETHER,
    batches_alone,
    check_case,
    digest_of,
    read,
    section,
)

pytestmark = pytest.mark.timeout(600)  # of several launches, each with a limit of its own


@pytest.fixture(scope="module")
def alone(dataset: Path) -> dict[str, Arrays]:
    """The global batches of one process without an engine, by case."""
    return batches_alone(dataset)


@pytest.mark.parametrize("modes", TOGETHER, ids=" then ".join)
def test_every_rank_gets_its_part_of_the_same_batches(
    modes: list[str],
    dataset: Path,
    tmp_path: Path,
    alone: dict[str, Arrays],
    ranks_run: Callable[..., str],
) -> None:
    gear, ranks = section(dataset), MODES[modes[0]][0]
    task = {"gear": gear, "cases": CASES, "steps": STEPS, "out": str(tmp_path)}
    replicas = {mode: MODES[mode][1] for mode in modes}
    output = ranks_run("parallel_matrix.py", ranks, {**task, "modes": replicas}, timeout_s=400.0)
    assert output.count(f"gear: global batch {BATCH} = ") == len(modes) * len(CASES)
    assert shared_files(gear["shared_memory"]["prefix"]) == []
    for mode in modes:
        for case, whole in alone.items():
            found = read(tmp_path / mode.replace(":", "."), case, ranks)
            check_case(found, case, whole, replicas[mode], digest_of(dataset, case, whole))


def test_every_mode_is_run() -> None:
    assert sorted(mode for modes in TOGETHER for mode in modes) == sorted(MODES)
    assert all(len({MODES[mode][0] for mode in modes}) == 1 for modes in TOGETHER)

"""Engines on several ranks: the same global batches in every division, and a life with them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batch_records
import numpy as np
import pytest
from batch_records import SAMPLES, Arrays, assert_same, in_order
from gear_support import STEP, config_of, lengths_of, shared_files
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspeed_gear.data.splits import split_of

BATCH = 12
NAMES = (*SAMPLES, "epoch", "valid")
FIELDS = {
    "observation": {"offset": -1, "length": 4},
    "action": {},
    "reward": {},
    "code": {},
    "task": {},
}


def section(data: Path, **options: Any) -> dict[str, Any]:
    fields = {**FIELDS, "scaled": {"column": "observation", "normalize": "mean_std"}}
    return config_of(data, fields=fields, seed=3, timeout_s=60.0, **options)


def seen_by_all(out: Path, case: str, ranks: int) -> Arrays:
    """Join what the ranks of a case saw to global batches."""
    return in_order([dict(np.load(out / f"{case}.rank{rank}.npz")) for rank in range(ranks)])


def alone(config: dict[str, Any], batches: int) -> Arrays:
    return batch_records.alone({**config, "batch_size": BATCH}, batches, NAMES)


def check_rows(seen: Arrays) -> None:
    """Check that the batches hold the rows of the trajectories and steps that they name."""
    assert (seen["code"] == seen["trajectory_id"] * STEP + seen["anchor"]).all()
    assert (seen["action"][..., 0] == seen["code"]).all()
    assert (seen["observation"][..., 1, 0] == seen["code"]).all()  # the window begins one step before
    assert (seen["mask.observation"][..., 0] == (seen["anchor"] > 0)).all()


def test_every_division_gives_the_same_global_batches(
    dataset: Path, tmp_path: Path, ranks_run: Callable[..., str]
) -> None:
    """ZeRO 0 to 3, accumulation and prefetching on 2 ranks against one process without an engine.

    Half of the combinations, so that every value of one meets every value of the other two.
    """
    gear, batches = section(dataset), 4
    cases = [
        {"name": f"zero{zero}.gas{gas}.pre{ahead}", "zero": zero, "accumulation": gas, "prefetch": ahead}
        for zero in range(4)
        for gas in (1, 3)
        for ahead in (0, 2)
        if (zero + gas // 2 + ahead // 2) % 2 == 0
    ]
    out = {"out": str(tmp_path), "gear": gear, "batches": batches, "cases": cases}
    ranks_run("engine_matrix.py", 2, out)
    wanted = alone(gear, batches)
    check_rows(wanted)
    assert (wanted["sample_number"].ravel() == np.arange(batches * BATCH)).all()
    for case in cases:
        assert_same(seen_by_all(tmp_path, case["name"], 2), wanted, case["name"])
    assert shared_files(gear["shared_memory"]["prefix"]) == []


@pytest.fixture(scope="module")
def saved(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory, ranks_run: Callable[..., str]
) -> tuple[dict[str, Any], Path]:
    """A run of 2 ranks that has saved in the middle of an epoch and gone on: its task and its output."""
    out = tmp_path_factory.mktemp("saved")
    sampler, table = {"kind": "epoch", "unit": "trajectory"}, config_of(fields=FIELDS, seed=3, timeout_s=60.0)
    gear = {"data": section(dataset, sampler=sampler, prefetch=2), "table": {**table, "prefetch": 2}}
    gear["table"]["sampler"] = sampler
    task = {"gear": gear, "out": str(out), "checkpoints": str(out / "checkpoints"), "names": list(gear)}
    ranks_run("engine_resume.py", 2, {**task, "action": "save"})
    return task, out


def test_a_run_that_saves_goes_on_undisturbed(saved: tuple[dict[str, Any], Path]) -> None:
    task, out = saved
    wanted = alone(task["gear"]["data"], 8)
    before, after = seen_by_all(out, "data.before", 2), seen_by_all(out, "data.after", 2)
    found = {name: np.concatenate([before[name], after[name]]) for name in before}
    assert_same(found, wanted, "data")
    first_epoch = wanted["trajectory_id"].ravel()[wanted["epoch"].ravel() == 0]
    assert 3 * BATCH % len(first_epoch), "the test must save in the middle of an epoch"
    assert len(first_epoch) == len(np.unique(first_epoch)), "an epoch visits each item once"
    table = seen_by_all(out, "table.after", 2)
    check_rows(table)
    assert table["trajectory_id"].max() >= 20, "what was added under way is sampled"


@pytest.mark.parametrize(("ranks", "action"), [(1, "load"), (4, "load"), (2, "attach late")])
def test_a_checkpoint_continues_on_another_number_of_ranks(
    ranks: int,
    action: str,
    saved: tuple[dict[str, Any], Path],
    tmp_path: Path,
    ranks_run: Callable[..., str],
) -> None:
    """Exactly the batches that would have come, with the table's content as it was.

    `test_how_to_pages.py` continues universal checkpoints.
    """
    task, out = saved
    ranks_run("engine_resume.py", ranks, {**task, "out": str(tmp_path), "action": action})
    for name in task["names"]:
        found = seen_by_all(tmp_path, f"{name}.after", ranks)
        assert_same(found, seen_by_all(out, f"{name}.after", 2), name)


def test_attach_enable_evaluate_report_and_end(
    dataset: Path, tmp_path: Path, ranks_run: Callable[..., str]
) -> None:
    """One launch that ends with exit code 0 although its last engine is not destroyed."""
    gear = section(dataset)
    ranks_run("engine_attach.py", 2, {"gear": gear, "out": str(tmp_path)})
    assert shared_files(gear["shared_memory"]["prefix"]) == []
    check_evaluation(gear, tmp_path)
    check_metrics(tmp_path / "csv")
    check_tensorboard(tmp_path / "tensorboard")


def check_evaluation(gear: dict[str, Any], out: Path) -> None:
    lengths = np.array(lengths_of(40))
    kept_back = np.nonzero(split_of(np.arange(40), {"eval": 0.3}))[0]
    assert 0 < len(kept_back) < 40
    assert len(kept_back) % BATCH, "the last batch must have fillers"
    steps = sorted((int(i), step) for i in kept_back for step in range(lengths[i]))
    for unit in ("trajectory", "step"):
        for number in range(2):
            parts = [dict(np.load(out / f"eval.{unit}.{number}.rank{rank}.npz")) for rank in range(2)]
            seen = in_order([{name: array[None] for name, array in part.items()} for part in parts])
            check_rows(seen)
            ids, anchors = (seen[name][seen["valid"]].tolist() for name in ("trajectory_id", "anchor"))
            assert not seen["valid"].all()
            if unit == "trajectory":
                assert sorted(ids) == kept_back.tolist()
            else:
                assert sorted(zip(ids, anchors, strict=True)) == steps
        trained = seen_by_all(out, f"train.{unit}", 2)
        sampler = {"kind": "uniform", "unit": unit}
        assert_same(trained, alone({**gear, "sampler": sampler}, 8), f"training beside {unit} evaluation")
        assert not np.isin(trained["trajectory_id"], kept_back).any()


def check_metrics(folder: Path) -> None:
    """One row per optimizer step, written by one rank."""
    for name in ("sample_ms", "wait_ms", "bytes", "padding", "epoch"):
        with (folder / f"Train_Gear_{name}.csv").open() as file:
            head, *rows = list(csv.reader(file))
        assert len(head) == 2
        assert [int(samples) for samples, _ in rows] == [BATCH * step for step in range(1, 5)]
        values = [float(value) for _, value in rows]
        assert np.isfinite(values).all()
        assert name == "epoch" or max(values) > 0, name


def check_tensorboard(folder: Path) -> None:
    events = EventAccumulator(str(folder)).Reload()
    found = [(e.step, e.value) for e in events.Scalars("Train/Gear/sample_ms")]
    assert [step for step, _ in found] == [BATCH * step for step in range(1, 5)]
    assert all(value > 0 for _, value in found)

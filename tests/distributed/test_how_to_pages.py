"""The programs of docs/how-to/change-ranks.md and hugging-face.md, as they are printed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import batch_records
import numpy as np
import pytest
from batch_records import samples_of
from gear_support import STEP, config_of
from process_support import run_ranks

from deepspeed_gear import Replay

pytestmark = pytest.mark.timeout(600)  # of two launches, each with a limit of its own
BATCH, MICRO, HALF, STEPS = 12, 3, 3, 6
LOOP = 250  # steps of the loop of statistics.md
UNITS = {"prioritized": "step", "uniform": "step", "epoch": "trajectory"}
STAGES = {0: "uniform", 1: "prioritized", 3: "epoch"}  # the samplers of their runs
TRAINERS = {  # where they get the sizes from
    "GearTrainer": {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    "DummyOptim": {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2},
}
HAS_TRAINERS = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))


def section(data: Path, kind: str) -> dict[str, Any]:
    fields = {"observation": {"offset": -1, "length": 4}, "action": {}}
    sampler = {"kind": kind, "unit": UNITS[kind]}
    return config_of(data, fields=fields, sampler=sampler, seed=3, timeout_s=60.0, prefetch=1)


def ds_config(data: Path, kind: str, stage: int, **sizes: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "gear": section(data, kind),
        **sizes,
    }


@pytest.fixture(scope="module")
def ran(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train half of the steps on one rank and the rest on two, and all of them on one."""
    out = tmp_path_factory.mktemp("pages")
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO}
    runs = {f"zero{stage}": ds_config(dataset, kind, stage, **sizes) for stage, kind in STAGES.items()}
    whole = {f"whole.{kind}": (STEPS, ds_config(dataset, kind, 0, **sizes)) for kind in UNITS}
    for mark, own in TRAINERS.items():
        (out / mark).mkdir()
        (out / mark / "ds_config.json").write_text(json.dumps(ds_config(dataset, "uniform", 1, **own)))
    tasks: list[tuple[int, dict[str, Any]]] = [
        (1, {"runs": {name: (HALF, config) for name, config in runs.items()} | whole, "trainers": {}}),
        (
            2,
            {
                "runs": {name: (STEPS, config) for name, config in runs.items()},
                "trainers": dict.fromkeys(TRAINERS, STEPS) if HAS_TRAINERS else {},
                "progress": [LOOP, ds_config(dataset, "uniform", 0, **sizes)],
            },
        ),
    ]
    for ranks, task in tasks:
        run_ranks("how_to_pages.py", ranks, json.dumps({**task, "out": str(out)}), timeout_s=280.0)
    return out


def seen(out: Path, name: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of each global batch, in their order, and its loss. [N, B, 3], [N]."""
    parts = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    samples = np.array(sorted(sample for part in parts for sample in part["samples"]))
    losses = np.mean([part["losses"] for part in parts], axis=0)
    return samples.reshape(-1, BATCH, 3), losses.reshape(-1, BATCH // MICRO // ranks).mean(axis=1)


def alone(gear: dict[str, Any], batches: int, batch_size: int = BATCH, state: Any = None) -> np.ndarray:
    """Return the samples of one process without an engine. [N, B, 3]."""
    return samples_of(batch_records.alone({**gear, "batch_size": batch_size}, batches, state=state))


@pytest.mark.parametrize("stage", STAGES)
def test_train_continues_on_another_number_of_ranks(stage: int, ran: Path, dataset: Path) -> None:
    kind = STAGES[stage]
    first, second = seen(ran, f"zero{stage}.{HALF}", 1), seen(ran, f"zero{stage}.{STEPS}", 2)
    wanted, losses = seen(ran, f"whole.{kind}.{STEPS}", 1)
    assert (wanted == alone(section(dataset, kind), STEPS)).all()
    assert (np.concatenate([first[0], second[0]]) == wanted).all()
    assert np.concatenate([first[1], second[1]]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.skipif(not HAS_TRAINERS, reason="transformers and accelerate are not installed")
@pytest.mark.parametrize("mark", TRAINERS)
def test_a_trainer_resumes_at_the_next_sample(mark: str, ran: Path, dataset: Path) -> None:
    codes = alone(section(dataset, "uniform"), STEPS)[..., 1:] @ [STEP, 1]  # of trajectory and step
    found = [json.loads((ran / f"{mark}.{rank}.json").read_text()) for rank in range(2)]
    batches = np.concatenate([np.reshape(part, (STEPS, BATCH // 2)) for part in found], axis=1)
    assert (np.sort(batches) == np.sort(codes)).all()


def test_the_loop_of_the_page_on_progress(ran: Path) -> None:
    """It prints on rank 0 after every 100 steps; the text is what `str` of a Progress has."""
    lines = (ran / "progress.0").read_text().splitlines()
    known = r"[\d,.]+ samples/s, \d+(\.\d+)?% of the time waiting for data"
    assert [line.split(":")[0] for line in lines] == ["step 100", "step 200"]
    assert all(re.fullmatch(rf"step \d+: {known}", line) for line in lines), lines
    assert (ran / "progress.1").read_text() == ""


def test_another_global_batch_continues_without_a_gap(dataset: Path) -> None:
    """A uniform sampler and epochs give the same samples, in other batches."""
    for kind in ("uniform", "epoch"):
        gear = section(dataset, kind)
        wanted = alone(gear, 4).reshape(-1, 3)
        with Replay({**gear, "batch_size": BATCH}) as replay:
            for _ in range(2):
                replay.sample()
            state = replay.state_dict()
        assert (alone(gear, 3, 8, state).reshape(-1, 3) == wanted[2 * BATCH :]).all()

"""What goes wrong in parallel training ends on every rank with an error that names it, and in time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import config_of, shared_files, wait_until
from parallel_checks import ENDS, FIELDS, MODES
from process_support import Ranks

TIMEOUT_S = 8.0
LONG = pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")


def task(dataset: Path, out: Path, kind: str, mode: str, **options: Any) -> dict[str, Any]:
    gear = config_of(dataset, fields=FIELDS, pipeline=ENDS, timeout_s=TIMEOUT_S)
    return {"kind": kind, "mode": mode, "gear": gear, "out": str(out), "replicas": MODES[mode][1], **options}


def results(out: Path, ranks: list[int]) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in ranks]


def test_what_attach_refuses(dataset: Path, tmp_path: Path, ranks_run: Callable[..., str]) -> None:
    ranks_run("parallel_faults.py", 2, task(dataset, tmp_path, "refused", "zero:1x2"))
    wanted = {
        "seeds": "must be the same on all ranks, got 'rank 0 and rank 1: gear.seed: 0 and 1'",
        "fields": "gear.pipeline.labels[1] must name a field, its mask",
        "no section": "gear.pipeline must be given where the model is a pipeline",
        "window": "gear.fields.odd.length must be a multiple of the sequence ranks (2), got 3",
        "mpu": "rank 0: data 0 of 1, tensor 0 of 2; rank 1: data 0 of 1, tensor 0 of 2",
    }
    for found in results(tmp_path, [0, 1]):
        assert {name: error[0] for name, error in found.items()} == dict.fromkeys(wanted, "ConfigError")
        for name, text in wanted.items():
            assert text in found[name][1]


@pytest.mark.parametrize("mode", ["zero:1x2", pytest.param("tensor:2", marks=LONG), "pipe:3"])
def test_a_rank_that_fails_or_ends_early(
    mode: str, dataset: Path, tmp_path: Path, ranks_run: Callable[..., str]
) -> None:
    """A failure is raised on all, and all may try again; other samples than those of the replica are found;
    who ends a step early is named by the others."""
    ranks, replicas = MODES[mode]
    by_error = mode.startswith("pipe")
    wanted = task(dataset, tmp_path, "steps", mode, by_error=by_error)
    wanted["gear"]["verify_every"] = 1
    ranks_run("parallel_faults.py", ranks, wanted)
    found, text = results(tmp_path, list(range(ranks))), "a fault in the user's transform"
    differs = None if replicas == ranks else f"rank {ranks - 1} must have the samples of its replica (0)"
    for rank, result in enumerate(found):
        failed = None if rank == ranks - 1 else f"[raised on rank {ranks - 1}]"
        errors = dict(enumerate(result["errors"]))
        assert text in errors[2][1]
        assert errors[2][0] == ("PeerError" if failed else "ArithmeticError")
        assert (failed or text) in errors[2][1]
        assert errors[5] is None if differs is None else differs in errors[5][1]
        assert [errors[n] for n in (0, 1, 3, 4, 6)] == [None] * 5
        assert all(float(error[2]) < TIMEOUT_S for error in errors.values() if error)
        if failed:
            kind, message, seconds = result["end"]
            assert kind == "PeerError"
            rule, had = "must take as many batches as this rank", "it ended after 7 of 8 batch barriers"
            if by_error:
                rule = "must train as long as the others"
                had = "it failed after 7 of 8 batch barriers: KeyError: 'of this test'"
            assert f"rank {ranks - 1} {rule}; {had}" in message
            assert float(seconds) < TIMEOUT_S


def test_a_cut_that_fails_is_an_error_on_all_at_once(
    dataset: Path, tmp_path: Path, ranks_run: Callable[..., str]
) -> None:
    """One rank finds no mass to draw from while the other waits for its reports; both can go on later."""
    wanted = task(dataset, tmp_path, "zeros", "zero:1x2")
    anchors = {"unit": "step", "anchors": "start"}
    wanted["gear"]["sampler"] = {"kind": "prioritized", "initial": 1.0, **anchors}
    ranks_run("parallel_faults.py", 2, wanted)
    for found in results(tmp_path, [0, 1]):
        for kind, message, seconds in found["errors"]:
            assert kind in ("StoreError", "PeerError")
            assert "trajectories (24 steps) of priority 0" in message
            assert float(seconds) < 3.5
        assert found["end"] is None


@pytest.mark.parametrize(("kind", "mode", "victim"), [("killed", "pipe:3", 1), ("stopped", "zero:1x2", 0)])
def test_a_rank_that_dies_or_stands_still(
    kind: str, mode: str, victim: int, dataset: Path, tmp_path: Path
) -> None:
    wanted, ranks, timeout_s = task(dataset, tmp_path, kind, mode, victim=victim), MODES[mode][0], 5.0
    wanted["gear"]["timeout_s"] = timeout_s
    others = [rank for rank in range(ranks) if rank != victim]
    run = Ranks("parallel_faults.py", ranks, json.dumps(wanted))
    try:
        wait_until(lambda: all((tmp_path / f"{rank}.json").exists() for rank in others), "the errors", 120)
        for found in results(tmp_path, others):
            assert found["errors"] == [None, None]
            error, message, seconds = found["end"]
            assert error == "PeerError"
            assert message.startswith(f"rank {victim} must ")
            assert ("it died" if kind == "killed" else f"within {timeout_s} s") in message
            assert float(seconds) < timeout_s + 5
    finally:
        run.kill()
    assert shared_files(wanted["gear"]["shared_memory"]["prefix"]) == []

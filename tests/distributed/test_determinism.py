"""The same batches on any number of ranks, in any division, after a kill and a resume.

`benchmarks/determinism.py` does it for more seeds, ranks and batches; this is its quick form.
"""

import importlib
import multiprocessing
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_batches_are_the_same_in_every_division(
    monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    monkeypatch.syspath_prepend(str(checkout / "benchmarks"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    determinism = importlib.import_module("determinism")
    ragged = importlib.import_module("support.ragged")
    context = multiprocessing.get_context("forkserver")  # ranks import torch once together
    context.set_forkserver_preload(
        ["torch.distributed", "torch._dynamo", "deepspeed_gear.replay.replay"]
    )
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    rows = determinism.run(quick=True, launcher=False)
    assert [row for row in rows if not row["equal"]] == []
    for sampler in ragged.SAMPLERS:
        variants = {row["variant"] for row in rows if row["sampler"] == sampler}
        assert variants == {
            "1 ranks, accumulation 1, prefetch 0",
            "2 ranks, accumulation 2, prefetch 3",
            "2 ranks, accumulation 1, prefetch 0",
            "killed on 2 ranks, resumed on 4",
            "killed on 2 ranks, resumed on 1",
            "differs from every other sampler and seed",
        }
    assert len({row["digest"] for row in rows}) == len(ragged.SAMPLERS)

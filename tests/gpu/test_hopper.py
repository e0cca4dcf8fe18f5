"""The Hopper job on a GPU: the batches of a whole run are those of the CPU, and it learns as much."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_support import digests, hopper_data

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
STEPS = 4000  # of the configs
LEAST_RETURN = 3400  # docs/tutorials/decision-transformer.md has the returns of the CPU
CONFIGS = {"host": "hopper.json", "device": "hopper_device.json"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(data: Path) -> list[str]:
    return digests("hopper.json", "cpu", data, STEPS)


@pytest.mark.parametrize("placement", CONFIGS)
def test_the_batches_of_a_whole_run_are_those_of_the_cpu(
    data: Path, expected: list[str], placement: str
) -> None:
    found = digests(CONFIGS[placement], "cuda", data, STEPS)
    first = next((i for i in range(STEPS) if found[i] != expected[i]), None)
    assert first is None, f"batch {first} is another one"


@pytest.mark.parametrize("placement", CONFIGS)
def test_it_trains_to_the_return_of_the_cpu(
    gpu_hopper: ModuleType, tmp_path: Path, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of waiting is told, not judged: that is what benchmarks/gpu.py is for."""
    absent = gpu_hopper.missing(*gpu_hopper.NEEDED)
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    gpu_hopper.prepare(tmp_path)
    result = gpu_hopper.run_job(placement, torch.device("cuda"), tmp_path)
    row = gpu_hopper.row_of(result, placement).to_json()
    with capsys.disabled():
        print(
            f"\nHopper, table in the memory of the {placement}: return {result['return_after']} after "
            f"{result['seconds_train']} s; gear_sample() {result['sample_us']} us, "
            f"{100 * result['sample_share']:.2f}% of the step ({row['asked']}: {row['holds']})"
        )
    assert result["device"].startswith("cuda")
    assert result["steps"] == STEPS
    assert result["return_after"] >= LEAST_RETURN


@pytest.fixture
def gpu_hopper(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> ModuleType:
    """What runs the example, from the benchmarks."""
    monkeypatch.syspath_prepend(str(checkout / "benchmarks"))
    return importlib.import_module("gpu_hopper")

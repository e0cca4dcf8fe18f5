"""The Hopper job on a GPU: the batches of a whole run are those of the CPU, and it
learns as much.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hopper_batches import digests, hopper_data
from process_support import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
STEPS = 4000  # of the configs
LEAST_RETURN = 3400  # docs/tutorials/decision-transformer.md has the returns of the CPU
Run = Callable[..., subprocess.CompletedProcess[str]]
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
    run_python: Run,
    checkout: Path,
    tmp_path: Path,
    placement: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The time in `gear_sample()` is printed, not judged."""
    for package in ("gymnasium", "mujoco", "matplotlib", "tensorboard"):
        pytest.importorskip(package, reason="the job evaluates in its environment and draws curves")
    (tmp_path / "data").mkdir()
    hopper_data(tmp_path / "data")
    result = run_job(run_python, checkout, tmp_path, CONFIGS[placement])
    with capsys.disabled():
        print(
            f"\nHopper, table in the memory of the {placement}: return {result['return_after']} "
            f"after "
            f"{result['seconds_train']} s; gear_sample() {result['sample_us']} us, "
            f"{100 * result['sample_share']:.2f}% of the step"
        )
    assert result["device"].startswith("cuda")
    assert result["steps"] == STEPS
    assert result["return_after"] >= LEAST_RETURN


def run_job(run_python: Run, checkout: Path, folder: Path, config: str) -> dict[str, Any]:
    """Run the example on one rank in a folder that has its data; return its last line."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cuda"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(checkout), os.environ.get("PYTHONPATH")))
    )
    command = [
        "-u",
        str(checkout / "examples" / "hopper.py"),
        "--config",
        str(checkout / "configs" / config),
    ]
    run = run_python(*command, env=place, cwd=folder, timeout_s=600.0)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))

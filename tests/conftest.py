"""Settings of every test run: accelerator, threads, folder of builds, reproducible hypothesis."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from native_builds import use_builds
from warm_python import run_warm

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Examples are the same in every run, and a slow machine is no failure.
settings.register_profile(
    "gear",
    deadline=None,
    derandomize=True,
    max_examples=200 if os.environ.get("GEAR_LONG_TESTS") == "1" else 50,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("gear")

ROOT = Path(__file__).resolve().parents[1]

use_builds()


def pytest_sessionstart() -> None:
    """Remove what killed builds of earlier runs have left, and heed SIGINT.

    A shell's background job ignores SIGINT, and so would the programs that tests interrupt.
    """
    from deepspeed_gear.ops import stale_locks

    stale_locks.remove()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say so; GEAR_TEST_SHARD=2/8 keeps every eighth
    test.
    """
    if shard := os.environ.get("GEAR_TEST_SHARD"):
        number, of = (int(part) for part in shard.split("/"))
        config.hook.pytest_deselected(
            items=[item for i, item in enumerate(items) if i % of != number - 1]
        )
        items[:] = items[number - 1 :: of]
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 40 trajectories of 1 to 29 steps, with an evaluation split."""
    from gear_support import lengths_of, write_dataset

    path = tmp_path_factory.mktemp("data") / "set"
    return write_dataset(path, lengths_of(40), split={"eval": 0.3})


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python *arguments`; `env` is laid over this one's, None removes a name.

    Without a GPU, which a fork cannot use, a program's file runs in a warm process. A text (`-c`)
    never does.
    """

    def run(
        *arguments: str,
        env: dict[str, str | None] | None = None,
        cwd: Path = ROOT,
        timeout_s: float = 240.0,
    ) -> subprocess.CompletedProcess[str]:
        merged = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
        if arguments[0].endswith(".py") and not HAS_GPU:
            return run_warm(*arguments, env=merged, cwd=cwd, timeout_s=timeout_s)
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=merged, cwd=cwd, timeout=timeout_s, capture_output=True, text=True
        )

    return run

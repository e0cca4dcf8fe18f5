"""What launch/test_gpu.sh asks of a machine before it installs anything, and the wheels that it needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_gear.ops import toolchain

Run = Callable[..., subprocess.CompletedProcess[str]]


def names_of(requirements: list[str]) -> set[str]:
    """Names of requirements that hold without an extra."""
    plain = (line for line in requirements if "extra ==" not in line)
    return {re.split(r"[ <>=!~\[;]", line)[0].lower().replace("_", "-") for line in plain}


def test_the_documented_wheels_are_all_that_is_installed(checkout: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["gpu"]
    needed += project["build-system"]["requires"] + importlib.metadata.requires("deepspeed")
    text = (checkout / "docs" / "how-to" / "gpu.md").read_text()
    command = re.search(r"^pip wheel .*?\n```$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert names_of(needed) - {"torch"} <= set(command[0].split())


@pytest.fixture
def run(checkout: Path, tmp_path: Path) -> Run:
    """Run the script where these programs are, each the body of a shell script; it ends as it sets up."""
    (tmp_path / "launch").mkdir()
    shutil.copy(checkout / "launch" / "test_gpu.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text('echo "setup: $*, over ${VIRTUAL_ENV:-.venv}"; exit 7\n')

    def start(programs: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
        for name, body in programs.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#!/bin/sh\n{body}\n")
            file.chmod(0o755)
        for name in ("bash", "dirname", "sh"):
            (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
        command = [str(tmp_path / "bin" / "bash"), str(tmp_path / "launch" / "test_gpu.sh")]
        return subprocess.run(
            command, env={"PATH": str(tmp_path / "bin"), **env}, capture_output=True, text=True, timeout=60
        )

    return start


def test_no_device_is_told_at_once(run: Run) -> None:
    found = run({"bin/nvidia-smi": "exit 9", "bin/python3": "exit 1", "bin/nvcc": "exit 0"})
    assert found.returncode == 1
    assert "error: no CUDA device" in found.stderr
    assert found.stdout == ""


def test_no_compiler_is_told_at_once(run: Run, tmp_path: Path) -> None:
    found = run({"bin/nvidia-smi": "exit 0", "bin/python3": "exit 0"}, CUDA_HOME=str(tmp_path / "cuda"))
    assert found.returncode == 1
    assert f"error: CUDA_HOME is {tmp_path}/cuda, which has no bin/nvcc" in found.stderr
    assert found.stdout == ""


def test_a_torch_that_sees_a_device_is_used_and_not_changed(run: Run, tmp_path: Path) -> None:
    found = run({"bin/python3": "exit 0", ".venv/bin/python": "exit 1", "bin/nvcc": "exit 0"})
    assert found.returncode == 7
    assert found.stdout == f"setup: --for-gpu {tmp_path}/bin/python3, over {tmp_path}/.venv-gpu\n"


@pytest.mark.parametrize("smi", ["exit 0", "exit 9"])
def test_the_environment_that_is_there_comes_first(run: Run, smi: str) -> None:
    programs = {"bin/python3": "exit 0", ".venv/bin/python": "exit 0", "bin/nvcc": "exit 0"}
    assert run({**programs, "bin/nvidia-smi": smi}).stdout == "setup: --for-gpu, over .venv\n"


def test_without_any_torch_one_is_installed(run: Run) -> None:
    found = run({"bin/nvidia-smi": "exit 0", "bin/python3": "exit 1", "bin/nvcc": "exit 0"})
    assert found.stdout == "setup: --for-gpu, over .venv\n"


def test_packages_of_the_machine_are_seen_and_not_changed(checkout: Path, tmp_path: Path) -> None:
    """Without a network; here the machine is the environment of the tests."""
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    pytest.importorskip("setuptools", minversion="77", reason="the build's need is not there")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(checkout / name, tmp_path)
    for name in ("launch", "deepspeed_gear", "ops"):
        shutil.copytree(checkout / name, tmp_path / name)
    packages, venv = Path(sysconfig.get_path("purelib")), tmp_path / "over"
    before = sorted(packages.iterdir())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"VIRTUAL_ENV": str(venv), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = ["bash", str(tmp_path / "launch" / "setup.sh"), "--for-gpu", sys.executable]
    made = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    assert sorted(packages.iterdir()) == before
    program = "import deepspeed_gear, torch; print(deepspeed_gear.__file__, torch.__file__, sep='\\n')"
    told = subprocess.run(
        [str(venv / "bin" / "python"), "-c", program], env=env, cwd="/", capture_output=True, text=True
    )
    ours, torchs = told.stdout.split()
    assert Path(ours) == tmp_path / "deepspeed_gear" / "__init__.py"
    assert Path(torchs) == Path(torch.__file__)

"""launch/env.sh, sourced by itself in a user's shell."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SHOW = "source launch/env.sh && cd / && command -v python && "
SHOW += 'echo "$OMP_NUM_THREADS $DS_ACCELERATOR ${root:-unset}"'


def sourced(
    shell: str, folder: Path, code: str = SHOW, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a shell that stops at errors and unset variables, where nothing else is set."""
    command = [str(shutil.which(shell)), "-euc", code]
    variables = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.fixture
def copy(checkout: Path, tmp_path: Path) -> Path:
    """A checkout with a name that must be quoted, whose Python counts no device."""
    folder = tmp_path / "a checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "launch").mkdir()
    shutil.copy(checkout / "launch" / "env.sh", folder / "launch")
    python = folder / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho 0\n")
    python.chmod(0o755)
    return folder


@pytest.fixture(params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    name: str = request.param
    return name


def test_it_needs_nothing_but_an_environment(shell: str, copy: Path, tmp_path: Path) -> None:
    wanted = f"{copy}/.venv/bin/python\n1 cpu"
    here = sourced(shell, copy)
    assert here.stdout == f"{wanted} unset\n", here.stderr
    # A variable of the user's shell is not taken for the checkout, and `cd` does not look in other
    # folders.
    (tmp_path / "launch").mkdir()
    code = SHOW.replace("launch/env.sh", "'a checkout/launch/env.sh'")
    elsewhere = sourced(
        shell, tmp_path, code, root="/nowhere", CDPATH="/usr:/tmp", OMP_NUM_THREADS="3"
    )
    assert elsewhere.stdout == f"{copy}/.venv/bin/python\n3 cpu /nowhere\n", elsewhere.stderr


def test_without_an_environment_it_says_what_makes_one(shell: str, copy: Path) -> None:
    shutil.rmtree(copy / ".venv")
    done = sourced(shell, copy, 'source launch/env.sh || echo "status $?"')
    assert done.stdout == "status 1\n"
    assert done.stderr.strip() == (
        f"env.sh: error: {copy}/.venv must have an environment; run: bash {copy}/launch/setup.sh"
    )

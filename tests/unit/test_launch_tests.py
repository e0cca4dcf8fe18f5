"""launch/test.sh: what it runs, and that nothing that fails or ends early is taken for passed.

Its programs are stubs here, so that a run takes no time.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# `python`: the server of warm processes, which lives as long as the script; the builds; or pytest
# with a group's words.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -u ]; then
  touch "$3"
  while kill -0 "$PPID" 2>/dev/null; do sleep 0.05; done
  exit
fi
if [[ "$1" == */native_builds.py ]]; then
  echo "no compiler"
  [ "$BAD" != native_builds ]
  exit
fi
echo "$*" >>"$WORK/calls"
if [[ " $* " == *" $BAD "* ]]; then
  case "$HOW" in
    fails) echo "FAILED tests/test_a.py::test_b - boom"; echo "=== 1 failed, 2 passed in 0.10s ==="; exit 1 ;;
    "is killed") kill -9 $$ ;;
    "is killed with its lane") kill -9 "$PPID" $$ ;;
  esac
fi
echo "=== 3 passed in 75.10s (0:01:15) ==="
"""


@pytest.fixture
def work(tmp_path: Path, checkout: Path) -> Path:
    """A folder with the script, and stubs of all that it runs."""
    (tmp_path / "launch").mkdir()
    shutil.copy(checkout / "launch" / "test.sh", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").touch()
    (tmp_path / "launch" / "env.sh").touch()
    (tmp_path / "bin").mkdir()
    stubs = {"python": PYTHON, "ruff": "#!/bin/sh\nexit $RUFF\n", "mypy": "#!/bin/sh\nexit 0\n"}
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(
    work: Path, *arguments: str, bad: str = "none", how: str = "", ruff: int = 0
) -> tuple[int, list[str]]:
    """Run the script; return its exit status and its lines."""
    path = f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "WORK": str(work), "BAD": bad, "HOW": how, "RUFF": str(ruff)}
    env["TMPDIR"] = str(work)
    command = ["bash", str(work / "launch" / "test.sh"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def calls(work: Path) -> list[str]:
    """Return what pytest was called with, without its options."""
    return [
        line.split("--durations-min=5 ")[-1].strip()
        for line in (work / "calls").read_text().splitlines()
    ]


def test_every_test_is_in_one_group_and_the_last_lines_are_pytests(
    work: Path, checkout: Path
) -> None:
    status, lines = run(work)
    assert status == 0, lines
    groups = calls(work)
    assert lines[-len(groups) :] == ["=== 3 passed in 75.10s (0:01:15) ==="] * len(groups)
    (others,) = (group.split() for group in groups if "--ignore" in group)
    left_out = [word.removeprefix("--ignore=") for word in others[1:]]
    named = [word for group in groups if "--ignore" not in group for word in group.split()]
    assert others == ["tests", *(f"--ignore={name}" for name in left_out)]
    assert sorted(left_out) == sorted(named)
    assert len(set(named)) == len(named)
    assert all((checkout / name).exists() for name in named)


@pytest.mark.parametrize("how", ["fails", "is killed", "is killed with its lane"])
@pytest.mark.parametrize("bad", ["tests/cluster", "tests/unit/config"])
def test_a_group_that_does_not_pass_fails_the_run(work: Path, bad: str, how: str) -> None:
    status, lines = run(work, bad=bad, how=how)
    assert status != 0, lines
    if how == "fails":
        closing = lines[lines.index("test.sh: failed: pytest " + group_with(work, bad)) - 1 :]
        assert closing[0] == "FAILED tests/test_a.py::test_b - boom"
        assert all(line.startswith("=== ") for line in closing[2:])
    if how == "is killed":
        assert "test.sh: failed: pytest " + group_with(work, bad) in lines


def group_with(work: Path, name: str) -> str:
    """Return the words of the group that has a folder."""
    (group,) = (group for group in calls(work) if name in group.split())
    return group


def test_lint_that_fails_fails_the_run(work: Path) -> None:
    status, lines = run(work, ruff=1)
    assert status == 1
    assert "test.sh: failed: ruff or mypy" in lines


def test_the_quick_form_says_what_it_leaves_out(work: Path, checkout: Path) -> None:
    status, lines = run(work, "--quick")
    assert status == 0, lines
    named = [word.removeprefix("--ignore=") for group in calls(work) for word in group.split()]
    assert all((checkout / name).exists() for name in named)
    for group in calls(work):
        assert f"test.sh: --quick has run lint, types and pytest {group}" in lines
    assert any(line.startswith("test.sh: it leaves out all else: ranks, nodes") for line in lines)


def test_other_arguments_are_pytests(work: Path) -> None:
    assert run(work, "tests/unit/ops", "-k", "lock")[0] == 0
    assert (work / "calls").read_text() == "-m pytest tests/unit/ops -k lock\n"


def test_a_build_that_fails_ends_the_run_with_its_error(work: Path) -> None:
    status, lines = run(work, bad="native_builds")
    assert status == 1
    assert "no compiler" in lines
    assert not (work / "calls").exists()

"""launch/test_gpu.sh: the Python that it takes, its wheels, its stages, and a dry run of each of
them.
"""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from compiled_kernels import compiled_kernels
from gear_support import load_script, wait_until

from deepspeed_gear.ops import toolchain


@pytest.fixture(scope="module")
def stages(checkout: Path) -> ModuleType:
    """The module of the stages, which is a script."""
    return load_script(checkout / "launch" / "gpu_stages.py")


# ---- packages ------------------------------------------------------------------------------------


def test_what_is_needed_is_documented_and_installed(checkout: Path, stages: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["gpu"]
    needed += importlib.metadata.requires("deepspeed")
    plain = {re.split(r"[ <>=!~\[;]", line)[0] for line in needed if "extra ==" not in line}
    names = {name.lower().replace("_", "-") for name in plain} - {"torch"} | {"setuptools"}
    text = (checkout / "docs" / "how-to" / "gpu-checks.md").read_text()
    command = re.search(r"^pip wheel .*?\n```$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert names <= set(command[0].split())
    assert names == {stages.PIP_NAMES.get(name, name) for name in (*stages.PACKAGES, *stages.ALONE)}


def test_missing_packages_go_into_the_cache(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stages.Machine({}, None, tmp_path, tmp_path)
    assert stages.packages(here) == []
    monkeypatch.setattr(stages, "is_there", lambda name: name not in ("cpuinfo", "deepspeed"))
    ((step,),) = stages.packages(here)
    with_needs, alone = step.command[-1].split(" && ")
    assert with_needs.endswith(f"--target {tmp_path}/packages py-cpuinfo")
    assert alone.endswith(f"--target {tmp_path}/packages --no-deps deepspeed")


# ---- the Python that runs them -------------------------------------------------------------------


# a torch that sees a device, or one that fails to
SEES = 'echo "$0 $*"'
BLIND = 'test "$1" != -c'
NO_CUDA = 'case "$2" in *cuda*) exit 1;; esac; echo "$0 $*"'


@pytest.mark.parametrize(
    ("programs", "arguments", "wanted"),
    [
        ({"bin/python3": SEES, ".venv/bin/python": BLIND}, "A --out results", "bin/python3"),
        ({"bin/python3": SEES, ".venv/bin/python": SEES}, "B", ".venv/bin/python"),
        (
            {"bin/python3": SEES, ".venv/bin/python": SEES, "other/bin/python": SEES},
            "B",
            "other/bin/python",
        ),
        ({"bin/python3": NO_CUDA}, "A --dry-run", "bin/python3"),
        ({"bin/python3": BLIND, ".venv/bin/python": BLIND}, "A", None),
    ],
)
def test_the_python_that_runs_the_stages(
    programs: dict[str, str], arguments: str, wanted: str | None, checkout: Path, tmp_path: Path
) -> None:
    """The script where these programs are, each the body of a shell script; "other" is an activated
    one.
    """
    (tmp_path / "launch").mkdir()
    shutil.copy(checkout / "launch" / "test_gpu.sh", tmp_path / "launch")
    for name, body in programs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    for name in ("bash", "dirname", "sh"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(tmp_path / "bin")}
    if "other/bin/python" in programs:
        env["VIRTUAL_ENV"] = str(tmp_path / "other")
    command = [
        str(tmp_path / "bin" / "bash"),
        str(tmp_path / "launch" / "test_gpu.sh"),
        *arguments.split(),
    ]
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    if wanted is None:
        assert (found.returncode, found.stdout) == (1, "")
        assert "error: no CUDA device" in found.stderr
    else:
        assert found.returncode == 0
        ran = f"{tmp_path}/{wanted} {tmp_path}/launch/gpu_stages.py {arguments}"
        assert found.stdout.splitlines()[-1] == ran


# ---- stages --------------------------------------------------------------------------------------


def record_of(out: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"stage-{stage}.json").read_text())
    return found


@pytest.fixture
def stage_of(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Make a stage A of other steps, each with a name, a command and a limit; it records in
    `tmp_path`.
    """

    def make(
        *waves: list[tuple[Any, ...]], card: tuple[Any, ...] = (), is_dry: bool = False
    ) -> Any:
        steps = [[stages.Step(*step, needs=()) for step in wave] for wave in waves]
        steps += [list(card)] if card else []
        monkeypatch.setitem(stages.STAGES, "A", lambda here: steps)
        missing = {"gpu": "there is no GPU"} if is_dry else {}
        return stages.Stage("A", stages.Machine(missing, None, tmp_path, tmp_path), is_dry)

    return make


def test_a_step_that_fails_or_hangs_does_not_end_a_stage(
    stages: ModuleType, stage_of: Any, tmp_path: Path
) -> None:
    good = ("good", ("echo", "fine"), 20)
    bad = ("bad", ("sh", "-c", "echo why; exit 3"), 20)
    hangs = ("hangs", ("sh", "-c", "echo begun; sleep 3600"), 1)
    absent = ("absent", ("no-such-program",), 20)
    card = stages.Step("card", ("true",), 20, elsewhere="a test")
    lane = stages.Step("lane", ("false",), 20, dry=("echo", "CPU"))
    assert stage_of([good, bad], [hangs], [absent], card=(card, lane), is_dry=True).run() == 3
    found = {one["name"]: one for one in record_of(tmp_path, "A")["steps"]}
    codes = {"good": 0, "bad": 3, "hangs": 124, "absent": 127, "card": None, "lane": 0}
    assert {name: one["rc"] for name, one in found.items()} == codes
    tails = [found[name]["tail"] for name in ("bad", "hangs", "lane")]
    assert tails == ["why\n", "begun\n", "CPU\n"]
    assert found["hangs"]["timed_out"]
    assert found["good"]["command"] == ["echo", "fine"]
    assert found["card"]["skipped"] == "there is no GPU; on a CPU: a test"


def test_every_step_is_in_the_record_as_soon_as_it_has_ended(stage_of: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    waits = ("sh", "-c", f"until test -e {gate}; do sleep 0.05; done")
    running = threading.Thread(
        target=stage_of([("first", ("true",), 20)], [("second", waits, 20)]).run
    )
    running.start()
    try:
        wait_until((tmp_path / "stage-A.json").exists, "the record of a step")
        assert [one["name"] for one in record_of(tmp_path, "A")["steps"]] == ["first"]
    finally:
        gate.touch()
        running.join()
    assert [one["name"] for one in record_of(tmp_path, "A")["steps"]] == ["first", "second"]


def test_a_stage_ends_in_time(
    stages: ModuleType, stage_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "STAGE_S", 2.0)
    monkeypatch.setattr(stages, "LEAST_S", 1.0)
    assert stage_of(*([(name, ("sleep", "60"), 60)] for name in ("long", "late"))).run() == 1
    long, late = record_of(tmp_path, "A")["steps"]
    assert (long["rc"], long["limit_s"]) == (124, 2)
    assert late["skipped"] == "no time is left of the 2 s of a stage"


def test_a_stage_that_is_ended_ends_its_steps(stage_of: Any, tmp_path: Path) -> None:
    stage = stage_of([(name, ("sleep", "100"), 200) for name in ("one", "two")])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ender = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    ender.start()
    try:
        with pytest.raises(SystemExit):
            stage.run()
    finally:
        ender.join()
        signal.signal(signal.SIGTERM, before)
    assert [one["rc"] for one in record_of(tmp_path, "A")["steps"]] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("stage", "ABCDM")
def test_a_stage_on_a_gpu_has_no_step_that_is_left_out(
    stages: ModuleType, tmp_path: Path, stage: str
) -> None:
    here = stages.Machine({}, None, tmp_path, tmp_path)
    run = stages.Stage(stage, here, False)
    steps = [step for wave in stages.STAGES[stage](here) for step in wave]
    assert all(run._command(step)[0] == step.command for step in steps)
    names = [stages.file_name(step.name) for step in steps]
    assert len(set(names)) == len(names)
    for step in steps:
        for file in (
            part for part in step.command if str(part).startswith(("tests/", "benchmarks/"))
        ):
            assert (stages.ROOT / file).exists(), file


def test_shards_are_all_tests_once(
    checkout: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(checkout / "tests" / "conftest.py")
    (conftest,) = [
        p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", "") == path
    ]
    tests = [MagicMock() for _ in range(10)]
    parts = []
    for number in (1, 2, 3):
        monkeypatch.setenv("GEAR_TEST_SHARD", f"{number}/3")
        kept = list(tests)
        conftest.pytest_collection_modifyitems(MagicMock(), kept)
        parts.append([tests.index(test) for test in kept])
    assert [len(part) for part in parts] == [4, 3, 3]
    assert sorted(chain(*parts)) == list(range(10))


@pytest.mark.timeout(700)  # the first one compiles all kernels
def test_a_dry_run_of_every_stage(checkout: Path, tmp_path: Path) -> None:
    """Builds stay in the checkout's cache, as those of the other tests do."""
    if toolchain.cuda_home() is not None:
        compiled_kernels("9.0")  # with the reports that tests/unit/ops reads; a dry run makes none
    script = str(checkout / "launch" / "test_gpu.sh")
    command = ["bash", script, *"A B C D F M --dry-run --out".split(), str(tmp_path)]
    env = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {}
    for stage in "ABCDFM":
        record = record_of(tmp_path, stage)
        assert record["dry_run"]
        for step in record["steps"]:
            if step["rc"] is None:
                assert (
                    "this is a dry run" in step["skipped"] or "there is no nvcc" in step["skipped"]
                )
            ran[stage, step["name"]] = step["rc"]
    lanes = [("A", "environment"), ("A", "build of the CPU op"), ("A", "ops against the reference")]
    lanes += [("A", "figures of device tables"), ("A", "captured and compiled steps 1 of 4")]
    lanes += [("B", "equivalence 1 of 4"), ("B", "rows that kernels read in host memory")]
    lanes += [("D", "tables beside peers")]
    lanes += [("F", "faults of kernels"), ("M", "order of memory")]
    if toolchain.cuda_home() is not None:
        lanes += [("A", "build of the kernels")]
    assert {lane: ran[lane] for lane in lanes} == dict.fromkeys(lanes, 0)
    assert (
        ran["A", "no hidden waits"]
        is ran["B", "two ranks on one card"]
        is ran["C", "memcheck"]
        is None
    )
    assert json.loads((tmp_path / "figures-of-device-tables.json").read_text())["rows"]
    peers = json.loads((tmp_path / "gpu_peers.json").read_text())
    assert {row["system"] for row in peers["rows"] if "us" in row} == {"gear", "columns"}
    assert not (tmp_path / "results").exists()  # numbers of a dry run are no results

"""`gear`, the command, and `gear report`."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_python import run_warm

import deepspeed_gear
from deepspeed_gear.cli import main as cli
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops import toolchain
from deepspeed_gear.ops.backends import load_native

Run = Callable[..., subprocess.CompletedProcess[str]]
GEAR = ("-m", "deepspeed_gear.cli.main")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments`, in a process that has imported torch."""
    return run_warm(*arguments, env={**os.environ, **env})


def rows(text: str) -> dict[str, list[str]]:
    """What stands behind the dots, by the name before them; a name may come more than once."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, dots, value = line.partition(" .")
        if dots:
            found.setdefault(name, []).append(value.lstrip(". "))
    return found


def test_the_report_shows_gear_beside_deepspeeds_ops(capsys: pytest.CaptureFixture[str]) -> None:
    module = load_native()
    assert cli.main(["report"]) == 0
    table = rows(capsys.readouterr().out)
    assert "cpu_adam" in table
    in_op_table, in_own_section = table["gear"]
    assert "OKAY" in in_op_table
    assert in_own_section.endswith(f"loaded from {module.__file__}")
    assert len(table["gear_cuda"]) == 2
    assert table["C++ compiler"] == [toolchain.compiler_version()]
    assert table["sources"] == [str(toolchain.csrc_root())]
    assert set(table) >= {"torch version", "CUDA toolkit", "CUDA of torch, device", "accelerator"}


def test_the_report_builds_nothing_unless_asked_and_says_why_it_cannot(tmp_path: Path) -> None:
    shown = run(*GEAR, "report", "--quiet", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert "is built on first use" in rows(shown.stdout)["gear"][1]
    assert list(tmp_path.iterdir()) == []
    env = {"CXX": "/nowhere/c++", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    shown = run(*GEAR, "report", **env)
    assert shown.returncode == 0, shown.stderr
    assert "no C++ compiler (/nowhere/c++): install g++" in rows(shown.stdout)["gear"][1]
    loading = run(*GEAR, "report", "--load", **env)
    assert loading.returncode == 1
    assert "or install a wheel that has the op" in rows(loading.stdout)["gear"][1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("report", "data/x must be a folder; run gear ingest"),
        ("inspct x", "gear inspct is not a command; did you mean 'inspect'?"),
        ("x", f"gear x is not a command; known are {', '.join(cli.COMMANDS)}"),
        ("report --laod", "--laod is not an argument of gear report; did you mean '--load'?"),
        ("report y", "y is not an argument of gear report; gear report --help lists them"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> int:
        raise DataError("data/x", "must be a folder", remedy="run gear ingest")

    monkeypatch.setattr("deepspeed_gear.cli.report.run", run)
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"gear: error: {text}\n")


def test_help_lists_every_command_and_imports_none(run_python: Run) -> None:
    code = (
        "import sys\nfrom deepspeed_gear.cli import main\n"
        "try:\n    main.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = [c for c in main.COMMANDS if f'deepspeed_gear.cli.{c}' in sys.modules]\n"
        "assert loaded == [], loaded"
    )
    shown = run_python("-c", code)
    assert shown.returncode == 0, shown.stderr
    assert all(re.search(rf"^ +{command}\b", shown.stdout, re.M) for command in cli.COMMANDS)


def test_the_module_is_the_command() -> None:
    shown = run("-m", "deepspeed_gear", "--version")
    assert (shown.returncode, shown.stdout) == (0, f"gear {deepspeed_gear.__version__}\n")
    without = run("-m", "deepspeed_gear")
    assert without.returncode == 2
    assert without.stderr.startswith("usage: gear ")


def test_a_reader_that_leaves_early_is_no_error(checkout: Path) -> None:
    command = (
        f"{sys.executable} -u -m deepspeed_gear.cli.main report | head -n 1; echo "
        f"${{PIPESTATUS[0]}}"
    )
    run = subprocess.run(["bash", "-c", command], cwd=checkout, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] in ("0", "141")
    assert "BrokenPipe" not in run.stderr

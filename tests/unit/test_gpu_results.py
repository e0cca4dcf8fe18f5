"""benchmarks/gpu_results.py: what a run of launch/test_gpu.sh leaves, as results and tables."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CARD = {"name": "NVIDIA X100", "driver": "1.2"}


@pytest.fixture
def module(load: Any) -> ModuleType:
    return load("gpu_results")


def result(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A result of a card."""
    facts = {"commit": "0123456789abcdef", "kernel_sources": "5" * 64, "date": "2030-01-02"}
    facts |= {"machine": {}, "versions": {}, "command": "python benchmarks/x.py"}
    return {**facts, "device": CARD, "smoke": False, "rows": rows, **more}


def row(system: str, form: str, **more: Any) -> dict[str, Any]:
    return {"case": "uniform, B = 256", "work": "add", "system": system, "form": form, **more}


PEERS = result(
    [
        {"work": "installation", "system": "rsl_rl", "left_out": "pip could not install it"},
        row("gear", "eager", us=30.0, host_waits=0),
        row("gear", "captured", us=6.54, host_waits=0),
        row("torchrl", "eager", us=1234.5, host_waits=2),
        row("torchrl", "captured", wrong="a second call adds the rows of the first again"),
        {**row("gear", ""), "work": "exactness", "exact": True, "deviation": -0.34},
        {**row("torchrl", ""), "work": "exactness", "exact": False, "deviation": 71.0},
    ],
    systems={"gear": "deepspeed_gear 1", "torchrl": "torchrl 2", "rsl_rl": None},
)
for each in PEERS["rows"][-2:]:
    del each["form"]
AGENTS = result(
    [
        {
            "algorithm": "dqn",
            "system": "gear",
            "flags": "--cudagraphs",
            "steps_per_s": 900.4,
            "steps_per_s_by_seed": {"0": 880.0, "1": 900.4, "2": 950.0},
        }
    ],
    peers={},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run leaves."""
    files = {"gpu_peers": PEERS, "gpu_lean": AGENTS}
    files["figures-of-device-tables"] = result([{"figure": "gather"}])
    files["rows-that-kernels-read-in-host-memory"] = result([{"figure": "host table"}])
    steps = [
        {"name": "good", "rc": 0, "seconds": 1.5, "tail": "one\n2 passed\n"},
        {"name": "left out", "rc": None, "skipped": "there is no ncu"},
    ]
    files["stage-A"] = {"stage": "A", "steps": steps}
    files["stage-D"] = {"stage": "D", "steps": steps[:1]}
    out = tmp_path / "out"
    out.mkdir()
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content))
    return out


def test_a_run_becomes_results(module: ModuleType, folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "results"
    to.mkdir()
    earlier = {"runs": [{"commit": "f" * 40, "steps": []}, {"commit": "0123456789abcdef"}]}
    (to / "gpu_stages.json").write_text(json.dumps(earlier))
    module.write(module.collected(folder), to)
    figures = json.loads((to / "gpu.json").read_text())
    assert [each["figure"] for each in figures["rows"]] == ["gather", "host table"]
    stages = json.loads((to / "gpu_stages.json").read_text())
    assert [run["commit"] for run in stages["runs"]] == ["f" * 40, "0123456789abcdef"]
    run = stages["runs"][-1]
    assert (run["command"], run["kernel_sources"]) == ("bash launch/test_gpu.sh A D", "5" * 64)
    assert [step["last_line"] for step in run["steps"]] == [
        "2 passed",
        "there is no ncu",
        "2 passed",
    ]
    assert stages["device"] == CARD


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"smoke": True}, "is of a run without a GPU"),
        ({"device": {"name": "cpu"}}, "is of a run without a GPU"),
        ({"kernel_sources": "6" * 64}, "must be of one kernel_sources"),
    ],
)
def test_results_that_mean_nothing_are_refused(
    module: ModuleType, folder: Path, change: dict[str, Any], rule: str
) -> None:
    path = folder / "figures-of-device-tables.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(module.ResultsError, match=rule):
        module.collected(folder)


def test_a_folder_without_results_is_refused(checkout: Path, tmp_path: Path) -> None:
    script = str(checkout / "benchmarks" / "gpu_results.py")
    command = [sys.executable, script, str(tmp_path), "--to", str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run launch/test_gpu.sh with --out" in done.stderr
    assert not (tmp_path / "to").exists()


def test_tables_name_the_card_and_what_is_wrong(
    module: ModuleType, folder: Path, tmp_path: Path
) -> None:
    module.write(module.collected(folder), tmp_path)
    pages = module.gpu_pages
    table = pages.peers_table(tmp_path)
    assert "| us | deepspeed_gear | TorchRL | rsl_rl |" in table
    assert "| uniform, B = 256: add | 6.5 | 1,234 eager, waits | - |" in table
    assert "draws fit the masses | yes (-0.3) | **no** (+71.0) | - |" in table
    assert "- TorchRL, add, captured: a second call adds the rows of the first again" in table
    assert "- rsl_rl: pip could not install it" in table
    agents = pages.agents_table(tmp_path)
    assert "| dqn `--cudagraphs` | 900 (880 to 950) |" in agents
    for text in (table, agents):
        assert "One NVIDIA X100 (driver 1.2), commit 01234567" in text
        ran = pages.runs(tmp_path)
        assert pages.CHANGED in pages.marked(text, ran, "6" * 64)
        assert pages.CHANGED not in pages.marked(text, ran, "5" * 64)

"""The comparison of training from several nodes: a rank of this project, and the tables."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_support import free_port


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> list[str]:
    found = [str(checkout / "benchmarks"), str(checkout / "examples"), str(checkout)]
    for path in found:
        monkeypatch.syspath_prepend(path)
    return found


@pytest.fixture
def table(paths: list[str]) -> ModuleType:
    return importlib.import_module("training.table")


def test_a_rank_trains_and_collects(paths: list[str], tmp_path: Path) -> None:
    importlib.import_module("training.gear").write(tmp_path / "set", 8)
    mode = "a part on each node"
    orders = [
        {"do": "open", "mode": mode, "batch": 4},
        {"do": "turn", "mode": mode, "point": "data", "steps": 2, "fresh": True},
        {"do": "turn", "mode": mode, "point": "collection", "steps": 2, "fresh": True},
        {"do": "close", "mode": mode},
        {"do": "close", "mode": mode},
    ]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    rank["PYTHONPATH"] = os.pathsep.join(paths)
    environment = {**os.environ, **rank, "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "training.rank", "gear", str(tmp_path / "set"), "8"],
        input="".join(json.dumps(order) + "\n" for order in orders),
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    opened, trained, collected, closed, again = map(json.loads, done.stdout.splitlines())
    assert opened["others"] == 0, done.stderr
    assert trained["loss"] > 0
    assert collected["loss"] is None
    assert closed == {}
    assert again == {"left out": f"KeyError: '{mode}'"}


def rows(
    nodes: int, point: str, rates: dict[tuple[str, str], float], **more: Any
) -> list[dict[str, Any]]:
    common = {"point": point, "nodes": nodes, "B": 32, "others": 0.5, "cpu_s_per_gb": 1.0, **more}
    return [
        {**common, "system": system, "mode": mode, "fresh": True, "version": "1", "mb_per_s": rate}
        for (system, mode), rate in rates.items()
    ]


def test_the_tables_compare_with_the_best_way_of_reverb(table: ModuleType) -> None:
    two = {("gear", "a part"): 50.0, ("reverb", "one"): 10.0, ("reverb", "own"): 20.0}
    found = rows(1, "data", {("gear", "a part"): 400.0, ("reverb", "one"): 100.0})
    found.append({**found[0], "fresh": False, "mb_per_s": 900.0})
    found += rows(1, "compute", {("gear", "a part"): 4.0, ("reverb", "one"): 5.0})
    found += rows(1, "collection", {("gear", "a part"): 4000.0, ("reverb", "one"): 2000.0})
    found.append(
        {"point": "collection", "nodes": 1, "B": 32, "system": "limit", "mb_per_s": 5000.0}
    )
    found.append({"point": "network", "nodes": 2, "mb_per_s": 700.0})
    found += rows(2, "data", two) + rows(2, "compute", two)
    content = {
        "rows": found,
        "machine": {"cpu": "a CPU", "cores": 2},
        "commit": "c",
        "command": "x",
        "rate": "1gbit",
    }
    text = table.tables(content)
    assert "| deepspeed_gear: a part | 400 (4.0 x) | 50 (2.5 x) |" in text
    assert "| the model alone, on one batch | 900 (9.0 x) | - |" in text
    assert "| deepspeed_gear: a part | 4.0 (0.80 x) | 50.0 (2.50 x) |" in text
    assert "| 32 | 5,000 | 4,000 | 2,000 | 0.80 | 2.0 |" in text
    assert "| training, nodes: 1, a part | 3 x | 4.0 x | yes |" in text
    assert "| training, nodes: 2, a part | 6 x | 2.5 x | no |" in text

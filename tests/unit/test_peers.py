"""The comparison of speed: what is timed is checked, and this project's part runs."""

import importlib
import json
import os
import re
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest


@pytest.fixture
def work(load: Any) -> ModuleType:
    return load("speed.work")


def test_this_project_is_timed(run_python: Any, checkout: Path) -> None:
    command = [
        str(checkout / "benchmarks" / "speed" / "run.py"),
        "--quick",
        "--only",
        "windows of 20",
    ]
    environment = {"PYTHONPATH": os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])}
    done = run_python(*command, "gear", "limit", "numpy_ring", env=environment)
    rows = [
        json.loads(line[7:]) for line in done.stderr.splitlines() if line.startswith("peers: {")
    ]
    tight = "windows of 20, B = 128"
    kinds = {tight, f"{tight}, a model between"}
    systems = ("gear", "limit", "numpy_ring")
    assert {(row["work"], row["system"]) for row in rows} == {*product(kinds, systems)}, done.stderr
    assert all(row["us"] > 0 for row in rows)
    printed = done.stdout.splitlines()
    assert any(re.fullmatch(rf"{tight}( +[\d,]+){{3}}", line) for line in printed), done.stdout
    assert max(map(len, printed)) <= 100


def test_trainers_of_this_project_share_one_distribution(run_python: Any, checkout: Path) -> None:
    command = [
        str(checkout / "benchmarks" / "speed" / "run.py"),
        "--quick",
        "--only",
        "trainers on",
        "gear",
    ]
    environment = {"PYTHONPATH": os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])}
    done = run_python(*command, env=environment)
    rows = [
        json.loads(line[7:]) for line in done.stderr.splitlines() if line.startswith("peers: {")
    ]
    assert [row.get("trainers") for row in rows] == [2, 4], done.stderr
    for row in rows:
        assert row["exact"]
        assert row["seen"] > 0.9


def test_calls_have_the_types_of_gymnasium(work: ModuleType) -> None:
    env = importlib.import_module("gymnasium").make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    mine = next(work.calls())
    next_obs, *results = env.step(mine.action)
    theirs = (obs, next_obs, int(env.action_space.sample()), *results[:3])
    assert [type(value) for value in mine] == [type(value) for value in theirs]
    assert (mine.obs.shape, mine.obs.dtype) == (obs.shape, obs.dtype)


@pytest.mark.parametrize("system", ["gear", "numpy_ring"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("calls", {"capacity": 2000}),
        ("leases", {"as_lists": False}),
        ("leases", {"as_lists": True}),
    ],
)
def test_calls_as_users_make_them_are_right(
    work: ModuleType, system: str, kind: str, options: dict[str, Any]
) -> None:
    """Building the job compares what is stored with what was added."""
    child = importlib.import_module("speed.child")
    offered = importlib.import_module("peers.interface").load(system)
    job = child.KINDS[kind].make(offered, options)
    ran: list[int] = []
    job.model = lambda: ran.append(1)
    assert child.block(job, 0.0, between=False)["us"] > 0
    assert not ran
    answer = child.block(job, 0.0, between=True)
    assert len(ran) == answer["steps"]
    job.close()


@pytest.mark.parametrize("system", ["gear", "numpy_ring"])
def test_returns_and_goals_are_right(work: ModuleType, system: str) -> None:
    child, derived = (importlib.import_module(f"speed.{name}") for name in ("child", "derived"))
    offered = importlib.import_module("peers.interface").load(system)
    checks = {"n_step": derived.check_returns, "hindsight": derived.check_goals}
    for kind, check in checks.items():
        made = child.Derived(kind, check, offered, {"count": 10_000, "batch": 256})
        assert made.notes.get("wrong_ends", 0) == 0
        rows = made.made.rows(made.made.sample())
        changed = "discount" if kind == "n_step" else "goal"
        with pytest.raises(AssertionError, match=r"wrong returns|of other episodes"):
            check({**rows, changed: np.roll(rows[changed], 1, 0) + 1}, 256, 10_000)
        made.close()


def test_files_are_read_with_less_memory_than_data(run_python: Any, checkout: Path) -> None:
    command = [str(checkout / "benchmarks" / "speed" / "run.py"), "--quick", "--only", "from disk"]
    environment = {"PYTHONPATH": os.pathsep.join([str(checkout / "benchmarks"), str(checkout)])}
    done = run_python(*command, "gear", "limit", env=environment)
    rows = [
        json.loads(line[len("peers: ") :]) for line in done.stderr.splitlines() if "peers: " in line
    ]
    assert [row["work"].partition(":")[0][:9] for row in rows].count("from disk") == len(rows) - 2
    for row in rows:
        if "left out" in row:  # no root, or no controller
            known = ("no control group", "not installed: apt-get install fio")
            assert row["left out"].startswith(known), row
        elif row["system"] == "fio":
            assert row["pages_s"] > 0
            assert row["queue_depth"] == 32
    assert all(row["read_mb"] > 0.01 for row in rows if "batches_s" in row)


def test_pages_are_compared_with_those_that_fio_reads(
    work: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_rate = importlib.import_module("speed.disk_rate")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows").write_bytes(os.urandom(1 << 20))
    core = min(os.sched_getaffinity(0))
    read = {"work": "disk", "system": "gear", "batches_s": 100.0, "read_mb": 0.8192}
    killed = {"work": "disk", "system": "limit", "left out": "killed"}
    disk = disk_rate.DiskRate(tmp_path / "set", 8, core, tmp_path)
    disk.run(2, 0.2)
    *others, fio = disk.rows("disk", [read, killed])
    assert others[1] == killed
    if "left out" in fio:
        pytest.skip(fio["left out"])
    assert fio["queue_depth"] == 8
    assert fio["pages_s"] > 0
    assert (tmp_path / "cgroup.procs").read_text() == "0\n"  # it has joined its group
    assert others[0]["pages_s"] == 20_000
    assert others[0]["of_fio"] == pytest.approx(20_000 / fio["pages_s"], rel=0.01, abs=0.001)
    monkeypatch.setenv("PATH", str(tmp_path))
    disk = disk_rate.DiskRate(tmp_path / "set", 8, core, tmp_path)
    disk.run(2, 0.2)
    (absent,) = disk.rows("disk", [])
    assert absent["left out"] == "not installed: apt-get install fio"


def test_a_refusal_of_fio_is_its_row(
    work: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_rate = importlib.import_module("speed.disk_rate")
    (tmp_path / "rows").write_bytes(b"1")
    (tmp_path / "fio").write_text("#!/bin/sh\necho engine $5 is unknown >&2; exit 1\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    disk = disk_rate.DiskRate(tmp_path, 8, min(os.sched_getaffinity(0)), tmp_path)
    disk.run(1, 0.1)
    assert disk.rows("disk", [])[0]["left out"].startswith("fio: engine ")


def test_rows_of_other_steps_are_found(work: ModuleType) -> None:
    rows = {name: values[100:356] for name, values in work.steps(0, 1000).items()}
    work.check(rows, 256, 1, 1000)
    with pytest.raises(AssertionError, match="action of other steps"):
        work.check({**rows, "action": np.roll(rows["action"], 1, 0)}, 256, 1, 1000)
    with pytest.raises(AssertionError, match="never added"):
        work.check(rows, 256, 1, 200)
    windows = {name: values[:100].reshape(5, 20, -1) for name, values in rows.items()}
    work.check(windows, 5, 20, 1000)
    windows["reward"][2, 3] = 7
    with pytest.raises(AssertionError, match="do not follow"):
        work.check(windows, 5, 20, 1000)


def test_tables_have_a_column_for_each_system_that_was_timed(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = importlib.import_module("speed.table")
    rows = [
        {"work": "windows", "system": "gear", "us": 5.0},
        {"work": "windows", "system": "torchrl", "us": 1234.5},
        {"work": "windows", "system": "cpprb", "left out": "not offered"},
        {
            "work": "disk",
            "system": "gear",
            "us": 4e5,
            "batches_s": 2.5,
            "read_mb": 1234.5,
            "read_ahead": "1 B",
            "pages_s": 753479,
            "of_fio": 0.9,
        },
        {
            "work": "disk",
            "system": "fio",
            "pages_s": 837199,
            "queue_depth": 128,
            "engine": "psync",
        },
        {"work": "windows", "system": "reverb", "left out": "took over 240 s"},
    ]
    systems = {"gear": "1", "torchrl": "2", "cpprb": "3", "reverb": "4"}
    machine = {"cpu": "a CPU", "cores": 2}
    text = table.tables(
        {"rows": rows, "machine": machine, "commit": "c", "command": "x", "systems": systems}
    )
    assert "|  | deepspeed_gear | TorchRL |" in text
    assert "| windows | 5 | 1,234 |" in text
    assert "(the device reads 1 B ahead)" in text
    assert "| disk | 2.5, 1,234.5 |" in text
    assert "fio with 128 requests at a time (psync) 837,199, deepspeed_gear 753,479 (0.90)" in text
    assert "- Reverb, windows: took over 240 s" in text


def test_tables_fit_into_a_terminal(work: ModuleType, checkout: Path) -> None:
    terminal, table = (
        importlib.import_module(name) for name in ("support.terminal", "speed.table")
    )
    content = json.loads((checkout / "benchmarks" / "results" / "peers.json").read_text())
    lines = terminal.fitted(table.tables(content)).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line.startswith("|") for line in lines)
    # Every number of the page is there, beside the name of its row.
    shown = re.findall(r"[\d,.]+", " ".join(lines))
    for row in content["rows"]:
        if "us" in row and "parts_ms" not in row and "batches_s" not in row:
            assert f"{row['us']:,.0f}" in shown, row
    text = (
        "|  | one-two | b of c | d |\n|---|---|---|---|\n"
        "| a name that is longer than a line | 1 | 1,234,567 | - |\n| other | - | - | 5 |\n"
    )
    assert terminal.fitted(text, 46).splitlines() == [
        "                               one-",
        "                                two     b of c",
        "----------------------------------------------",
        "a name that is longer than a      1  1,234,567",
        "line",
        "",
        "                                   d",
        "------------------------------------",
        "other                              5",
    ]


def test_the_page_its_summary_and_the_figures_are_those_of_the_results(
    work: ModuleType, checkout: Path
) -> None:
    """`python -m speed.table` writes them anew."""
    table, figures, summary = (
        importlib.import_module(f"speed.{x}") for x in ("table", "figures", "summary")
    )
    content = json.loads((checkout / "benchmarks" / "results" / "peers.json").read_text())
    assert (
        table.BEGIN + table.tables(content) + table.END
        in (checkout / "docs" / "comparison.md").read_text()
    )
    page = (checkout / "docs" / "comparison.md").read_text()
    assert summary.BEGIN + summary.committed() + summary.END in page
    for name, svg in figures.figures(content["rows"], table.NAMES):
        assert (checkout / "docs" / "figures" / name).read_text() == svg


def test_figures_leave_out_what_was_not_timed(work: ModuleType) -> None:
    figures = importlib.import_module("speed.figures")
    rows = [
        {"work": "windows, B = 128", "system": "limit", "us": 10.0},
        {"work": "windows, B = 128", "system": "gear", "us": 20.0},
        {"work": "windows, B = 128", "system": "cpprb", "left out": "not offered"},
        {"work": "a step of 1 environment", "system": "gear", "us": 2.0},
        {"work": "a step of 64 environments", "system": "gear", "us": 20.0},
    ]
    for name, svg in figures.figures(
        rows, {"gear": "deepspeed_gear", "limit": "C loop", "cpprb": "cpprb"}
    ):
        ElementTree.fromstring(svg)
        assert "cpprb" not in svg
        # The summary leaves out a kind of work that no other system does.
        assert ("deepspeed_gear" in svg) == (name != "peers_fastest.svg")


@pytest.mark.parametrize("name", ["gear", "numpy_ring"])
def test_rollouts_of_this_project_are_right(work: ModuleType, name: str) -> None:
    """Building the job compares two steps with the data."""
    rollouts = importlib.import_module("speed.rollouts")
    offered = importlib.import_module("peers.interface").load(name)
    job = rollouts.RolloutJob(offered, {"groups": 8, "step": 2})
    answer = job.block(0)
    job.close()
    assert list(answer["parts"]) == list(rollouts.PARTS)
    assert answer["us"] > 0


def test_rollouts_of_other_tokens_are_found(work: ModuleType) -> None:
    rollouts = importlib.import_module("speed.rollouts")
    data = rollouts.Data(2)
    step = [_micro(rollouts, data, responses) for responses in (range(8), range(8, 16))]
    data.check(step, 2)
    wrong = {
        "not whole": [_micro(rollouts, data, responses) for responses in (range(7), range(8, 16))],
        "come twice": [step[0], step[1]._replace(tokens=np.append(step[1].tokens, 5))],
        "rewards of others": [step[0]._replace(reward=step[0].reward[::-1]), step[1]],
        "loss mask of other": [step[0]._replace(loss_mask=~step[0].loss_mask), step[1]],
        "values are lost": [step[0]._replace(of=step[0].of[:-1]), step[1]],
        "filled values of other": [
            step[0]._replace(ref_logp=np.roll(step[0].ref_logp, 1)),
            step[1],
        ],
    }
    for text, found in wrong.items():
        with pytest.raises(AssertionError, match=text):
            data.check(found, 2)


def _micro(rollouts: ModuleType, data: Any, responses: range) -> Any:
    """Return the micro batch of some responses."""
    rows = [data.groups[at // 8][at % 8] for at in responses]
    columns = {
        name: np.concatenate([row[name] for row in rows])
        for name in ("tokens", "loss_mask", "logp")
    }
    rewards = np.array([row["reward"] for row in rows])
    of = columns["tokens"].astype(np.int64)
    first = data.begins[responses.start : responses.stop]
    return rollouts.Micro(
        of, first, rewards, of, columns["loss_mask"], columns["logp"], 2 * columns["logp"]
    )

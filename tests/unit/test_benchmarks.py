"""The benchmarks: each runs with tiny sizes, and what they compare really is comparable."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import ROOT
from process_support import environment
from warm_python import run_warm

LONG = pytest.mark.skipif(
    os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1"
)
Load = Callable[[str], ModuleType]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as its user does, in a process that has imported torch."""
    return run_warm(
        str(ROOT / "benchmarks" / f"{script}.py"), *arguments, env=environment(), cwd=ROOT
    )


def rows_of(path: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows of a quick run of a benchmark."""
    result = run(script, "--quick", "--json", str(path), *arguments)
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert {"commit", "date", "command", "machine", "versions", "disturbance", "rows"} <= set(
        document
    )
    return list(document["rows"])


INGEST = ("inference", "add", "reader") if os.environ.get("GEAR_LONG_TESTS") else ("add",)
#: By script: its options, what its rows must be among others, and which numbers must be above 0.
RUNS: dict[str, tuple[Sequence[str], dict[str, set[Any]], Sequence[str]]] = {
    "gather": (
        ["--ranks", "2"],
        {
            "what": {"op", "sample", "index_select", "two_ranks"},
            "window": {"whole", "100", "20", "frames"},
        },
        ["ms", "limit_ms", "ratio"],
    ),
    "selection": (
        ["--ranks", "2"],
        {
            "what": {"batch", "memory", "ranks"},
            "sampler": {"prioritized", "uniform"},
            "B": {256, 4096},
        },
        ["ms", "limit_ms", "ratio", "batches_per_s"],
    ),
    "packing_turns": ([], {"what": {"turns"}, "turns": {5}}, ["own", "share", "saved"]),
    "scale": ([], {"nodes": {1, 2, 4}, "samples": {8, 16, 32}}, []),
    "ingest": (["--parts", *INGEST], {"what": set(INGEST)}, ["adds_per_s", "mb_per_s"]),
    "disk_writing": (
        [],
        {
            "work": {"steps", "frames"},
            "system": {"DatasetWriter", "gear ingest", "raw write", "NumPy memmap"},
        },
        ["mb_per_s", "of_raw"],
    ),
    "fixed_cost": (
        [],
        {
            "part": {"the native call: the selection and the gather", "Batch"},
            "call": {"sample() of B = 1, 5 columns, uniform"},
        },
        ["warm_us", "cold_us", "us"],
    ),
    "dqn": ([], {"system": {"numpy ring", "gear, TransitionBuffer"}}, ["seconds", "add_us"]),
    "leases": ([], {"size": {1, 8}}, ["pairs_per_s"]),
    "adding": ([], {"system": {"numpy ring", "gear", "gear, published"}}, ["step_us"]),
}


@pytest.mark.parametrize("script", RUNS)
def test_a_benchmark_runs(script: str, tmp_path: Path) -> None:
    options, kinds, positive = RUNS[script]
    rows = rows_of(tmp_path / "rows.json", script, *options)
    for key, wanted in kinds.items():
        assert wanted <= {row.get(key) for row in rows}
    for name in positive:
        numbers = [row[name] for row in rows if row.get(name) is not None]
        assert numbers
        assert min(numbers) > 0


def test_starvation_runs(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "starvation.json", "starvation")
    assert len(rows) == 4
    assert all(row["holds"] and row["starved"] == 0 for row in rows)


PEER = """
import sys
from gymnasium import make
from gymnasium.vector import SyncVectorEnv

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
envs = SyncVectorEnv([lambda: make(options["--env-id"])] * int(options["--num-envs"]))
envs.reset(seed=0)
for _ in range(int(options["--total-timesteps"]) // envs.num_envs):
    envs.step(envs.action_space.sample())
"""


def test_lean_runs(tmp_path: Path) -> None:
    """With a program in the place of a peer's that only acts."""
    pytest.importorskip("gymnasium", reason="the examples act in its environments")
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl" / "ppo.py").write_text(PEER)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "peer"]):
        subprocess.run([*git, *command], check=True)
    options = ("--algorithms", "ppo", "--cleanrl", str(tmp_path))
    gear, peer = rows_of(tmp_path / "lean.json", "lean", *options)
    assert (gear["system"], peer["system"]) == ("gear", "CleanRL")
    assert min(gear["steps_per_cpu_s"], peer["steps_per_cpu_s"]) > 0
    versions = json.loads((tmp_path / "lean.json").read_text())["peers"]
    assert versions["torch"] == torch.__version__
    assert len(versions["CleanRL"]) == 40
    assert gear["steps_per_s_by_seed"].keys() == {"0"}  # of --quick, which takes the first seed
    document = json.loads((tmp_path / "lean.json").read_text())
    assert document["device"]["name"]
    assert len(document["kernel_sources"]) == 64
    result = run("lean", "--lean", str(tmp_path))
    assert result.returncode == 2
    assert "must be a checkout of LeanRL" in result.stderr


@pytest.mark.parametrize("sampler", ["prioritized", "uniform"])
def test_the_limit_of_selection_does_what_it_is_a_limit_of(load: Load, sampler: str) -> None:
    selection = load("selection")
    limits = load("support.limit")
    content = load("support.workloads").workload("W2", 0.01)
    gear = selection.Gear(content, sampler, 64)
    limit = selection.limit_of(gear, content, 64)
    table = gear.replay.tables["main"]
    masses = None if limit.sums is None else limit.sums[:10_000].copy()
    for turn in range(3):
        limit.run(1)
        out = limit.kept[1][0]
        for column, rows in zip(content.schema, out, strict=True):
            assert torch.equal(rows, table.tensor(column.name)[torch.from_numpy(limit.items)])
        if masses is not None:
            masses[limit.items] = limit.new_masses[0]
            assert np.array_equal(limit.sums[:10_000], masses), turn
            assert limit.sums[-32:].sum() == masses.sum()
    gear.made.close()
    heavy = np.ones(40, np.int64)
    heavy[33] = 1 << 40
    drawn = limits.SelectLimit(
        [torch.zeros(40, 1)], [[torch.zeros(8, 1)]], heavy, heavy[None, 32:], 40
    )
    drawn.run(1)
    assert (drawn.items == 33).all()


GPU_FIGURES = {
    *(
        "gather",
        "draw",
        "update",
        "sample and update",
        "add",
        "add, sample and update",
        "add_steps",
    ),
    *("add_steps, sample and update", "n-step returns", "returns-to-go", "host table"),
    "training step beside",
}


def test_gpu_runs_without_a_gpu(tmp_path: Path) -> None:
    """All of its code but what needs CUDA: events, graphs, streams, the registration."""
    rows = rows_of(tmp_path / "gpu.json", "gpu", "--device", "cpu")
    assert {row["figure"] for row in rows} == {"kernels", *GPU_FIGURES}
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["device"]["name"] == "cpu"
    assert document["smoke"]
    for row in rows:
        assert row["us"] > 0
        assert row.get("rows_right", True), row
        assert (row["asked"] is None) == (row["holds"] is None)
    assert {row["figure"] for row in rows if row["asked"] is not None} == GPU_FIGURES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_says_that_there_is_none() -> None:
    result = run("gpu")
    assert result.returncode == 2
    assert "sees no CUDA device" in result.stderr


def test_a_figure_that_fails_is_a_row(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = load("gpu")
    clock = load("gpu_clock")

    def fails() -> Iterator[Any]:
        yield clock.ask(clock.row_of("gather", "B=1", "gear", 2.0), "us", at_most=1.0)
        raise RuntimeError("no memory")

    good, bad = gpu.measured("gather", fails)
    assert (good["asked"], good["judged"], good["holds"]) == ("us <= 1.0", 2.0, False)
    assert bad == {"figure": "gather", "error": "RuntimeError: no memory"}
    gpu.show([good, bad])
    assert "no memory" in capsys.readouterr().out


@LONG
def test_memory_runs(tmp_path: Path) -> None:
    (ranks,) = rows_of(tmp_path / "memory.json", "memory")
    assert ranks["holds"]
    assert ranks["shared_bytes_1"] > 0


@pytest.mark.parametrize(("name", "window"), [("W1", "whole"), ("W1", "20"), ("W3", "frames")])
def test_everything_that_is_timed_copies_the_same_rows(load: Load, name: str, window: str) -> None:
    workloads = load("support.workloads")
    subjects = load("support.subject")
    subject = subjects.Subject(workloads.workload(name, 0.005), window, 16)
    found = []
    for kind in ("limit", "op", "index_select"):
        outs = subject.ring[0].outs
        for out in outs:
            out.zero_()
        subject.random = np.random.default_rng(5)
        cpu, wall = getattr(subject, kind)(1)
        assert cpu.shape == wall.shape == (1,)
        found.append([out.clone() for out in outs])
    subject.close()
    assert any(out.any() for out in found[0])
    for kind in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], kind, strict=True))


def test_a_number_is_judged_by_its_own_bound(load: Load) -> None:
    rows = load("support.turns").against_limit(
        {"B": 128}, "what", {"limit": np.array([1.0, 2.0]), "op": np.array([2.0, 6.0])}
    )
    assert (rows["op"]["ratio"], rows["op"]["holds"]) == (2.5, None)
    assert load("support.report").judge(rows["op"], 2.5, 2.2, 2.5 <= 2.2)["holds"] is False


def test_a_starved_item_is_seen(load: Load) -> None:
    """So are biased counts, and those that are too even for random draws."""
    starvation = load("starvation")
    counts = np.random.default_rng(0).poisson(24, 1 << 16)
    assert starvation.judge("fair", counts, 0.0)["holds"]
    counts[:40] = 0
    starved = starvation.judge("starved", counts, 0.0)
    assert starved["starved"] == 40
    assert not starved["holds"]
    biased = np.random.default_rng(0).poisson(np.where(np.arange(1 << 16) % 2, 23, 25))
    assert not starvation.judge("biased", biased, 0.0)["holds"]
    assert not starvation.judge("even", np.full(1 << 16, 24), 0.0)["holds"]
    assert starvation.rarest(10, 1.0) == 0  # 10 / e items without a draw
    assert starvation.rarest(1, 24.0) in (23, 24)  # the median
    assert 1 <= starvation.rarest(1 << 25, 24.0) <= 4


def test_a_difference_of_batches_is_seen(load: Load) -> None:
    determinism = load("determinism")
    wanted = determinism.Case("uniform step", 0)
    same = determinism.Case("uniform step", 0, 2)
    other = determinism.Case("uniform step", 0, 4, 2, 3)
    digests = {wanted: ["a", "b"], same: ["a", "b"], other: ["a", "c"]}
    more = {("uniform step", "resumed"): ["a", "b"], ("length", "resumed"): ["x"]}
    rows = determinism.compare(list(digests), digests, more)
    names = (wanted.variant, same.variant, other.variant, "resumed")
    assert [(row["variant"], row["equal"]) for row in rows] == [
        *zip(names, (True, True, False, True), strict=True)
    ]


@pytest.mark.parametrize(
    ("is_compiled", "only_captured", "is_cuda", "flags"),
    [
        (False, False, False, [()]),
        (True, False, False, [(), ("--compile",)]),
        (False, True, True, [("--cudagraphs",)]),
        (True, True, True, [("--cudagraphs",), ("--compile", "--cudagraphs")]),
        (False, False, True, [(), ("--cudagraphs",), ("--compile", "--cudagraphs")]),
    ],
)
def test_the_flags_of_captured_programs(
    load: Load,
    is_compiled: bool,
    only_captured: bool,
    is_cuda: bool,
    flags: list[tuple[str, ...]],
) -> None:
    assert load("lean").flags_of(is_compiled, only_captured, is_cuda) == flags


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_captured_programs_need_a_gpu() -> None:
    result = run("lean", "--cudagraphs")
    assert result.returncode == 2
    assert "needs a CUDA device" in result.stderr

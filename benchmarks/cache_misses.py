"""Instructions and cache misses of single calls, in a tight loop and with a model between them.

    python benchmarks/cache_misses.py [--calls N] [--only uniform|prioritized|commit]

A call is `sample()` of 256 transitions (uniform or prioritized) or `lease.commit` of 8 responses of
500 tokens. Callgrind (of valgrind, which must be installed) runs each in a process of its own and
simulates a first and a second level of cache; the model between the calls is a forward pass, whose
own instructions and misses are counted alone and subtracted. The native op is built once for AVX2,
since valgrind knows no AVX-512, in a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from support.report import Row, print_rows
from support.workloads import workload

import deepspeed_gear.sampling.batch_stream as batch_stream
from deepspeed_gear import Column, DatasetWriter, Replay, Schema

ROOT = Path(__file__).resolve().parents[1]
CALLS = ("uniform", "prioritized", "commit")
SECOND_LEVEL = "1048576,8,64"  # bytes, ways, bytes of a line
# Phases: whether the call is made, and whether the model runs. Each follows a shorter one that
# warms the caches up.
PHASES = {"call": (True, False), "call and model": (True, True), "model": (False, True)}
# callgrind's events: reads, writes and misses (m) of code (I) and data (D), at levels 1 and last.
EVENTS = ("Ir", "Dr", "Dw", "I1mr", "D1mr", "D1mw", "ILmr", "DLmr", "DLmw")
# A compiler that makes the native op for AVX2.
_COMPILER = '#!/usr/bin/env bash\nexec g++ "${@/-march=native/-march=x86-64-v3}"\n'


# ---- the counted process -------------------------------------------------------------------------


def control(*words: str) -> None:
    """Give callgrind an order for this process."""
    command = ["callgrind_control", *words, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_phases(call: Callable[[], object], count: int) -> None:
    """Make the calls of every phase, each with a dump of what callgrind has counted in it."""
    hidden = torch.nn.Linear(256, 1024)
    model = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    inputs = torch.zeros(32, 256)

    def repeat(times: int, calls: bool, runs_model: bool) -> None:
        for _ in range(times):
            if calls:
                call()
            if runs_model:
                with torch.no_grad():
                    model(inputs)

    control("-i", "on")
    for name, (calls, runs_model) in PHASES.items():
        repeat(count // 2, calls, runs_model)
        control("-d", "warm up")
        repeat(count, calls, runs_model)
        control("-d", name)


def count_samples(kind: str, count: int) -> None:
    """Count `sample()` of 256 transitions of five columns, in a table of a few MB."""
    content = workload("W2", 0.02)
    with content.filled(content.steps_section(256, {"kind": kind})) as replay:
        run_phases(replay.sample, count)


def count_commits(count: int) -> None:
    """Count `lease.commit` of 8 responses of 400 tokens to a prompt of 100."""
    num_groups = 4 * count
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "logp": {"dtype": "float32"},
        "reward": {"dtype": "float32", "rows": "1"},
        "group": {"dtype": "int64", "rows": "1"},
    }
    with tempfile.TemporaryDirectory() as folder:
        with DatasetWriter(f"{folder}/prompts", Schema([Column("tokens", "int32")])) as writer:
            for number in range(num_groups):
                writer.add({"tokens": np.full(100, number, np.int32)})
        table = {
            "capacity_trajectories": 32 * num_groups,  # four rollout batches
            "capacity_steps": 32 * num_groups * 500,
            "max_length": 500,
            "remove": "fifo",
            "max_times_sampled": 1,
            "group": {"column": "group", "size": 8},
            "prompts": {"data": f"{folder}/prompts"},
            "schema": {"columns": columns},
        }
        section = {
            "tables": {"rollouts": table},
            "sampler": {"kind": "fifo", "unit": "group"},
            "pack": {"tokens": 16384},
            "rollout": {"groups": num_groups},
        }
        with Replay(section) as replay:
            leases = iter(replay.rollout_worker().lease(num_groups, timeout_s=0))

            def commit() -> None:
                lease = next(leases)
                tokens = np.concatenate([lease.prompt["tokens"], np.zeros(400, np.int32)])
                response = {
                    "tokens": tokens,
                    "loss_mask": np.arange(500) >= 100,
                    "logp": np.zeros(500, np.float32),
                    "reward": np.float32(0),
                }
                lease.commit([response] * 8)

            run_phases(commit, count)


def count_here(call: str, count: int) -> None:
    """Run the phases of a call in this process, which callgrind runs."""
    torch.set_num_threads(1)
    # Once a second a call also looks for writers that have died: here every call would.
    batch_stream._CLEAN_S = 1e9
    if call == "commit":
        count_commits(count)
    else:
        count_samples(call, count)


# ---- the program ---------------------------------------------------------------------------------


def counted(call: str, count: int, folder: Path) -> dict[str, dict[str, int]]:
    """Run a call under callgrind; return the events of each phase."""
    compiler = folder / "c++"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    out = folder / call
    env = {
        **os.environ,
        "CXX": str(compiler),
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "valgrind"),
        "OMP_NUM_THREADS": "1",
    }
    callgrind = ["valgrind", "--tool=callgrind", "--cache-sim=yes", "--instr-atstart=no"]
    callgrind += [f"--LL={SECOND_LEVEL}", f"--callgrind-out-file={out}"]
    program = [sys.executable, __file__, "--only", call, "--calls", str(count), "--here"]
    subprocess.run([*callgrind, *program], env=env, check=True, cwd=folder)
    events = {}
    for dump in sorted(folder.glob(f"{call}.*")):
        text = dump.read_text()
        name = re.search(r"^desc: Trigger: dump (.*)$", text, re.M)
        sums = re.search(r"^summary: (.*)$", text, re.M)
        if name and sums and name[1] in PHASES:
            events[name[1]] = dict(zip(EVENTS, map(int, sums[1].split()), strict=True))
    return events


def rows_of(call: str, events: dict[str, dict[str, int]], count: int) -> list[Row]:
    """Return a row for a call in a tight loop, and one for a call with a model between."""
    tight = events["call"]
    between = {
        name: value - events["model"][name] for name, value in events["call and model"].items()
    }
    return [
        {
            "call": f"{call}, {how}",
            "instructions": found["Ir"] / count,
            "first level: code": found["I1mr"] / count,
            "data": (found["D1mr"] + found["D1mw"]) / count,
            "second level: code": found["ILmr"] / count,
            "data ": (found["DLmr"] + found["DLmw"]) / count,
        }
        for how, found in (("tight loop", tight), ("a model between", between))
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="cache misses of single calls")
    parser.add_argument("--only", choices=CALLS, help="one call; by default all")
    parser.add_argument("--calls", type=int, default=30, help="calls of a phase")
    parser.add_argument("--here", action="store_true", help="in this process, for callgrind")
    args = parser.parse_args()
    if args.here:
        count_here(args.only, args.calls)
        return
    with tempfile.TemporaryDirectory() as folder:
        for call in [args.only] if args.only else CALLS:
            print_rows(rows_of(call, counted(call, args.calls, Path(folder)), args.calls))


if __name__ == "__main__":
    main()

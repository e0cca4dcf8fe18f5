"""Tables in the memory of one GPU, side by side: this project and its peers at the same work.

    python benchmarks/gpu_peers.py --json F                     # all; exit code 2 without a GPU
    python benchmarks/gpu_peers.py --systems gear torchrl
    python benchmarks/gpu_peers.py --device cpu --smoke         # tiny; the numbers mean nothing

Add, sample and update 10^6 transitions of 105 bytes, and all three in one call; each eager,
compiled and captured in a CUDA graph as far as the system goes. Each call is checked first: a
captured call that adds or draws the same rows again is a row that says so, without a time. PPO's
roll-outs of 4,096 environments x 24 steps are added, and read in 5 epochs of 4 minibatches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import support  # puts the checkout first
import numpy as np
import torch
from support.report import Report, Row, print_rows, say
from device_peers.environments import NAMES, interpreters
from device_peers.interface import BOTH, CAPTURED, FORMS, NUM_MINIBATCHES, Case
from gpu_clock import card
from peers.orders import Child

from deepspeed_gear.ops.native_op import CudaOp

ITEMS = 1_000_000
BATCHES = (256, 4096)
KINDS = ("uniform", "prioritized", "windows", "roll-outs")
LENGTH = 20  # steps of a window
ENVS = 4096
ROLLOUT = 24  # steps of each environment
TURNS = 5
TURN_S = 0.04
LIMIT_S = 400.0  # of an order; one that compiles takes long
EXACTNESS = "exactness"
SHOWN = "case work system form us host_us host_waits graph_breaks wrong left_out exact deviation"
SMOKE = {"envs": 64, "items": 4000, "batches": (256,), "added": 16, "turns": 2, "turn_s": 0.002}


def cases(device: str, kinds: Sequence[str], is_smoke: bool) -> list[Case]:
    """Return the tables, and the batches that are drawn from them."""
    batches = SMOKE["batches"] if is_smoke else BATCHES
    sizes = {"items": SMOKE["items"], "added": SMOKE["added"]} if is_smoke else {"items": ITEMS}
    found = []
    for kind in kinds:
        if kind == "roll-outs":
            total = ROLLOUT * (SMOKE["envs"] if is_smoke else ENVS)
            shape = {"items": total, "added": total, "batch": total // NUM_MINIBATCHES}
            found.append(Case(device=device, rollout=ROLLOUT, **shape))
            continue
        options: dict[str, Any] = {"prioritized": kind == "prioritized"}
        options["length"] = LENGTH if kind == "windows" else 1
        found += [Case(device=device, batch=batch, **sizes, **options) for batch in batches]
    return found


class Systems:
    """The processes of all systems.

    Args:
        pythons: Interpreters by the system's module.
        device: "cuda", or "cpu".
        compiler: Backend of torch.compile.
    """

    def __init__(self, pythons: dict[str, Any], device: str, compiler: str) -> None:
        self._pythons = pythons
        self._device = device
        self._compiler = compiler
        self._children: dict[str, Child] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._pythons)

    def order(self, name: str, do: str, **more: Any) -> Row:
        """Have a system do something, in a new process if the last one has ended."""
        if name not in self._children or not self._children[name].is_alive:
            self._children[name] = self._started(name)
        return self._children[name].order(do, LIMIT_S, **more)

    def _started(self, name: str) -> Child:
        platform = "cuda" if self._device == "cuda" else "cpu"
        env = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if name == "gear":  # its packages may lie in folders, as launch/test_gpu.sh puts them
            paths = [str(support.ROOT / "benchmarks"), str(support.ROOT)]
            env["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        return Child("device_peers.child", name, self._pythons[name], env=env)

    def prepare(self, name: str, case: Case, form: str) -> tuple[str, dict[str, Row]]:
        """Fill a system's table, and make its calls of a form.

        A capture that fails may leave a process unable to capture: the others are made in a new
        one.

        Returns:
            A note on its rows, and the answer for each work.
        """
        answers: dict[str, Row] = {}
        while True:
            made = self.order(name, "make", case=asdict(case), compiler=self._compiler)
            if "left out" in made:
                return "", dict.fromkeys(case.works, made)
            is_spoiled = False
            for work in case.works:
                if "left out" not in answers.get(work, {}):
                    answers[work] = self.order(name, "prepare", form=form, work=work)
                    is_spoiled = is_spoiled or "left out" in answers[work]
            is_captured = self._device == "cuda" and form in (CAPTURED, BOTH)
            if not (is_spoiled and is_captured):
                return made["note"], answers
            self.end(name)

    def end(self, name: str) -> None:
        """End a system's process; the next order starts another."""
        if name in self._children:
            self._children.pop(name).end()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._children):
            self.end(name)


def measured(systems: Systems, case: Case, form: str, turns: int, turn_s: float) -> Iterator[Row]:
    """Give a row for each work and system; what is timed takes turns."""
    with ThreadPoolExecutor(len(list(systems))) as pool:
        answers = pool.map(lambda name: systems.prepare(name, case, form), systems)
        prepared = dict(zip(systems, answers, strict=True))
    for work in case.works:
        rows: dict[str, Row] = {}
        times: dict[str, list[Row]] = {}
        for name in systems:
            note, found = prepared[name]
            answer = found[work]
            rows[name] = row_of(case, work, name, form, answer, note)
            if "left out" not in answer and not answer["wrong"]:
                times[name] = []
        for _ in range(turns):
            for name, taken in times.items():
                order = {"form": form, "work": work, "block_s": turn_s}
                taken.append(systems.order(name, "turn", **order))
        for name, taken in times.items():
            rows[name] |= summary(taken)
        for row in rows.values():
            if row.get("left_out") != "not offered":
                yield row


def row_of(case: Case, work: str, name: str, form: str, answer: Row, note: str) -> Row:
    """Return a row without its time."""
    row: Row = {
        "case": case.name,
        "work": work,
        "system": name,
        "form": form,
        "B": case.batch,
        "items": case.items,
        "added": case.added,
        "note": note,
    }
    if "left out" in answer:
        return {**row, "left_out": answer["left out"]}
    return {**row, **answer}


def summary(turns: Sequence[Row]) -> Row:
    """Return the median and the quartiles of the turns of a row."""
    failed = [turn["left out"] for turn in turns if "left out" in turn]
    if failed:
        return {"left_out": failed[0]}
    low, middle, high = np.percentile([turn["us"] for turn in turns], (25, 50, 75))
    return {
        "us": float(middle),
        "quartiles": [float(low), float(high)],
        "host_us": float(np.median([turn["host_us"] for turn in turns])),
    }


def exactness(systems: Systems, case: Case) -> Iterator[Row]:
    """Compare the draws of each system with the exact share of each item."""
    for name in systems:
        made = systems.order(name, "make", case=asdict(case), compiler="eager")
        answer = made if "left out" in made else systems.order(name, "exact")
        if answer.get("left out") == "not offered":
            continue
        row = {"case": case.name, "work": EXACTNESS, "system": name, "note": made.get("note", "")}
        if "left out" in answer:
            yield {**row, "left_out": answer["left out"]}
        else:
            yield {**row, **answer}


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        also=("--smoke",),
        device=("cuda", "cuda, or cpu with --smoke"),
        systems=(tuple(NAMES), "some of them"),
        kinds=(KINDS, "of tables and batches"),
        forms=(FORMS, "how calls are run"),
        compiler=("inductor", "backend of torch.compile"),
    )
    options = report.options
    device = options.device
    is_smoke = options.quick
    if device not in ("cuda", "cpu"):
        report.parser.error(f"--device must be cuda or cpu, got {device}")
    if device == "cpu" and not is_smoke:
        report.parser.error("--device cpu needs --smoke: these are figures of a GPU")
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu_peers.py: error: torch {torch.__version__} sees no CUDA device; "
            "--device cpu --smoke runs the adapters without one",
            file=sys.stderr,
        )
        sys.exit(2)
    pythons, absent = interpreters(options.systems, device == "cuda")
    rows: list[Row] = [
        {"work": "installation", "system": name, "left_out": why} for name, why in absent.items()
    ]
    systems = Systems(pythons, device, options.compiler)
    facts = {
        "kernel_sources": CudaOp().source_digest(),
        "device": card(torch.device(device)),
        "smoke": is_smoke,
        "systems": {name: systems.order(name, "version").get("version") for name in systems},
    }
    turns = SMOKE["turns"] if is_smoke else TURNS
    turn_s = SMOKE["turn_s"] if is_smoke else TURN_S
    chosen = cases(device, options.kinds, is_smoke)
    largest = max((case.batch for case in chosen if not case.rollout), default=0)
    try:
        for case in chosen:
            for form in options.forms:
                say(f"{case.name}, {form}")
                rows += measured(systems, case, form, turns, turn_s)
                report.write(rows, **facts)  # rows so far stay if a later one fails
            if case.rollout or (case.length == 1 and case.batch == largest):
                rows += exactness(systems, case)
                report.write(rows, **facts)
    finally:
        systems.close()
    print_rows(rows, SHOWN)
    own = [row for row in rows if row["system"] == "gear"]
    is_broken = any(row.get("left_out") or row.get("wrong") for row in own)
    sys.exit(1 if is_broken or any(row.get("exact") is False for row in own) else 0)


if __name__ == "__main__":
    main()

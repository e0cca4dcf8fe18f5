"""The same batches on any number of ranks, in any division, and after a resume.

    python benchmarks/determinism.py [--json F] [--quick]

For each sampler and seed the first 50 global batches are made in many ways. What is compared is the
SHA-256 over ids, anchors, sample numbers, probabilities, epochs, masks and the bytes of all fields,
of each global batch, in the order of sample numbers. All must equal those of one rank without
accumulation and prefetch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support import ROOT, ragged
from support.ranks import free_port, run_ranks, start_ranks
from support.report import Report, Row, print_rows, say

from deepspeed_gear import Batch, Replay

GLOBAL_BATCH = 32
NUM_BATCHES = 50
QUICK_BATCHES = 12
RANKS = (1, 2, 4)
ACCUMULATIONS = (1, 2, 4)
PREFETCHES = (0, 3)
SEEDS = (0, 1, 2)
QUICK_WAYS: tuple[tuple[Any, ...], ...] = ((), (2, 2, 3), (2, 1, 0))
RESUMED_ON = (4, 1)  # killed on 2 ranks
_WAIT_S = 300.0
ENGINE = "--engine"


@dataclass(frozen=True)
class Case:
    """One way to make the batches of a sampler and a seed."""

    sampler: str
    seed: int
    ranks: int = 1
    accumulation: int = 1
    prefetch: int = 0

    @property
    def variant(self) -> str:
        return f"{self.ranks} ranks, accumulation {self.accumulation}, prefetch {self.prefetch}"

    def section(self, data: Path) -> dict[str, Any]:
        return {
            **ragged.section(data, self.sampler, self.seed, self.prefetch),
            "batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": self.accumulation,
        }


def cases(quick: bool) -> list[Case]:
    """Return what is compared: for every sampler and seed, plain batches on one rank come first.

    Full: all combinations of ranks, accumulation and prefetch. Quick: one seed, 1 and 2 ranks.
    """
    found = []
    for sampler, seed in itertools.product(ragged.SAMPLERS, SEEDS[:1] if quick else SEEDS):
        options = QUICK_WAYS if quick else itertools.product(RANKS, ACCUMULATIONS, PREFETCHES)
        found += [Case(sampler, seed, *option) for option in options]
    return found


# ---- on a rank -----------------------------------------------------------------------------------


def _rows_of(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample numbers of a batch, and everything about each sample as bytes. [B], [B,
    bytes].
    """
    parts = [
        batch.source,
        batch.trajectory_id,
        batch.anchor,
        batch.sample_number,
        batch.probability,
        batch.is_weight,
        batch.epoch,
        batch.valid,
    ]
    parts += [
        tensor
        for pair in sorted(batch.items())
        for tensor in (pair[1], batch.mask.get(pair[0]))
        if tensor is not None
    ]
    rows = [p.detach().contiguous().view(torch.uint8).reshape(batch.num_samples, -1) for p in parts]
    # Sample numbers are those of a table.
    return (batch.source.numpy() << 48) + batch.sample_number.numpy(), torch.cat(
        rows, dim=1
    ).numpy()


def digests_of(batches: Iterator[Batch], num_micro_batches: int, count: int) -> list[str]:
    """Take micro batches on every rank and digest the global batches. Collective.

    Args:
        batches: This rank's micro batches.
        num_micro_batches: Of this rank in a global batch.
        count: Global batches.
    Returns:
        A hex digest for each, on rank 0; nothing on the others.
    """
    mine = [_rows_of(next(batches)) for _ in range(count * num_micro_batches)]
    numbers = np.stack([n for n, _ in mine]).reshape(count, -1)
    rows = np.stack([r for _, r in mine])
    rows = rows.reshape(count, numbers.shape[1], -1)
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((numbers, rows), everyone)
    if everyone is None:
        return []
    numbers, rows = (np.concatenate([part[i] for part in everyone], axis=1) for i in range(2))
    order = np.argsort(numbers, axis=1)
    return [hashlib.sha256(rows[b][order[b]].tobytes()).hexdigest() for b in range(count)]


def digest_cases(data: Path, chosen: Sequence[Case], count: int) -> list[list[str]]:
    """Make the batches of cases, one after another, in this group of ranks. Collective."""
    found = []
    for case in chosen:
        with Replay(case.section(data)) as replay:
            found.append(digests_of(iter(replay), case.accumulation, count))
            dist.barrier()
    return found


def run_until_killed(data: Path, chosen: Sequence[Case], before: int, target: Path) -> None:
    """Make some batches of every case, write the positions, and sample on until the process is
    killed.
    """
    replays = [Replay(case.section(data)) for case in chosen]
    result = []
    for case, replay in zip(chosen, replays, strict=True):
        digests = digests_of(iter(replay), case.accumulation, before)
        replay.sample()  # a part of the next global batch: it has to come again
        result.append({"digests": digests, "state": replay.state_dict()})
    if dist.get_rank() == 0:
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.rename(target)
    while True:
        for replay in replays:
            replay.sample()


def resume_cases(data: Path, chosen: Sequence[Case], killed: Path, count: int) -> list[list[str]]:
    """Continue where the killed run's positions were taken. Collective."""
    found = []
    for case, entry in zip(chosen, json.loads(killed.read_text()), strict=True):
        with Replay(case.section(data)) as replay:
            replay.load_state_dict(entry["state"])
            before = entry["digests"]
            found.append(before + digests_of(iter(replay), case.accumulation, count - len(before)))
            dist.barrier()
    return found


def engine_cases(data: Path, chosen: Sequence[Case], count: int, target: Path) -> None:
    """Make the batches of cases by `engine.gear_sample()` while a model trains, under
    the launcher.
    """
    import deepspeed

    import deepspeed_gear

    deepspeed.init_distributed()
    found = []
    for case in chosen:
        section = ragged.section(data, case.sampler, case.seed, case.prefetch)
        config = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (case.ranks * case.accumulation),
            "gradient_accumulation_steps": case.accumulation,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gear": section,
        }
        model = torch.nn.Linear(5, 2)
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

        def trained(engine: Any = engine) -> Iterator[Batch]:
            while True:
                batch = engine.gear_sample()
                loss = (
                    (engine(batch["observation"][:, -1]) - batch["action"][:, -1]).square().mean()
                )
                engine.backward(loss)
                engine.step()
                yield batch

        found.append(digests_of(trained(), case.accumulation, count))
        engine.destroy()
    if dist.get_rank() == 0:
        target.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- the driver ----------------------------------------------------------------------------------


def _resumed(
    data: Path, samplers: Sequence[str], folder: Path, count: int
) -> dict[tuple[str, str], list[str]]:
    """Kill a run on 2 ranks after 2/5 of the batches, and resume it on other numbers of ranks."""
    killed = folder / "killed.json"
    first = [Case(sampler, 0, 2, 2, 3) for sampler in samplers]
    processes = start_ranks(2, run_until_killed, data, first, count * 2 // 5, killed)
    until = time.monotonic() + _WAIT_S
    try:
        while not killed.exists():
            if any(p.exitcode is not None for p in processes) or time.monotonic() > until:
                raise RuntimeError("the run that was to be killed has ended by itself")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()  # SIGKILL: nothing of the run has a chance to tidy up
            process.join()
    found = {}
    for ranks in RESUMED_ON:
        again = [Case(sampler, 0, ranks) for sampler in samplers]
        digests = run_ranks(ranks, resume_cases, data, again, killed, count)[0]
        variant = f"killed on 2 ranks, resumed on {ranks}"
        found.update({(case.sampler, variant): d for case, d in zip(again, digests, strict=True)})
    return found


def _launched(
    data: Path, samplers: Sequence[str], folder: Path, count: int
) -> dict[tuple[str, str], list[str]]:
    """Run an engine on 2 ranks under DeepSpeed's launcher."""
    target = folder / "launched.json"
    port = str(free_port())
    launcher = Path(sys.executable).with_name("deepspeed")
    engine = json.dumps([str(data), str(target), count])
    command = [
        sys.executable,
        launcher,
        "--num_gpus",
        "2",
        "--master_port",
        port,
        Path(__file__).resolve(),
    ]
    environment = {"DS_ACCELERATOR": "cpu"} if not torch.cuda.is_available() else {}
    path = os.pathsep.join(filter(None, (str(launcher.parent), os.environ.get("PATH"))))
    try:
        result = subprocess.run(
            [*command, ENGINE, engine, *samplers],
            env={**os.environ, **environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=2 * _WAIT_S,
            cwd=ROOT,
        )
    finally:
        for left in Path("/dev/shm").glob(
            f"deepspeed_*_{port}_*"
        ):  # DeepSpeed's own buffers, 69 MB a rank
            left.unlink(missing_ok=True)
    if result.returncode or not target.exists():
        text = (result.stdout + result.stderr)[-4000:]
        raise RuntimeError(f"deepspeed ended with {result.returncode}:\n{text}")
    variant = "engine.gear_sample() on 2 ranks, accumulation 2, under the deepspeed launcher"
    return {
        (name, variant): d for name, d in zip(samplers, json.loads(target.read_text()), strict=True)
    }


def run(quick: bool = False, launcher: bool = True) -> list[Row]:
    """Compare all variants.

    Args:
        quick: Fewer cases and batches; under half a minute.
        launcher: Include an engine under DeepSpeed's launcher.
    Returns:
        A row per sampler, seed and variant, plain batches on one rank first; after those a row per
        sampler and seed that says whether its batches differ from all others', so that equality
        means something.
    """
    count = QUICK_BATCHES if quick else NUM_BATCHES
    chosen = cases(quick)
    digests: dict[Case, list[str]] = {}
    samplers = list(ragged.SAMPLERS)
    with tempfile.TemporaryDirectory(prefix="gear-determinism-") as name:
        folder = Path(name)
        data = ragged.write(folder)
        for ranks in RANKS:
            group = [case for case in chosen if case.ranks == ranks]
            if group:
                digests.update(
                    zip(group, run_ranks(ranks, digest_cases, data, group, count)[0], strict=True)
                )
                say(f"{len(group)} cases on {ranks} ranks")
        more = _resumed(data, samplers, folder, count)
        say("killed and resumed")
        if launcher:
            more.update(_launched(data, samplers, folder, count))
            say("under the launcher")
    rows = compare(chosen, digests, more)
    return rows + _distinct([row for row in rows if row["variant"] == Case("", 0).variant])


def compare(
    chosen: Sequence[Case], digests: dict[Case, list[str]], more: dict[tuple[str, str], list[str]]
) -> list[Row]:
    rows = []
    for sampler, seed in dict.fromkeys((case.sampler, case.seed) for case in chosen):
        wanted = digests[Case(sampler, seed)]
        mine = [case for case in chosen if (case.sampler, case.seed) == (sampler, seed)]
        found = {case.variant: digests[case] for case in mine}
        if seed == 0:
            found.update({variant: d for (of, variant), d in more.items() if of == sampler})
        for variant, made in found.items():
            rows.append(_row(sampler, seed, variant, _join(made), made == wanted))
    return rows


def _row(sampler: str, seed: int, variant: str, digest: str, equal: bool) -> Row:
    """Return whether a variant gave the batches of one rank without accumulation and prefetch.

    Args:
        sampler, seed: Of the case.
        variant: How the batches were made.
        digest: SHA-256 over the digests of all its global batches, hex.
        equal: Whether it did.
    """
    return {"sampler": sampler, "seed": seed, "variant": variant, "digest": digest, "equal": equal}


def _distinct(first: Sequence[Row]) -> list[Row]:
    digests = [row["digest"] for row in first]
    variant = "differs from every other sampler and seed"
    return [
        {**row, "variant": variant, "equal": digests.count(row["digest"]) == 1} for row in first
    ]


def _join(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def show(rows: Sequence[Row]) -> None:
    """Print a line per sampler and seed, and every variant that differs."""
    lines: dict[tuple[str, int], Row] = {}
    for row in rows:
        case = {"sampler": row["sampler"], "seed": row["seed"], "sha256": row["digest"][:16]}
        line = lines.setdefault((row["sampler"], row["seed"]), {**case, "checks": 0, "hold": 0})
        line["checks"] += 1
        line["hold"] += row["equal"]
    print_rows(list(lines.values()))
    for row in rows:
        if not row["equal"]:
            print(f"DIFFERENT: {row['sampler']}, seed {row['seed']}: {row['variant']}")


def main() -> None:
    """Run from the command line; the exit code is 1 if anything differs."""
    if ENGINE in sys.argv:  # under the launcher, whose own arguments stand before it
        given, *samplers = sys.argv[sys.argv.index(ENGINE) + 1 :]
        data, target, count = json.loads(given)
        engine_cases(Path(data), [Case(name, 0, 2, 2) for name in samplers], count, Path(target))
        return
    report = Report(__doc__, "fewer cases and batches, no launcher")
    quick = report.options.quick
    rows = run(quick, launcher=not quick)
    show(rows)
    report.write(rows)
    sys.exit(0 if all(row["equal"] for row in rows) else 1)


if __name__ == "__main__":
    main()

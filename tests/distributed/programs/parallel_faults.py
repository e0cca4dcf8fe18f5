"""Meet what goes wrong in parallel training; the last argument is a task, `kind` one of those below.

`refused`: what attach refuses. `steps`: a rank fails once and all try again; later it has other samples than
its replica; then it ends a step early, in the course of an error (`by_error`) or not. `zeros`: nothing can be
drawn for a while. `killed` and `stopped`: a rank is killed or stopped while the others wait for it. Each rank
writes its errors to OUT/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from engine_parts import BATCH, task
from parallel_matrix import Losses, Network, made, pipeline

import deepspeed_gear
from deepspeed_gear import Batch
from deepspeed_gear.errors import GearError


class WrongMpu:
    """Says of every rank that it is the first of two tensor ranks."""

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    get_data_parallel_rank = get_model_parallel_rank
    get_data_parallel_group = get_model_parallel_group

    def get_data_parallel_world_size(self) -> int:
        return 1


def ds_config(gear: dict[str, Any], replicas: int) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": BATCH // replicas, "gradient_accumulation_steps": 1}
    return {**sizes, "optimizer": adam, "zero_force_ds_cpu_optimizer": False, "gear": gear}


def refusals(gear: dict[str, Any]) -> dict[str, list[str]]:
    """Return the error of each wrong set-up."""
    losses, found = Losses(), {}
    labels = {**gear["pipeline"], "labels": ["action", "mask.nothing"]}
    odd = {**gear["fields"], "odd": {"column": "code", "offset": -2, "length": 3}}
    without = {name: value for name, value in gear.items() if name != "pipeline"}
    parallel_state_sp.initialize_sequence_parallel(2)
    stages = PipeDataParallelTopology(2, 1)
    for name, section, options in (
        ("seeds", {**gear, "seed": dist.get_rank()}, {"model": Network()}),
        ("fields", {**gear, "pipeline": labels}, {"model": pipeline(stages, losses)}),
        ("no section", without, {"model": pipeline(stages, losses)}),
        ("window", {**gear, "fields": odd}, {"model": Network(), "mpu": parallel_state_sp}),
        ("mpu", gear, {"model": Network(), "mpu": WrongMpu()}),
    ):
        if name != "no section" and name != "fields":
            options["model_parameters"] = options["model"].parameters()
        try:
            deepspeed_gear.initialize(config=ds_config(section, 1), **options)
        except GearError as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def one_step(engine: Any) -> None:
    if hasattr(engine, "gear_batches"):
        engine.train_batch()
        return
    batch = engine.gear_sample()
    loss = (engine(batch["observation"]) - batch["action"][:, None]).square().mean()
    engine.backward(loss)
    engine.step()


def attempt(engine: Any) -> list[str] | None:
    """Make a step; return its error."""
    begin = time.monotonic()
    try:
        one_step(engine)
    except (GearError, ArithmeticError) as error:
        return [type(error).__name__, str(error), f"{time.monotonic() - begin:.1f}"]
    return None


def stepping(engine: Any, last: bool, by_error: bool) -> dict[str, Any]:
    calls = 0

    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        nonlocal calls
        calls += 1
        if last and calls == 3:
            raise ArithmeticError("a fault in the user's transform")
        if last and calls == 6:
            batch.host_records = batch.host_records + 1
        return batch

    engine.gear.transform = transform
    errors = [attempt(engine) for _ in range(7)]
    if last:
        end(engine, by_error)
        return {"errors": errors, "end": None}
    return {"errors": errors, "end": attempt(engine)}


def end(engine: Any, by_error: bool) -> None:
    """Close an engine's replay, in the course of an error or not."""
    try:
        if by_error:
            raise KeyError("of this test")
    except KeyError:
        engine.destroy()
    else:
        engine.destroy()


def without_masses(engine: Any) -> dict[str, Any]:
    """Report priorities of 0 only: no batch can be drawn until others come."""
    batch = engine.gear_sample()
    engine.gear_update_priorities(batch, torch.zeros(batch.num_samples))
    engine.gear.set_priorities(range(40), torch.zeros(40), torch.zeros(40, dtype=torch.int64))
    errors = []
    for _ in range(2):
        errors.append(attempt(engine))
        time.sleep(4)  # who still waits for this rank's reports must not wait for so long
    engine.gear.set_priorities([3], [1.0], [0])
    return {"errors": errors, "end": attempt(engine)}


def dying(engine: Any, victim: bool, number: signal.Signals) -> dict[str, Any]:
    errors = [attempt(engine) for _ in range(2)]
    if victim:
        os.kill(os.getpid(), number)
        time.sleep(600)
    return {"errors": errors, "end": attempt(engine)}


def tell(path: Path, found: dict[str, Any]) -> None:
    """Write a file that others read as soon as it is there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


def main(wanted: dict[str, Any]) -> None:
    deepspeed.init_distributed()
    rank, kind, out = dist.get_rank(), wanted["kind"], Path(wanted["out"])
    if kind == "refused":
        tell(out / f"{rank}.json", refusals(wanted["gear"]))
        torch.distributed.destroy_process_group()
        return
    engine = made(wanted["mode"], ds_config(wanted["gear"], wanted["replicas"]), Losses())
    if kind == "zeros":
        found = without_masses(engine)
    elif kind == "steps":
        found = stepping(engine, rank == dist.get_world_size() - 1, wanted["by_error"])
    else:
        number = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
        found = dying(engine, rank == wanted["victim"], number)
    tell(out / f"{rank}.json", found)
    os._exit(0)  # the group has lost a rank


if __name__ == "__main__":
    main(task())

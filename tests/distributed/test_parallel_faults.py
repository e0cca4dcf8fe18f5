"""What goes wrong in parallel training ends on every rank with an error that names it,
and in time.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from engine_parts import ds_config
from gear_support import config_of, prefix, shared_files, wait_until
from parallel_checks import ENDS, FIELDS, MODES
from parallel_engines import Losses, Network, made, pipeline
from process_support import CALL, Ranks, call_with_engines, result_of, write_call

import deepspeed_gear
from deepspeed_gear import Batch
from deepspeed_gear.errors import GearError

TIMEOUT_S = 8.0
LONG = pytest.mark.skipif(
    os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1"
)


def section(dataset: Path, **options: Any) -> dict[str, Any]:
    common = {"fields": FIELDS, "pipeline": ENDS, "timeout_s": TIMEOUT_S}
    return config_of(dataset, **{**common, **options})


def test_what_attach_refuses(dataset: Path) -> None:
    wanted = {
        "seeds": "must be the same on all ranks, got 'rank 0 and rank 1: gear.seed: 0 and 1'",
        "fields": "gear.pipeline.labels[1] must name a field, its mask",
        "no section": "gear.pipeline must be given where the model is a pipeline",
        "window": "gear.fields.odd.length must be a multiple of the sequence ranks (2), got 3",
        "mpu": "rank 0: data 0 of 1, tensor 0 of 2; rank 1: data 0 of 1, tensor 0 of 2",
    }
    for found in call_with_engines(2, refusals, section(dataset)):
        assert {name: error[0] for name, error in found.items()} == dict.fromkeys(
            wanted, "ConfigError"
        )
        for name, text in wanted.items():
            assert text in found[name][1]


@pytest.mark.parametrize("mode", ["zero:1x2", pytest.param("tensor:2", marks=LONG), "pipe:3"])
def test_a_rank_that_fails_or_ends_early(mode: str, dataset: Path) -> None:
    """A failure is raised on all, and all may try again; other samples than those of the replica
    are found; who ends a step early is named by the others.
    """
    ranks, replicas = MODES[mode]
    by_error = mode.startswith("pipe")
    found = call_with_engines(ranks, stepping, mode, section(dataset, verify_every=1), by_error)
    text = "a fault in the user's transform"
    differs = (
        None if replicas == ranks else f"rank {ranks - 1} must have the samples of its replica (0)"
    )
    for rank, result in enumerate(found):
        failed = None if rank == ranks - 1 else f"[raised on rank {ranks - 1}]"
        errors = dict(enumerate(result["errors"]))
        assert text in errors[2][1]
        assert errors[2][0] == ("PeerError" if failed else "ArithmeticError")
        assert (failed or text) in errors[2][1]
        assert errors[5] is None if differs is None else differs in errors[5][1]
        assert [errors[n] for n in (0, 1, 3, 4, 6)] == [None] * 5
        if failed:
            kind, message = result["end"]
            assert kind == "PeerError"
            rule = "must take as many batches as this rank"
            had = "it ended after 7 of 8 batch barriers"
            if by_error:
                rule = "must train as long as the others"
                had = "it failed after 7 of 8 batch barriers: KeyError: 'of this test'"
            assert f"rank {ranks - 1} {rule}; {had}" in message


def test_a_cut_that_fails_is_an_error_on_all_at_once(dataset: Path) -> None:
    """One rank finds no mass to draw from while the other waits for its reports; both can go on
    later.
    """
    sampler = {"kind": "prioritized", "initial": 1.0, "unit": "step", "anchors": "start"}
    for found in call_with_engines(2, without_masses, section(dataset, sampler=sampler)):
        for kind, message in found["errors"]:
            assert kind in ("StoreError", "PeerError")
            assert "trajectories (24 steps) of priority 0" in message
        assert found["end"] is None


@pytest.mark.parametrize(
    ("kind", "mode", "victim"), [("killed", "pipe:3", 1), ("stopped", "zero:1x2", 0)]
)
def test_a_rank_that_dies_or_stands_still(
    kind: str, mode: str, victim: int, dataset: Path, tmp_path: Path
) -> None:
    ranks = MODES[mode][0]
    timeout_s = 5.0
    others = [rank for rank in range(ranks) if rank != victim]
    call = write_call(tmp_path, dying, mode, section(dataset, timeout_s=timeout_s), kind, victim)
    run = Ranks(CALL, ranks, call)
    try:
        wait_until(lambda: all(Path(f"{call}.{rank}").exists() for rank in others), "the errors")
        for found in (result_of(call, rank) for rank in others):
            assert found["errors"] == [None, None]
            error, message = found["end"]
            assert error == "PeerError"
            assert message.startswith(f"rank {victim} must ")
            assert ("it died" if kind == "killed" else f"within {timeout_s} s") in message
    finally:
        run.kill()
    assert shared_files(prefix()) == []


# ---- on each rank --------------------------------------------------------------------------------


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


def refusals(gear: dict[str, Any]) -> dict[str, list[str]]:
    """Return the error of each wrong set-up."""
    deepspeed.init_distributed()
    losses = Losses()
    found = {}
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
            deepspeed_gear.initialize(config=ds_config(section, replicas=1), **options)
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
    try:
        one_step(engine)
    except (GearError, ArithmeticError) as error:
        return [type(error).__name__, str(error)]
    return None


def engine_of(mode: str, gear: dict[str, Any]) -> Any:
    deepspeed.init_distributed()
    return made(mode, ds_config(gear, replicas=MODES[mode][1]), Losses())


def stepping(mode: str, gear: dict[str, Any], by_error: bool) -> dict[str, Any]:
    """The last rank fails once and all try again; later it has other samples than its replica; then
    it ends a step early, in the course of an error or not.
    """
    engine = engine_of(mode, gear)
    last = dist.get_rank() == dist.get_world_size() - 1
    calls = 0

    def transform(batch: Batch, words: torch.Tensor) -> Batch:
        nonlocal calls
        calls += 1
        if last and calls == 3:
            raise ArithmeticError("a fault in the user's transform")
        if last and calls == 6:
            batch.host_resolutions = batch.host_resolutions + 1
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


def without_masses(gear: dict[str, Any]) -> dict[str, Any]:
    """Report priorities of 0 only: no batch can be drawn until others come."""
    engine = engine_of("zero:1x2", gear)
    batch = engine.gear_sample()
    engine.gear_update_priorities(batch, torch.zeros(batch.num_samples))
    engine.gear.set_priorities(range(40), torch.zeros(40), torch.zeros(40, dtype=torch.int64))
    errors = []
    for _ in range(2):
        errors.append(attempt(engine))
        dist.barrier()  # which a rank that still waits for this one's reports does not come to
    engine.gear.set_priorities([3], [1.0], [0])
    return {"errors": errors, "end": attempt(engine)}


def dying(mode: str, gear: dict[str, Any], kind: str, victim: int) -> dict[str, Any]:
    """A rank is killed or stopped while the others wait for it."""
    engine = engine_of(mode, gear)
    errors = [attempt(engine) for _ in range(2)]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        time.sleep(600)
    return {"errors": errors, "end": attempt(engine)}

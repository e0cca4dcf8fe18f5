"""Engines of each kind of parallelism, and what each rank sees and where it sits.

A field of codes (trajectory * 1000 + step) goes with the inputs through a pipeline, so that the
loss can see whether labels belong to them.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from batch_records import Arrays, joined, priorities, record, stacked
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from engine_parts import BATCH, ds_config
from page_support import page_code
from torch import nn
from trainers import SPLIT

import deepspeed_gear
from deepspeed_gear import Batch

WINDOW = 4
SIZE = 3
KNOWN = ("sample_number", "trajectory_id", "anchor", "is_weight", "num_steps")
SAVED = 6  # the step after which a checkpoint is written


class Network(nn.Module):
    """Predicts an action from an observation, step by step."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(SIZE, 8)
        self.down = nn.Linear(8, 2)
        expert = nn.Linear(8, 8)
        self.moe = MoE(8, expert, num_experts=experts, ep_size=experts, k=1) if experts else None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(observation / 1e4))
        if self.moe is not None:
            hidden = hidden + self.moe(hidden)[0]
        return self.down(hidden)


class Stage(nn.Module):
    """A layer of a pipeline that hands the codes on beside what it computes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(inputs)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, codes = both
        return torch.tanh(self.linear(x)), codes


def first_layer(both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    observation, codes = both
    return observation.flatten(1) / 1e4, codes


class Losses:
    """The loss of a pipeline; keeps what the priorities are made of."""

    def __init__(self) -> None:
        self.checked = 0

    def __call__(self, outputs: Any, labels: Any) -> torch.Tensor:
        (found, codes) = outputs
        (action, code, ids, mask, weight) = labels
        assert codes.equal(code), (codes, code)
        assert (code // 1000).equal(ids), (code, ids)
        assert mask.dtype == torch.bool
        assert len(weight) == len(ids)
        self.checked += 1
        return (weight[:, None] * (found - action / 1e4).square()).mean()


def pipeline(topology: Any, losses: Losses) -> PipelineModule:
    layers = [
        first_layer,
        LayerSpec(Stage, WINDOW * SIZE, 8),
        LayerSpec(Stage, 8, 8),
        LayerSpec(Stage, 8, 2),
    ]
    return PipelineModule(layers, topology=topology, loss_fn=losses, partition_method="uniform")


def made(mode: str, config: dict[str, Any], losses: Losses) -> Any:
    """Return an engine of a mode."""
    kind, _, sizes = mode.partition(":")
    one, two, three = [*(int(size) for size in sizes.split("x") if size), 1, 1, 1][:3]
    model = None
    options = {}
    if kind == "pipe":
        mesh = PipeDataParallelTopology(one, two)
        model = pipeline(
            PipeModelDataParallelTopology(one, three, two) if three > 1 else mesh, losses
        )
    elif kind == "zero":
        config["zero_optimization"] = {"stage": one, "stage3_param_persistence_threshold": 0}
    elif kind == "hpz":
        config["zero_optimization"] = {"stage": 3, "zero_hpz_partition_size": one}
    elif kind == "megatron":
        page: dict[str, Any] = {}
        exec(page_code("megatron-mpu.md", "class Mpu"), page)
        options["mpu"] = page["Mpu"](one)
    elif kind == "tensor":
        config["tensor_parallel"] = {"autotp_size": one, "partition_config": SPLIT}
    elif kind == "tp_model_init":
        config["tensor_parallel"] = {"partition_config": SPLIT}
        model = deepspeed.tp_model_init(Network(), tp_size=one, dtype=torch.float32)
    elif kind == "ulysses":
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(one)
        options["mpu"] = parallel_state_sp
    elif kind == "mesh":
        options["mesh_param"] = (two, one)
    elif kind == "expert":
        model = Network(experts=one)
    model = model or Network()
    if not isinstance(model, PipelineModule):
        options["model_parameters"] = model.parameters()
    return deepspeed_gear.initialize(model=model, config=config, **options)[0]


def report(engine: Any, batch: Batch) -> None:
    if engine.gear.config.sampler.kind == "prioritized":
        engine.gear_update_priorities(batch, priorities(batch))


def step(engine: Any) -> list[Arrays]:
    """Make one optimizer step; return the micro batches of this rank."""
    found: list[Arrays] = []
    if hasattr(engine, "gear_batches"):
        assert torch.isfinite(engine.train_batch(data_iter=engine.gear_iterator()))
        for batch in engine.gear_batches():
            report(engine, batch)
            found.append(record(batch, KNOWN))
        return found
    for _ in range(engine.gradient_accumulation_steps()):
        batch = engine.gear_sample()
        output = engine(batch["observation"])
        loss = (output - batch["action"][:, None] / 1e4).square().mean(dim=(1, 2))
        engine.backward((batch.is_weight * loss).mean())
        engine.step()
        report(engine, batch)
        found.append(record(batch, KNOWN))
    return found


def evaluate(engine: Any, losses: Losses) -> int:
    """Evaluate a pipeline over one pass, in parts of any size; return its micro batches."""
    iterator = engine.gear_iterator("eval")
    before = losses.checked
    first = min(2, len(iterator))
    engine.eval_batch(iterator, num_micro_batches=first)
    engine.eval_batch(iterator, num_micro_batches=len(iterator))
    if engine.gear.topology.place.is_last_stage:
        assert losses.checked - before == first + len(iterator)
    return len(iterator)


def check_resume(engine: Any, folder: str, rows: list[Arrays]) -> None:
    """Go back to the checkpoint: the batches behind it come again."""
    engine.load_checkpoint(folder)
    for number in (SAVED + 1, SAVED + 2):
        found = step(engine)
        assert bool(found) == bool(rows)
        for key in ("sample_number", "trajectory_id", "anchor", "is_weight") if found else ():
            assert (np.concatenate([part[key] for part in found]) == rows[number][key]).all(), (
                number,
                key,
            )


def train_modes(
    modes: dict[str, int], gear: dict[str, Any], cases: dict[str, Any], steps: int, out: Path
) -> dict[str, dict[str, tuple[dict[str, Any], Arrays]]]:
    """Train an engine of each mode, with its replicas, for each case; checkpoints lie in a folder.

    Returns:
        Where this rank sits and what it sees, by mode and case.
    """
    deepspeed.init_distributed()
    found: dict[str, dict[str, tuple[dict[str, Any], Arrays]]] = {}
    with contextlib.redirect_stderr(io.StringIO()) as log:
        for mode, replicas in modes.items():
            folder = out / mode.replace(":", ".")
            found[mode] = {}
            folder.mkdir(exist_ok=True)
            for name, case in cases.items():
                config = ds_config({**gear, **case["gear"]}, case["accumulation"], replicas)
                found[mode][name] = train_case(mode, config, steps, f"{folder}/{name}")
    num_logged = len(modes) * len(cases) if torch.distributed.get_rank() == 0 else 0
    assert log.getvalue().count(f"gear: global batch {BATCH} = ") == num_logged
    return found


def train_case(
    mode: str, config: dict[str, Any], steps: int, folder: str
) -> tuple[dict[str, Any], Arrays]:
    losses = Losses()
    rows = []
    engine = made(mode, config, losses)
    for number in range(steps):
        found = step(engine)
        if found:
            rows.append(joined(found))
        if number == 2 and hasattr(engine, "gear_batches"):
            evaluate(engine, losses)
        if number == SAVED:
            engine.save_checkpoint(folder)
    replay = engine.gear
    place = replay.topology.place
    known = replay.statistics()
    check_resume(engine, folder, rows)
    report = {
        "coordinates": dict(
            zip(("pipe", "data", "sequence", "tensor"), place.coordinates, strict=True)
        ),
        "node": replay.node,
        "reads": place.reads,
        "reports": place.reports,
        "global_batch": replay.batch_info.global_batch,
        "bytes": known["bytes"],
        "padding": known["padding"],
        "applied": known.get("priorities_applied"),
        "digest": known["digest"],
    }
    engine.destroy()
    return report, stacked(rows) if rows else {}

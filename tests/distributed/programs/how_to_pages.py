"""Run the code of how-to pages as it is printed, and write what the model of each rank gets.

The last argument is a task: `out`; `runs`: steps and ds_config of train.py of change-ranks.md, by name;
`trainers`: the same of the programs of hugging-face.md, by a text in each. These run up to half of the steps,
and then from there. `progress`: those of the loop of statistics.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from batch_records import priorities
from engine_parts import Model, task
from page_support import page_code

import deepspeed_gear
from deepspeed_gear import Batch

RANK = os.environ["RANK"]


class NamedModel(Model):
    """As Model, for a Trainer: named tensors in, a dict with the loss out. Keeps the codes that it gets."""

    def __init__(self, codes: list[int]) -> None:
        super().__init__(12)
        self._codes = codes

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> dict[str, torch.Tensor]:
        self._codes += action[:, 0].long().tolist()
        return {"loss": super().forward({"observation": observation, "action": action})}


def run(code: str, name: str, arguments: list[str], **helpers: Any) -> None:
    """Run a program of a page; `my_task` is the module from which it imports its helpers."""
    sys.modules["my_task"] = my_task = ModuleType("my_task")
    my_task.__dict__.update(helpers)
    sys.argv = [name, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]  # as the launcher gives them
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def train(name: str, config: dict[str, Any], steps: int, out: Path) -> None:
    """Run train.py, or continue it; write samples and losses."""
    samples, losses = [], []

    def loss_of(engine: Any, batch: Batch) -> Any:
        loss = engine(batch)
        known = batch.sample_number, batch.trajectory_id, batch.anchor
        samples.extend(zip(*(tensor.tolist() for tensor in known), strict=True))
        losses.append(float(loss))
        if engine.gear.config.sampler.kind == "prioritized":
            engine.gear_update_priorities(batch, priorities(batch))
        return loss

    file = out / f"{name}.config.{RANK}.json"
    file.write_text(json.dumps(config))
    code = page_code("change-ranks.md", "load_universal")
    arguments = [str(file), str(out / name), str(steps)]
    run(code, "train.py", arguments, loss_of=loss_of, make_model=lambda: Model(12))
    (out / f"{name}.{steps}.{RANK}.json").write_text(json.dumps({"samples": samples, "losses": losses}))


def use_gloo() -> None:
    """Give accelerate a backend for DeepSpeed's ranks on CPUs, where it has none."""
    from accelerate import PartialState

    original = PartialState.__init__

    def with_gloo(self: Any, cpu: bool = False, **options: Any) -> None:
        original(self, cpu, **{"backend": "gloo", **options})

    PartialState.__init__ = with_gloo


def with_trainer(mark: str, steps: int, out: Path) -> None:
    """Run a program of hugging-face.md in its own folder, in two parts; write the codes of its batches."""
    from accelerate.state import AcceleratorState

    codes: list[int] = []
    os.chdir(out / mark)  # has ds_config.json
    make_model: Callable[[], NamedModel] = lambda: NamedModel(codes)  # noqa: E731
    for until in (steps // 2, steps):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        arguments = [str(until), str(steps // 2)]
        run(page_code("hugging-face.md", mark), f"{mark}.py", arguments, make_model=make_model)
    (out / f"{mark}.{RANK}.json").write_text(json.dumps(codes))


def with_progress(config: dict[str, Any], steps: int, out: Path) -> None:
    """Run the loop of statistics.md; write what rank 0 prints."""
    known: dict[str, Any] = {}
    exec(page_code("statistics.md", "engine.gear.progress()"), known)
    model = Model(12)
    engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        known["train"](engine, lambda engine, batch: engine(batch), steps)
    (out / f"progress.{RANK}").write_text(printed.getvalue())
    engine.destroy()


def main(out: Path, runs: dict[str, Any], trainers: dict[str, int], progress: list[Any] | None) -> None:
    for name, (steps, config) in runs.items():
        train(name, config, steps, out)
    if progress is not None:
        with_progress(progress[1], progress[0], out)
    if trainers:
        use_gloo()
    for mark, steps in trainers.items():
        with_trainer(mark, steps, out)


if __name__ == "__main__":
    wanted = task()
    main(Path(wanted["out"]), wanted["runs"], wanted["trainers"], wanted.get("progress"))

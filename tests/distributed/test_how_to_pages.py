"""The programs of docs/how-to/change-ranks.md, hugging-face.md and fsdp.md, as they are printed."""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batch_records
import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import priorities, samples_of
from engine_parts import Model
from gear_support import STEP, config_of, prefix
from page_support import page_code, run_program
from process_support import call_on_ranks

import deepspeed_gear
from deepspeed_gear import Batch, Column, DatasetWriter, Replay, Schema

pytestmark = pytest.mark.timeout(600)  # of two launches, each with a limit of its own
BATCH = 12
MICRO = 3
HALF = 3
STEPS = 6
LOOP = 250  # steps of the loop of statistics.md
UNITS = {"prioritized": "step", "uniform": "step", "epoch": "trajectory"}
STAGES = {0: "uniform", 1: "prioritized", 3: "epoch"}  # the samplers of their runs
TRAINERS = {  # where they get the sizes from
    "GearTrainer": {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    },
    "DummyOptim": {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2},
}
PACKED = "PackedTrainer"
FSDP = "fully_shard"
Ran = list[dict[str, Any]]  # what each rank has seen, by program
HAS_TRAINERS = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))


def section(data: Path, kind: str) -> dict[str, Any]:
    fields = {"observation": {"offset": -1, "length": 4}, "action": {}}
    sampler = {"kind": kind, "unit": UNITS[kind]}
    return config_of(data, fields=fields, sampler=sampler, seed=3, timeout_s=60.0, prefetch=1)


def ds_config(data: Path, kind: str, stage: int, **sizes: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "gear": section(data, kind),
        **sizes,
    }


@pytest.fixture(scope="module")
def ran(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ran]:
    """Train half of the steps on one rank and the rest on two, and all of them on one; by world."""
    out = tmp_path_factory.mktemp("pages")
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO}
    runs = {
        f"zero{stage}": ds_config(dataset, kind, stage, **sizes) for stage, kind in STAGES.items()
    }
    whole = {f"whole.{kind}": (STEPS, ds_config(dataset, kind, 0, **sizes)) for kind in UNITS}
    for mark, own in TRAINERS.items():
        (out / mark).mkdir()
        (out / mark / "ds_config.json").write_text(
            json.dumps(ds_config(dataset, "uniform", 1, **own))
        )
    (out / PACKED).mkdir()
    (out / PACKED / "ds_config.json").write_text(json.dumps(packed_config(out / "text")))
    first = {name: (HALF, config) for name, config in runs.items()} | whole
    rest = {name: (STEPS, config) for name, config in runs.items()}
    progress = ds_config(dataset, "uniform", 0, **sizes)
    (out / FSDP).mkdir()
    gear = packed_config(out / "texts")["gear"]
    (out / FSDP / "gear.json").write_text(
        json.dumps(gear | {"shared_memory": {"prefix": prefix()}})
    )
    trainers = [*TRAINERS, PACKED, FSDP] if HAS_TRAINERS else []
    return {
        1: call_on_ranks(1, run_pages, out, first, [], timeout_s=280.0),
        2: call_on_ranks(2, run_pages, out, rest, trainers, progress, timeout_s=280.0),
    }


def packed_config(data: Path) -> dict[str, Any]:
    """Write texts, number i of i % 9 + 2 tokens i + 1; return a ds_config that packs them."""
    with DatasetWriter(data, Schema([Column("tokens", "int32", role="token")])) as writer:
        for number in range(STEPS * BATCH):
            writer.add({"tokens": np.full(number % 9 + 2, number + 1, np.int32)})
    config = ds_config(
        data, "epoch", 1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1
    )
    gear = {
        "pack": {"tokens": 32, "pad": {"multiple": 8}},
        "batch": {"trajectories": BATCH},
        "sampler": {"kind": "epoch"},
    }
    return {**config, "managed_gradient_accumulation": False, "gear": {"data": str(data), **gear}}


def seen(ran: Ran, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of each global batch, in their order, and its loss. [N, B, 3], [N]."""
    samples = np.array(sorted(sample for rank in ran for sample in rank[name][0]))
    losses = np.mean([rank[name][1] for rank in ran], axis=0)
    return samples.reshape(-1, BATCH, 3), losses.reshape(-1, BATCH // MICRO // len(ran)).mean(
        axis=1
    )


def alone(
    gear: dict[str, Any], batches: int, batch_size: int = BATCH, state: Any = None
) -> np.ndarray:
    """Return the samples of one process without an engine. [N, B, 3]."""
    return samples_of(batch_records.alone({**gear, "batch_size": batch_size}, batches, state=state))


@pytest.mark.parametrize("stage", STAGES)
def test_train_continues_on_another_number_of_ranks(
    stage: int, ran: dict[int, Ran], dataset: Path
) -> None:
    kind = STAGES[stage]
    first = seen(ran[1], f"zero{stage}")
    second = seen(ran[2], f"zero{stage}")
    wanted, losses = seen(ran[1], f"whole.{kind}")
    assert (wanted == alone(section(dataset, kind), STEPS)).all()
    assert (np.concatenate([first[0], second[0]]) == wanted).all()
    assert np.concatenate([first[1], second[1]]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.skipif(not HAS_TRAINERS, reason="transformers and accelerate are not installed")
@pytest.mark.parametrize("mark", TRAINERS)
def test_a_trainer_resumes_at_the_next_sample(
    mark: str, ran: dict[int, Ran], dataset: Path
) -> None:
    codes = alone(section(dataset, "uniform"), STEPS)[..., 1:] @ [STEP, 1]  # of trajectory and step
    batches = np.concatenate(
        [np.reshape(rank[mark], (STEPS, BATCH // 2)) for rank in ran[2]], axis=1
    )
    assert (np.sort(batches) == np.sort(codes)).all()


@pytest.mark.skipif(not HAS_TRAINERS, reason="transformers and accelerate are not installed")
def test_a_trainer_of_packed_batches_resumes(ran: dict[int, Ran]) -> None:
    """Each text of the epoch is trained once; the first batch of 12 after the resume is the fourth
    one.
    """
    texts = [rank[PACKED] for rank in ran[2]]
    trained = sorted(text for text in itertools.chain(*texts) if text)  # 0 is padding
    assert trained == list(range(1, STEPS * BATCH + 1))
    assert min(map(len, texts)) > STEPS


@pytest.mark.skipif(not HAS_TRAINERS, reason="the model is of transformers")
def test_fsdp_goes_on_as_if_it_had_not_ended(ran: dict[int, Ran]) -> None:
    """Every text of the epoch comes once; the weights are those of a run in one piece."""
    for name in ("resumed", "whole"):
        texts = sorted(
            text for rank in ran[2] for text in rank[FSDP][name][0] if text
        )  # 0 is padding
        assert texts == list(range(1, STEPS * BATCH + 1))
    weights = [rank[FSDP][name][1] for rank in ran[2] for name in ("resumed", "whole")]
    assert all(np.array_equal(weights[0], one) for one in weights[1:])


def test_the_loop_of_the_page_on_progress(ran: dict[int, Ran]) -> None:
    """It prints on rank 0 after every 100 steps; the text is what `str` of a Progress has."""
    lines = ran[2][0]["progress"].splitlines()
    known = r"[\d,.]+ samples/s, \d+(\.\d+)?% of the time waiting for data"
    assert [line.split(":")[0] for line in lines] == ["step 100", "step 200"]
    assert all(re.fullmatch(rf"step \d+: {known}", line) for line in lines), lines
    assert ran[2][1]["progress"] == ""


def test_another_global_batch_continues_without_a_gap(dataset: Path) -> None:
    """A uniform sampler and epochs give the same samples, in other batches."""
    for kind in ("uniform", "epoch"):
        gear = section(dataset, kind)
        wanted = alone(gear, 4).reshape(-1, 3)
        with Replay({**gear, "batch_size": BATCH}) as replay:
            for _ in range(2):
                replay.sample()
            state = replay.state_dict()
        assert (alone(gear, 3, 8, state).reshape(-1, 3) == wanted[2 * BATCH :]).all()


# ---- on each rank --------------------------------------------------------------------------------


class NamedModel(Model):
    """As Model, for a Trainer: named tensors in, a dict with the loss out. Keeps the codes that it
    gets.
    """

    def __init__(self, codes: list[int]) -> None:
        super().__init__(12)
        self._codes = codes

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> dict[str, torch.Tensor]:
        self._codes += action[:, 0].long().tolist()
        return {"loss": super().forward({"observation": observation, "action": action})}


def run_pages(
    out: Path, runs: dict[str, Any], trainers: list[str], progress: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run train.py and the loop of statistics.md with their configs, and programs of
    hugging-face.md.
    """
    found: dict[str, Any] = {
        name: train(name, config, steps, out) for name, (steps, config) in runs.items()
    }
    if progress is not None:
        found["progress"] = with_progress(progress)
    if trainers:
        use_gloo()
    sharded = {FSDP: with_fsdp(out / FSDP)} if FSDP in trainers else {}
    return (
        found
        | {mark: with_trainer(mark, out / mark) for mark in trainers if mark != FSDP}
        | sharded
    )


def train(
    name: str, config: dict[str, Any], steps: int, out: Path
) -> tuple[list[Any], list[float]]:
    """Run train.py, or continue it; return samples and losses."""
    samples = []
    losses = []

    def loss_of(engine: Any, batch: Batch) -> Any:
        loss = engine(batch)
        known = batch.sample_number, batch.trajectory_id, batch.anchor
        samples.extend(zip(*(tensor.tolist() for tensor in known), strict=True))
        losses.append(float(loss))
        if engine.gear.config.sampler.kind == "prioritized":
            engine.gear_update_priorities(batch, priorities(batch))
        return loss

    file = out / f"{name}.config.{dist.get_rank()}.json"
    file.write_text(json.dumps(config))
    helpers = {"loss_of": loss_of, "make_model": lambda: Model(12)}
    run_program(
        "change-ranks.md", "load_universal", [str(file), str(out / name), str(steps)], **helpers
    )
    return samples, losses


def use_gloo() -> None:
    """Give accelerate a backend for DeepSpeed's ranks on CPUs, where it has none."""
    from accelerate import PartialState

    original = PartialState.__init__

    def with_gloo(self: Any, cpu: bool = False, **options: Any) -> None:
        original(self, cpu, **{"backend": "gloo", **options})

    PartialState.__init__ = with_gloo


def with_trainer(mark: str, folder: Path) -> list[int]:
    """Run a program of hugging-face.md half-way, and then from there; return the codes of its
    batches.
    """
    from accelerate.state import AcceleratorState

    codes: list[int] = []
    os.chdir(folder)  # has ds_config.json
    make_model: Callable[[], torch.nn.Module] = lambda: NamedModel(codes)  # noqa: E731
    if mark == PACKED:
        make_model = lambda: text_model(codes)  # noqa: E731
    for until in (HALF, STEPS):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        run_program("hugging-face.md", mark, [str(until), str(HALF)], make_model=make_model)
    return codes


def with_fsdp(folder: Path) -> dict[str, Any]:
    """Run the program of fsdp.md half-way and on, and in one piece; return texts and weights of
    both.
    """
    os.chdir(folder)  # has gear.json
    found = {}
    for name, ends in {"resumed": (HALF, STEPS), "whole": (STEPS,)}.items():
        texts = list[int]()
        models = list[torch.nn.Module]()

        def make_model(
            texts: list[int] = texts, models: list[torch.nn.Module] = models
        ) -> torch.nn.Module:
            torch.manual_seed(0)
            models.append(text_model(texts))
            return models[-1]

        for until in ends:
            run_program("fsdp.md", FSDP, [str(until), str(HALF)], make_model=make_model)
        weights = [parameter.full_tensor().detach() for parameter in models[-1].parameters()]
        found[name] = texts, torch.cat([weight.flatten() for weight in weights]).numpy()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree("out")
        dist.barrier()
    return found


def text_model(texts: list[int]) -> torch.nn.Module:
    """Return a small language model that keeps the texts that it gets."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=99, hidden_size=16, intermediate_size=32, **heads)
    )
    keep = lambda _, args, given: texts.extend(given["input_ids"].unique().tolist())  # noqa: E731
    model.register_forward_pre_hook(keep, with_kwargs=True)
    return model


def with_progress(config: dict[str, Any]) -> str:
    """Run the loop of statistics.md; return what this rank prints."""
    known: dict[str, Any] = {}
    exec(page_code("statistics.md", "engine.gear.progress()"), known)
    model = Model(12)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        known["train"](engine, lambda engine, batch: engine(batch), LOOP)
    engine.destroy()
    return printed.getvalue()

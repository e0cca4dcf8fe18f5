"""What DeepSpeed must have for us: a version that moves one of these names fails here, by the name."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from deepspeed_gear.distributed import deepspeed_compat
from deepspeed_gear.errors import ConfigError


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, names in deepspeed_compat.CONTRACT.items() for name in names]
)
def test_deepspeed_has_what_is_used(where: str, name: str) -> None:
    module, _, kind = where.partition(":")
    holder = importlib.import_module(module)
    holder = getattr(holder, kind) if kind else holder
    assert hasattr(holder, name), f"{where.rstrip(':')} has no {name} any more: see compat.py"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in deepspeed_compat.ATTRIBUTES.items() for name in names]
)
def test_engines_set_what_is_used(kind: str, name: str) -> None:
    """Attributes of instances, by the source of what sets them."""
    modules = {
        "DeepSpeedEngine": "runtime.engine",
        "PipelineEngine": "runtime.pipe.engine",
        "DeepSpeedZeroOptimizer": "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer_Stage3": "runtime.zero.stage3",
        "BF16_Optimizer": "runtime.bf16_optimizer",
    }
    module = importlib.import_module(f"deepspeed.{modules[kind]}")
    source = inspect.getsource(getattr(module, kind))
    assert f"self.{name}" in source, f"{kind} sets no {name} any more: see compat.py"


def test_an_engine_with_a_schedule_of_its_own_is_refused() -> None:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    deepspeed_compat.check_engine(PipelineEngine.__new__(PipelineEngine))
    with pytest.raises(ConfigError, match="must be a PipelineEngine or no pipeline, got 'DualPipeVEngine'"):
        deepspeed_compat.check_engine(DualPipeVEngine.__new__(DualPipeVEngine))


def test_the_pipeline_engine_is_known_by_its_name() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert PipelineEngine.__name__ == deepspeed_compat.PIPELINE
    assert list(inspect.signature(PipelineEngine.train_batch).parameters)[:2] == ["self", "data_iter"]
    assert "num_micro_batches" in inspect.signature(PipelineEngine.eval_batch).parameters


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [
        ("tensor_model_parallel", "pipeline_model_parallel"),
        ("slice_parallel", "pipe_parallel"),
        ("model_parallel", None),
    ],
)
def test_the_names_of_an_mpu(tensor: str, stages: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table of docs/how-to/megatron-mpu.md has them."""
    answers = {"data_parallel": (4, 5), tensor: (1, 2), "sequence_parallel": (3, 4)}
    if stages is not None:
        answers[stages] = (2, 3)
    mpu = SimpleNamespace()
    for name, (rank, world) in answers.items():
        setattr(mpu, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(mpu, f"get_{name}_world_size", lambda world=world: world)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 120)
    engine = SimpleNamespace(mpu=mpu, mesh_device=None, dp_world_size=5, autotp_size=lambda: 1)
    place = deepspeed_compat.place_of(engine)
    assert place.coordinates == (0 if stages is None else 2, 4, 3, 1)
    assert place.worlds == (1 if stages is None else 3, 5, 4, 2)

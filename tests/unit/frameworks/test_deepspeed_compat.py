"""What DeepSpeed must have for us: a version that moves one of these names fails here,
by the name.
"""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.frameworks import deepspeed_compat, engine_place

ON_GRADIENTS = """managed_gradient_accumulation was_step_applied get_data_types gradient_clipping
    postscale_gradients gradient_predivide_factor zero_quantized_gradients zenflow_config zero_reduce_scatter
    zero_contiguous_gradients zero_reduce_bucket_size fp16_enabled communication_data_type
    is_deepcompile_enabled backward step""".split()
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
ZERO = (
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
)
CONTRACT = {
    ENGINE: [*deepspeed_compat.REQUIRED, *ON_GRADIENTS, deepspeed_compat.STEPPING],
    PIPELINE: "train_batch eval_batch set_train_batch_size set_dataiterator".split(),
    "deepspeed.runtime.pipe.topology:PipelineParallelGrid": """get_data_parallel_rank
        get_data_parallel_world_size get_slice_parallel_rank get_slice_parallel_world_size
        get_pipe_parallel_rank get_pipe_parallel_world_size""".split(),
    "deepspeed.utils.groups:": """mpu mesh_device get_data_parallel_rank get_data_parallel_world_size
        get_tensor_model_parallel_rank get_tensor_model_parallel_world_size
        get_tensor_model_parallel_group _get_sequence_data_parallel_group""".split(),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:": """initialize_sequence_parallel
        get_sequence_parallel_rank get_sequence_parallel_world_size""".split(),
}
# Attributes that exist on instances only: set in the constructor.
ATTRIBUTES = {
    ENGINE: """mpu mesh_device dp_world_size monitor global_rank config global_steps global_samples
        loaded_checkpoint_mp_world_size optimizer gradient_average sequence_parallel_size
        enable_backward_allreduce has_moe_layers _unmanaged_backward_count""".split(),
    **{where: ["dp_process_group"] for where in ZERO},
    PIPELINE: "grid micro_batches".split(),
}


def named(where: str) -> Any:
    module, _, kind = where.partition(":")
    found = importlib.import_module(module)
    return getattr(found, kind) if kind else found


@pytest.mark.parametrize("where", CONTRACT)
def test_deepspeed_has_what_is_used(where: str) -> None:
    missing = [name for name in CONTRACT[where] if not hasattr(named(where), name)]
    assert not missing, f"{where} has them no more: see deepspeed_compat.py"


@pytest.mark.parametrize("where", ATTRIBUTES)
def test_engines_set_what_is_used(where: str) -> None:
    """Attributes of instances, by the source of what sets them."""
    source = inspect.getsource(named(where))
    missing = [name for name in ATTRIBUTES[where] if f"self.{name}" not in source]
    assert not missing, f"{where} sets them no more: see deepspeed_compat.py"


def test_an_engine_with_a_schedule_of_its_own_is_refused() -> None:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    deepspeed_compat.check_engine(PipelineEngine.__new__(PipelineEngine))
    with pytest.raises(
        ConfigError, match="must be a PipelineEngine or no pipeline, got 'DualPipeVEngine'"
    ):
        deepspeed_compat.check_engine(DualPipeVEngine.__new__(DualPipeVEngine))


def test_the_pipeline_engine_is_known_by_its_name() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert PipelineEngine.__name__ == engine_place.PIPELINE
    assert list(inspect.signature(PipelineEngine.train_batch).parameters)[:2] == [
        "self",
        "data_iter",
    ]
    assert "num_micro_batches" in inspect.signature(PipelineEngine.eval_batch).parameters


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [
        ("tensor_model_parallel", "pipeline_model_parallel"),
        ("slice_parallel", "pipe_parallel"),
        ("model_parallel", None),
    ],
)
def test_the_names_of_an_mpu(
    tensor: str, stages: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    place = engine_place.place_of(engine)
    assert place.coordinates == (0 if stages is None else 2, 4, 3, 1)
    assert place.worlds == (1 if stages is None else 3, 5, 4, 2)

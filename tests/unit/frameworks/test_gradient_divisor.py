"""Rules of the gradient divisor: formulas, refusals, and what a variable number of micro batches
needs.
"""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.frameworks.deepspeed_compat import GradientSettings
from deepspeed_gear.frameworks.gradient_divisor import (
    check_accumulation,
    engine_divisor,
    gradient_divisor,
)

CLASSES = {
    0: "SGD",
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}


def settings(stage: int, losses: int = 4, sequence: int = 1, **options: Any) -> GradientSettings:
    known = {"optimizer": CLASSES[stage], "group_sizes": (losses,), **options}
    return GradientSettings(stage=stage, losses=losses, sequence=sequence, **known)


@pytest.mark.parametrize(
    ("found", "divisor"),
    [
        (settings(0), 4.0),
        (settings(2, sequence=2), 2.0),
        (settings(3, sequence=2), 4.0),
        (settings(3, sequence=2, reduce_scatter=False), 2.0),
        (settings(3, sequence=2, reduce_scatter=False, contiguous=False), 4.0),
        (settings(1, averages=False), 1.0),
        (settings(1, predivide=4.0), 4.0),  # with its reduce-scatter the factor is not used
        (settings(1, sequence=2, predivide=4.0, reduce_scatter=False), 4.0),
        (settings(1, sequence=2, predivide=3.0, reduce_scatter=False), 2.0),
        (settings(1, sequence=2, predivide=4.0, reduce_scatter=False, postscales=False), 2.0),
        (settings(3, predivide=4.0, reduce_scatter=False), 16.0),
        (settings(3, predivide=3.0, reduce_scatter=False), 4.0),
        (settings(3, fits_bucket=False, reduce_scatter=False), 4.0),  # both ways divide by the same
        (settings(3, losses=2, group_sizes=(2, 4)), 2.0),  # zero.Init before AutoTP
        (settings(2, accumulation=3, is_managed=True), 12.0),
        (settings(1, losses=3, optimizer="BF16_Optimizer"), 3.0),
    ],
)
def test_the_divisor_of_an_engine(found: GradientSettings, divisor: float) -> None:
    assert engine_divisor(found) == divisor


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (settings(0, is_pipeline=True), "engine"),
        (settings(2, is_compiled=True), "compile.deepcompile"),
        (settings(0, is_reduced=False, optimizer="OnebitAdam"), "optimizer"),
        (settings(3, optimizer="SuperOffloadOptimizer_Stage3"), "zero_optimization"),
        (settings(2, optimizer="zenflow"), "zero_optimization"),
        (settings(3, is_quantized=True), "zero_optimization.zero_quantized_gradients"),
        (settings(0, is_fp16=True), "zero_optimization.stage"),
        (settings(0, has_sparse=True, predivide=2.0), "gradient_predivide_factor"),
        (settings(1, sequence=2, has_experts=True), "model"),
        (settings(1, sequence=2, optimizer="BF16_Optimizer"), "zero_optimization.stage"),
        (settings(2, sequence=2, group_sizes=(2,)), "mesh_param"),
        (settings(0, group_sizes=(2,)), "gradients"),
        (
            settings(3, sequence=2, reduce_scatter=False, fits_bucket=False),
            "zero_optimization.reduce_bucket_size",
        ),
    ],
)
def test_an_engine_without_one_divisor_is_refused(found: GradientSettings, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_divisor(found)
    assert error.value.name == name
    assert error.value.remedy


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (settings(2, is_managed=True), "managed_gradient_accumulation"),
        (settings(2, accumulation=4), "gradient_accumulation_steps"),
        (settings(2, weights="bfloat16", sums="bfloat16"), "data_types.grad_accum_dtype"),
        (settings(2, has_experts=True), "gear.pack.pad.to"),
    ],
)
def test_what_a_variable_number_of_micro_batches_needs(found: GradientSettings, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_accumulation(found, "multiple")
    assert error.value.name == name
    assert error.value.remedy


def test_defaults_that_change_gradients_are_named() -> None:
    assert check_accumulation(settings(2, has_experts=True), "step") == []
    given = {"grad_accum_dtype", "gradient_clipping", "communication_data_type"}
    rounded = {"weights": "bfloat16", "messages": "bfloat16", "clipping": 1.0}
    stated = settings(2, given=frozenset(given), **rounded)
    assert check_accumulation(stated, "multiple") == []
    implied = settings(2, given=frozenset({"grad_accum_dtype"}), sums="bfloat16", **rounded)
    notes = check_accumulation(implied, "multiple")
    assert [note.split(" ")[0] for note in notes] == ["gradient_clipping", "gradients", "gradients"]
    assert "DeepSpeed's default" in notes[0]
    assert "bfloat16" in notes[1]
    assert "communication_data_type" in notes[2]


def test_a_module_alone_and_what_is_none() -> None:
    assert gradient_divisor(nn.Linear(2, 2)) == 1.0
    assert gradient_divisor(torch.compile(nn.Linear(2, 2))) == 1.0
    with pytest.raises(ConfigError, match="must belong to a supported framework, got 'dict'"):
        gradient_divisor({})

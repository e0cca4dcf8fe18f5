"""TRL's GRPOTrainer with packed training steps, on two ranks, against TRL's own padded step."""

import importlib.util
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from engine_parts import flat_weights
from gear_support import ROOT, prefix, shared_files
from process_support import call_on_ranks

Run = tuple[
    list[dict[str, float]], np.ndarray
]  # what the trainer has logged by step, and the last weights
HAS_TRL = all(
    importlib.util.find_spec(name) for name in ("trl", "datasets", "transformers", "accelerate")
)
pytestmark = [
    pytest.mark.skipif(not HAS_TRL, reason="trl is not installed"),
    pytest.mark.timeout(3600),
]
# two epochs of each rollout batch: step 3 is the first of its second one
SAVED = 3
STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"beta": 0.1, "num_iterations": 2},
    "grpo": {"num_iterations": 2, "epsilon": 0.01, "mask_truncated_completions": True},
    "dr_grpo": {"importance_sampling_level": "sequence", "num_iterations": 2},
}
# With 16-bit weights: the ZeRO stage, the dtype in which gradients are summed, and how far the two
# changes of the weights may be apart, relative to their size. bfloat16 has 8 bits.
BF16: dict[str, tuple[int, str | None, float]] = {
    "bf16.zero2": (2, None, 2**-6),
    "bf16.zero0": (0, "bf16", 2**-4),
}
CLIPPED = {
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
}  # of tokens; of TRL, what the ratio is of
EQUAL = CLIPPED | {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "num_tokens",
}
EQUAL |= {"entropy", "kl", "grad_norm", "loss"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Train on two ranks; what the first one has logged and its last weights, by run."""
    first, second = call_on_ranks(
        2, train_all, tmp_path_factory.mktemp("trl"), timeout_s=3600.0, HF_HUB_OFFLINE="1"
    )
    assert shared_files(prefix()) == []
    assert first.keys() == second.keys()
    for name, (_, weights) in first.items():
        assert (weights == second[name][1]).all(), name
    return first


@pytest.mark.parametrize("loss_type", CASES)
def test_packed_steps_equal_padded_ones(ran: dict[str, Run], loss_type: str) -> None:
    """Two steps of SGD with rate 1 over one generation: the second one has ratios, and clips."""
    padded = ran[f"{loss_type}.padded"]
    packed = ran[f"{loss_type}.packed"]
    check_equal(padded, packed, ran["begin"][1], CLIPPED if loss_type == "dr_grpo" else set())
    assert ("kl" in packed[0][0]) == (loss_type == "dapo")
    assert loss_type == "dapo" or packed[0][1]["clip_ratio/region_mean"] > 0


def test_a_run_resumes_inside_a_rollout_batch(ran: dict[str, Run]) -> None:
    """The table, the position, the prompts and the random numbers continue.

    Both ranks add at the same time: the order of groups in the table differs, and with it that of
    sums.
    """
    whole = ran["whole"]
    rest = ran["rest"]
    assert [entry["step"] for entry in rest[0]] == list(
        range(1, STEPS + 1)
    )  # with the history of the save
    check_equal(whole, rest, ran["begin"][1])
    assert whole[0][SAVED].get("reward") is None  # a second epoch generates nothing
    assert whole[0][SAVED + 1]["reward"] > 0


@pytest.mark.parametrize("name", BF16)
def test_packed_steps_with_16_bits_are_near_padded_ones(ran: dict[str, Run], name: str) -> None:
    """One step of SGD, so that the change is the gradient: by a second one, rounding has put some
    tokens on the other side of the clipping.
    """
    padded = ran[f"{name}.padded"]
    packed = ran[f"{name}.packed"]
    begin = ran["begin"][1]
    change = np.linalg.norm(padded[1] - begin)
    assert change > 0.1
    assert np.linalg.norm(packed[1] - padded[1]) < BF16[name][2] * change
    assert padded[0][0]["reward"] == packed[0][0]["reward"]
    for first, second in zip(padded[0], packed[0], strict=True):
        for metric in ("loss", "grad_norm", "entropy"):
            assert second[metric] == pytest.approx(first[metric], rel=0.02), metric


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")
def test_packed_steps_of_an_adapter_equal_padded_ones(ran: dict[str, Run]) -> None:
    """The reference is the model without its adapter."""
    padded = ran["lora.padded"]
    packed = ran["lora.packed"]
    assert len(padded[1]) > len(ran["begin"][1])
    assert packed[0][1]["kl"] > 1e-6
    np.testing.assert_allclose(packed[1], padded[1], atol=1e-6)
    for first, second in zip(padded[0], packed[0], strict=True):
        for name in ("kl", "grad_norm", "loss"):
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5), name


def test_a_packed_trainer_evaluates_as_trl_does(ran: dict[str, Run]) -> None:
    """Before the first step, so that both draw the same responses."""
    padded = ran["evaluation.padded"][0][0]
    packed = ran["evaluation.packed"][0][0]
    assert padded["step"] == packed["step"] == 0
    for name in ("eval_loss", "eval_reward", "eval_entropy", "eval_completions/mean_length"):
        assert packed[name] == pytest.approx(padded[name], rel=1e-5), name


def check_equal(one: Run, other: Run, begin: np.ndarray, but_for: Set[str] = frozenset()) -> None:
    """Check that two runs from the same weights end at the same ones, by steps with the same
    metrics.
    """
    change = np.abs(one[1] - begin).max()
    assert change > 0.01
    assert np.abs(one[1] - other[1]).max() < 1e-4 * change
    for first, second in zip(one[0], other[0], strict=True):
        assert EQUAL & first.keys() == EQUAL & second.keys()
        for name in EQUAL & first.keys() - but_for:
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5), name


# ---- on each rank --------------------------------------------------------------------------------


def train_all(out: Path) -> dict[str, Run]:
    """Run every trainer; return log entries and weights of each run."""
    sys.path.insert(0, str(ROOT / "examples"))
    import transformers
    import trl_grpo

    trl_grpo.use_gloo()
    # transformers looks for a GPU; its remedy, `use_cpu`, is for processes without DeepSpeed.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if dist.get_rank() == 0:
        trl_grpo.save_model(out / "model")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    found: dict[str, Run] = {"begin": ([], flat_weights(model))}
    for loss_type, options in CASES.items():
        for kind in ("padded", "packed"):
            name = f"{loss_type}.{kind}"
            found[name] = train(trl_grpo, kind, out, name, 2, loss_type=loss_type, **options)
    for bf16, (stage, sums, _) in BF16.items():
        options = {"num_iterations": 2, "bf16": True, "stage": stage}
        for kind in ("padded", "packed"):
            name = f"{bf16}.{kind}"
            found[name] = train(trl_grpo, kind, out, name, 1, sums=sums, **options)
    if importlib.util.find_spec("peft"):
        for kind in ("padded", "packed"):
            name = f"lora.{kind}"
            options = {"beta": 0.1, "num_iterations": 2, "lora": True}
            found[name] = train(trl_grpo, kind, out, name, 2, **options)
    for kind in ("padded", "packed"):
        name = f"evaluation.{kind}"
        options = {"eval_strategy": "steps", "eval_on_start": True, "eval_steps": 10}
        found[name] = train(trl_grpo, kind, out, name, 1, logged="eval_entropy", **options)
    packed = {"save_steps": SAVED, "num_iterations": 2}
    found["whole"] = train(trl_grpo, "packed", out, "whole", STEPS, **packed)
    found["rest"] = train(
        trl_grpo, "packed", out, "whole", STEPS, resume=f"checkpoint-{SAVED}", **packed
    )
    return found


def train(
    example: Any,
    kind: str,
    out: Path,
    name: str,
    steps: int,
    resume: str | None = None,
    stage: int = 2,
    sums: str | None = None,
    logged: str = "entropy",
    lora: bool = False,
    **options: Any,
) -> Run:
    """Train by SGD with a trainer; return its log entries and the weights.

    Args:
        sums: Dtype in which gradients are summed; None: the default.
        logged: Name that the returned log entries have.
        lora: Whether an adapter is trained instead of the model.
    """
    from trl import GRPOConfig, GRPOTrainer

    config = example.ds_config(256) | {"zero_optimization": {"stage": stage}}
    if sums is not None:
        config["data_types"] = {"grad_accum_dtype": sums}
    if kind == "padded":
        del config["gear"]
    else:
        config["gear"]["shared_memory"] = {"prefix": prefix()}
    args = GRPOConfig(
        str(out / name),
        deepspeed=config,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=12,
        per_device_eval_batch_size=12,
        num_generations=8,
        max_completion_length=24,
        **{
            "save_strategy": "steps" if "save_steps" in options else "no",
            "bf16": False,
            **options,
        },
    )
    trainer_class = GRPOTrainer if kind == "padded" else example.PackedGRPOTrainer
    model = str(out / "model")
    prompts = example.prompts(64)
    data: dict[str, Any] = {"train_dataset": prompts, "eval_dataset": prompts.select(range(6))}
    if lora:
        from peft import LoraConfig

        data["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trainer_class(model, example.vowels, args=args, **data)
    trainer.train(resume_from_checkpoint=resume and str(out / name / resume))
    weights = flat_weights(trainer.deepspeed.module)
    trainer.deepspeed.destroy()
    return [entry for entry in trainer.state.log_history if logged in entry], weights

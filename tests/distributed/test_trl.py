"""TRL's GRPOTrainer with packed training steps: examples/trl_grpo.py against TRL's own
padded step.
"""

import importlib.util
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import ROOT, prefix, shared_files
from process_support import call_on_ranks

import deepspeed_gear

Run = tuple[
    list[dict[str, float]], np.ndarray
]  # what the trainer has logged by step, and the last weights
HAS_TRL = all(
    importlib.util.find_spec(name) for name in ("trl", "datasets", "transformers", "accelerate")
)
pytestmark = [
    pytest.mark.skipif(not HAS_TRL, reason="trl is not installed"),
    pytest.mark.timeout(600),
]
# two epochs of each rollout batch: step 3 is the first of its second one
SAVED = 3
STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"beta": 0.1, "num_iterations": 2},
    "grpo": {"num_iterations": 2, "epsilon": 0.01, "mask_truncated_completions": True},
    "dr_grpo": {"importance_sampling_level": "sequence", "num_iterations": 2},
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
        2, train_all, tmp_path_factory.mktemp("trl"), timeout_s=280.0, HF_HUB_OFFLINE="1"
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
    if dist.get_rank() == 0:
        trl_grpo.save_model(out / "model")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    found: dict[str, Run] = {"begin": ([], flat(model))}
    for loss_type, options in CASES.items():
        for kind in ("padded", "packed"):
            name = f"{loss_type}.{kind}"
            found[name] = train(trl_grpo, kind, out, name, 2, loss_type=loss_type, **options)
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
    **options: Any,
) -> Run:
    """Train by SGD with a trainer; return its log entries and the weights."""
    from trl import GRPOConfig, GRPOTrainer

    config = example.ds_config(256)
    if kind == "padded":
        del config["gear"], config["managed_gradient_accumulation"]
    else:
        config["gear"]["shared_memory"] = {"prefix": prefix()}
    deepspeed_gear.disable()  # reference models get no replay
    args = GRPOConfig(
        str(out / name),
        deepspeed=config,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=12,
        num_generations=8,
        max_completion_length=24,
        **{"save_strategy": "steps" if "save_steps" in options else "no", **options},
    )
    trainer_class = GRPOTrainer if kind == "padded" else example.PackedGRPOTrainer
    model = str(out / "model")
    trainer = trainer_class(model, example.vowels, args=args, train_dataset=example.prompts(64))
    deepspeed_gear.enable()
    trainer.train(resume_from_checkpoint=resume and str(out / name / resume))
    weights = flat(trainer.model)
    trainer.deepspeed.destroy()
    return [entry for entry in trainer.state.log_history if "entropy" in entry], weights


def flat(model: torch.nn.Module) -> np.ndarray:
    """Return all weights."""
    return torch.cat([weight.detach().float().flatten() for weight in model.parameters()]).numpy()
